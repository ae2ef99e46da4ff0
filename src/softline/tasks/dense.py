"""Use a trained detector or segmenter: evaluate it, and draw what it finds on images."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from PIL import Image
from torch import nn

from softline.data.images.single import read_image
from softline.engine.evaluate import Evaluation, evaluate
from softline.engine.recipe import Recipe
from softline.errors import UserError
from softline.heads.detectors import Detector
from softline.tasks import Task
from softline.tasks.detection.build import build_detector, detection_val_set
from softline.tasks.detection.recipe import DetectionRecipe
from softline.tasks.detection.task import Detection
from softline.tasks.detection.trained import _detect
from softline.tasks.images import Notify, log
from softline.tasks.segmentation.build import (
    build_segmenter,
    segmentation_val_set,
    windows_of,
)
from softline.tasks.segmentation.recipe import SegmentationRecipe
from softline.tasks.segmentation.task import Segmentation
from softline.tasks.segmentation.trained import _segment


@dataclass(frozen=True)
class Drawn:
    name: str
    """The image's file."""
    found: dict[str, Any]
    """Objects with class, score, box and, where there are masks, COCO's runs of it; or classes with their share of the
    pixels: plain numbers and text."""
    image: Image.Image
    """With what was found drawn on it."""
    labels: Image.Image | None = None
    """Of segmenters: the label of each pixel as a grey value."""


def dense_model(recipe: Recipe, num_classes: int) -> nn.Module:
    """The network of a recipe, which loads no weights."""
    bare: Any = recipe.without_weights()
    if isinstance(recipe, DetectionRecipe):
        return build_detector(bare, num_classes)
    assert isinstance(recipe, SegmentationRecipe), "classification has its own"
    return build_segmenter(bare, num_classes)


def evaluate_dense(
    model: nn.Module,
    classes: Sequence[str],
    recipe: Recipe,
    accelerator: Accelerator,
    *,
    batch_size: int = 1,
    workers: int = 0,
    notify: Notify = log.info,
    progress: Callable[[int, int | None], None] = lambda *_: None,
) -> Evaluation:
    """On the validation data that the recipe names, which must have the model's classes."""
    task: Task
    if isinstance(recipe, DetectionRecipe):
        boxes = detection_val_set(recipe, notify=notify)
        found, task = boxes.source.classes, Detection(model, classes, val_set=boxes, masks=boxes.masks)
    else:
        assert isinstance(recipe, SegmentationRecipe), "classification has its own"
        pixels = segmentation_val_set(recipe, model, notify=notify)
        found = pixels.source.classes
        task = Segmentation(model, classes, val_set=pixels, windows=windows_of(recipe.data))
    if tuple(found) != tuple(classes):
        differ = sorted(set(found) ^ set(classes))
        names = f": {', '.join(differ[:10])} in one of them only" if differ else ", but in another order"
        raise UserError(f"the classes of {recipe.data.source} are not those the model was trained for{names}")
    model.to(accelerator.device)
    result = evaluate(task, model, accelerator, batch_size=batch_size, workers=workers, progress=progress)
    assert result is not None, "nothing stops it"
    return result


def predict_dense(
    model: nn.Module, classes: Sequence[str], recipe: Recipe, paths: Sequence[str], *, score: float = 0.5
) -> Iterator[Drawn]:
    """What is on each image; objects with a higher score than ``score``."""
    model.eval()
    if isinstance(model, Detector):
        # whatever it was trained with
        model.score_threshold = score
    for path in paths:
        image = read_image(path, "RGB")
        if isinstance(recipe, DetectionRecipe):
            yield _detect(model, classes, path, image)
        else:
            assert isinstance(recipe, SegmentationRecipe), "classification has its own"
            yield _segment(model, classes, path, image, recipe)
