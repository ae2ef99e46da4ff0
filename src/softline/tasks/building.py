"""From any recipe to the task it names."""

from pathlib import Path

from softline.engine.recipe import Recipe
from softline.errors import UserError
from softline.tasks import Task
from softline.tasks.classification.build import build_classification
from softline.tasks.classification.recipe import ClassificationRecipe
from softline.tasks.detection.recipe import DetectionRecipe
from softline.tasks.images import Notify, log
from softline.tasks.segmentation.recipe import SegmentationRecipe
from softline.tasks.sequence.build import TellPreparing, build_sequence
from softline.tasks.sequence.recipe import SequenceRecipe


def build_task(
    recipe: Recipe, *, rank: int = 0, notify: Notify = log.info, preparing: TellPreparing = lambda *_: None
) -> Task:
    """The task with its data and its network.

    notify: hears what was left out of the data, and which weights were loaded.
    preparing: hears how far data is that has to be made.
    """
    checkpoint = recipe.model.checkpoint
    if checkpoint is not None and not Path(checkpoint).is_file():
        # before the data, which may take minutes to read
        raise UserError(f"model.checkpoint: no such file: {checkpoint}")
    if isinstance(recipe, ClassificationRecipe):
        return build_classification(recipe, rank=rank, notify=notify)
    if isinstance(recipe, SequenceRecipe):
        return build_sequence(recipe, notify=notify, preparing=preparing)
    # they need further packages
    from softline.tasks.segmentation import build as build_dense

    if isinstance(recipe, DetectionRecipe):
        return build_dense.build_detection(recipe, notify=notify)
    assert isinstance(recipe, SegmentationRecipe), "every type of recipe has its builder"
    return build_dense.build_segmentation(recipe, notify=notify)
