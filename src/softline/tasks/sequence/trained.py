"""Trained models of sequences: evaluate them."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from softline.checks import check_option
from softline.data.sequences.interface import SequenceSamples
from softline.data.sequences.lra import has_listops_files
from softline.engine.trained import Evaluator, Measured, Prediction, Trained
from softline.errors import UserError
from softline.tasks.sequence.build import open_sequences
from softline.tasks.sequence.recipe import SequenceRecipe
from softline.tasks.sequence.task import SequenceClassification

BATCH_SIZE = 32


class TrainedSequenceModel(Trained):
    """A model that gives each sequence one of its classes.

    facts: vocabulary, positions and parts of its sequences; see `SequenceClassification`.
    """

    kind = "a model of sequences"
    unit = "sequences"
    recipe: SequenceRecipe

    def __init__(self, name: str, model: nn.Module, recipe: SequenceRecipe, facts: Mapping[str, Any]) -> None:
        super().__init__(name, model, facts["classes"], recipe)
        self.facts = dict(facts)

    def evaluate(self, data: str | None, evaluator: Evaluator, *, split: str | None = None) -> Iterator[Measured]:
        """Measure the accuracy on a split, which must be there already and fit the model.

        data: a directory with the files of the recipe's task.
        """
        given = self.recipe.data
        if data is not None:
            # the benchmark's own expressions are read rather than generated
            generate = None if has_listops_files(Path(data)) else given.generate
            given = dataclasses.replace(given, source=data, generate=generate)
        if split is not None:
            check_option("--split", split, ("train", "val", "test"))
            given = dataclasses.replace(given, val_split=split)  # type: ignore[arg-type]
        source = open_sequences(given, given.val_split, make=False, notify=evaluator.notify)
        expected = {"classes": list(source.classes), "vocabulary": source.vocabulary, "parts": source.parts}
        for name, found in expected.items():
            if found != self.facts[name]:
                raise UserError(f"{given.source} does not fit the model: {name} {found}, trained on {self.facts[name]}")
        task = SequenceClassification(self.model, **self.facts, val_set=SequenceSamples(source, by_length=True))
        yield Measured({"source": given.source, "split": given.val_split}, evaluator.run(task, batch_size=BATCH_SIZE))

    def predict(self, paths: Sequence[str]) -> Iterator[Prediction]:
        raise UserError(f"{self.name} was trained for sequences, not for images")
