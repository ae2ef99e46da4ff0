"""A class for each pixel."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from softline.engine.task import Setup, TaskDefinition, check_classes, choose_classes, numbered
from softline.tasks.segmentation.recipe import SegmentationRecipe

if TYPE_CHECKING:
    from torch import nn

    from softline.engine.trained import Trained
    from softline.tasks.segmentation.task import Segmentation
    from softline.tasks.segmentation.trained import TrainedSegmenter


class SegmentationDefinition(TaskDefinition[SegmentationRecipe]):
    recipe_type = SegmentationRecipe

    # the extra ``dense`` is needed from here on

    def build(self, recipe: SegmentationRecipe, setup: Setup) -> "Segmentation":
        from softline.tasks.segmentation.build import build_segmentation

        return build_segmentation(recipe, setup)

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        check_classes(facts)

    def network(self, recipe: SegmentationRecipe, facts: Mapping[str, Any]) -> "nn.Module":
        from softline.tasks.segmentation.build import build_segmenter

        return build_segmenter(recipe.without_weights(), len(facts["classes"]))

    def known_facts(self, recipe: SegmentationRecipe, classes: Sequence[str] | None) -> dict[str, Any]:
        """Return the classes of the layout, or those that data.classes names or counts."""
        from softline.data.semantic.classes import ADE20K, CITYSCAPES

        layout, own = recipe.data.layout, recipe.data.classes
        layouts = {"ade20k": ADE20K, "cityscapes": [known.name for known in CITYSCAPES]}
        known = layouts.get(layout) or (numbered(own) if isinstance(own, int) else own)
        return {"classes": choose_classes(classes, known, f"data.layout {layout}")}

    def trained(self, model: "nn.Module", recipe: SegmentationRecipe, facts: Mapping[str, Any]) -> "TrainedSegmenter":
        from softline.tasks.segmentation.trained import TrainedSegmenter

        return TrainedSegmenter(recipe.model.name, model, facts["classes"], recipe)

    def reopen(self, network: "nn.Module", described: Mapping[str, Any]) -> "Trained":
        from softline.engine.graph import BATCH, HEIGHT, IMAGE_AXES, WIDTH
        from softline.engine.shipping import check_ends, check_sides, floats

        trained = super().reopen(network, described)
        recipe: Any = trained.recipe
        check_sides(short_side=recipe.data.short_side, long_side=recipe.data.long_side)
        logits = floats(BATCH, len(trained.classes), HEIGHT, WIDTH)
        check_ends(network, floats(*IMAGE_AXES), {"logits": logits})
        return trained


definition = SegmentationDefinition()
