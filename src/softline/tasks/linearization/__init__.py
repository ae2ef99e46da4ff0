"""A classifier with another attention learns from the classifier that it was."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from softline.engine.task import Setup
from softline.tasks.classification import ClassificationDefinition
from softline.tasks.linearization.recipe import LinearizationRecipe

if TYPE_CHECKING:
    from torch import nn

    from softline.tasks.classification.trained import Classifier
    from softline.tasks.linearization.task import Linearization


class LinearizationDefinition(ClassificationDefinition[LinearizationRecipe]):
    recipe_type = LinearizationRecipe

    def build(self, recipe: LinearizationRecipe, setup: Setup) -> "Linearization":
        from softline.tasks.linearization.build import build_linearization

        return build_linearization(recipe, setup)

    def network(self, recipe: LinearizationRecipe, facts: Mapping[str, Any]) -> "nn.Module":
        from softline.tasks.linearization.adapters import add_adapters

        network = super().network(recipe, facts)
        return network if recipe.adapters is None else add_adapters(network, recipe.adapters)

    def trained(self, model: "nn.Module", recipe: LinearizationRecipe, facts: Mapping[str, Any]) -> "Classifier":
        from softline.tasks.linearization.adapters import merge_adapters

        return super().trained(merge_adapters(model), recipe, facts)


definition = LinearizationDefinition()
