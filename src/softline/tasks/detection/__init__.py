"""Boxes, and masks, of the objects in images."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from softline.engine.task import Setup, TaskDefinition, check_classes
from softline.tasks.detection.recipe import DetectionRecipe

if TYPE_CHECKING:
    from torch import nn

    from softline.tasks.detection.task import Detection
    from softline.tasks.detection.trained import TrainedDetector


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

    def trained(self, model: "nn.Module", recipe: DetectionRecipe, facts: Mapping[str, Any]) -> "TrainedDetector":
        from softline.tasks.detection.trained import TrainedDetector

        return TrainedDetector(recipe.model.name, model, facts["classes"], recipe)


definition = DetectionDefinition()
