"""Boxes, and masks, of the objects in images."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softline.checks import check_range
from softline.engine.task import Setup, TaskDefinition, check_classes, choose_classes, numbered
from softline.plain import check_entries
from softline.tasks.detection.recipe import DetectionRecipe

if TYPE_CHECKING:
    from torch import nn

    from softline.tasks.detection.task import Detection
    from softline.tasks.detection.trained import TrainedDetector

COCO_CLASSES = 80


class DetectionDefinition(TaskDefinition[DetectionRecipe]):
    recipe_type = DetectionRecipe

    # the extra ``dense`` is needed from here on

    def build(self, recipe: DetectionRecipe, setup: Setup) -> "Detection":
        from softline.tasks.detection.build import build_detection

        return build_detection(recipe, setup)

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        check_classes(facts)

    def network(self, recipe: DetectionRecipe, facts: Mapping[str, Any]) -> "nn.Module":
        from softline.tasks.detection.build import build_detector

        return build_detector(recipe.without_weights(), len(facts["classes"]))

    def known_facts(self, recipe: DetectionRecipe, classes: Sequence[str] | None) -> dict[str, Any]:
        """Return as many classes as COCO has, for a directory named coco, or coco128, which is a part of it."""
        source = recipe.data.source
        known = numbered(COCO_CLASSES) if Path(source).name in ("coco", "coco128") else None
        return {"classes": choose_classes(classes, known, f"data.source {source}", fixed=False)}

    def trained(self, model: "nn.Module", recipe: DetectionRecipe, facts: Mapping[str, Any]) -> "TrainedDetector":
        from softline.tasks.detection.trained import TrainedDetector

        return TrainedDetector(recipe.model.name, model, facts["classes"], recipe)

    def reopen(self, network: "nn.Module", described: Mapping[str, Any]) -> "TrainedDetector":
        from softline.engine.shipping import check_sides, read_description
        from softline.tasks.detection.exported import ExportedDetector, check_detector

        recipe, facts = read_description(described, DetectionRecipe)
        self.check_facts(facts)
        check_entries(facts, {"score_threshold": float}, "facts")
        check_range("score_threshold", facts["score_threshold"], 0, 1, open_high=True)
        check_sides(long_side=recipe.data.long_side)
        check_detector(network)
        detector = ExportedDetector(
            network,
            short_side=recipe.data.short_side,
            long_side=recipe.data.long_side,
            score_threshold=facts["score_threshold"],
            num_classes=len(facts["classes"]),
        )
        return self.trained(detector, recipe, facts)


definition = DetectionDefinition()
