"""One label for each sequence of tokens, or for two that are compared."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from softline.engine.task import Setup, TaskDefinition, check_classes, choose_classes
from softline.plain import check_entries
from softline.tasks.sequence.recipe import SequenceRecipe

if TYPE_CHECKING:
    from torch import nn

    from softline.engine.trained import Trained
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

    def known_facts(self, recipe: SequenceRecipe, classes: Sequence[str] | None) -> dict[str, Any]:
        """Return the facts of the benchmark's own data; the images of the task image may have other classes."""
        from softline.data.sequences.lra import FORMS
        from softline.tasks.sequence.build import sequence_facts

        data, form = recipe.data, FORMS[recipe.data.name]
        fixed = data.name != "image"
        chosen = choose_classes(classes, form.classes, f"data.name {data.name}", fixed=fixed)
        generated = None if data.generate is None else data.generate.max_length
        length = data.max_length or generated or form.max_length
        return sequence_facts(recipe, form._replace(classes=tuple(chosen), max_length=length))

    def trained(self, model: "nn.Module", recipe: SequenceRecipe, facts: Mapping[str, Any]) -> "TrainedSequenceModel":
        from softline.tasks.sequence.trained import TrainedSequenceModel

        return TrainedSequenceModel(recipe.model.name, model, recipe, facts)

    def reopen(self, network: "nn.Module", described: Mapping[str, Any]) -> "Trained":
        from softline.engine.graph import BATCH, LENGTH
        from softline.engine.shipping import End, check_ends, floats

        trained = super().reopen(network, described)
        logits = floats(BATCH, len(trained.classes))
        check_ends(network, End("tensor(int64)", (BATCH, None, LENGTH)), {"logits": logits})
        return trained


definition = SequenceDefinition()
