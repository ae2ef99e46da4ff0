"""One label for each sequence of tokens, or for two that are compared."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from softline.engine.task import Setup, TaskDefinition, check_classes
from softline.plain import check_entries
from softline.tasks.sequence.recipe import SequenceRecipe

if TYPE_CHECKING:
    from torch import nn

    from softline.tasks.sequence.task import SequenceClassification
    from softline.tasks.sequence.trained import TrainedSequenceModel


class SequenceDefinition(TaskDefinition[SequenceRecipe]):
    recipe_type = SequenceRecipe

    def build(self, recipe: SequenceRecipe, setup: Setup) -> "SequenceClassification":
        from softline.tasks.sequence.build import build_sequence

        return build_sequence(recipe, setup)

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        check_classes(facts)
        check_entries(facts, {"vocabulary": int, "positions": int, "parts": int}, "facts")

    def network(self, recipe: SequenceRecipe, facts: Mapping[str, Any]) -> "nn.Module":
        from softline.tasks.sequence.build import sequence_model

        return sequence_model(recipe, facts)

    def trained(self, model: "nn.Module", recipe: SequenceRecipe, facts: Mapping[str, Any]) -> "TrainedSequenceModel":
        from softline.tasks.sequence.trained import TrainedSequenceModel

        return TrainedSequenceModel(recipe.model.name, model, recipe, facts)


definition = SequenceDefinition()
