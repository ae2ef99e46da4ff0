"""Trained models of sequences: evaluate them, classify new sequences."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softline.backbones.sequence import LEAST_TOKENS
from softline.checks import check_integer, check_option
from softline.data.sequences.interface import SequenceSamples
from softline.data.sequences.lra import has_listops_files
from softline.engine.graph import BATCH, LENGTH, Description, Graph, Sizes
from softline.engine.shipping import describe_recipe
from softline.engine.trained import Evaluator, Measured, Trained
from softline.errors import UserError
from softline.tasks.predicting import predict_samples
from softline.tasks.probabilities import Probabilities, class_probabilities
from softline.tasks.sequence.build import open_sequences
from softline.tasks.sequence.recipe import SequenceRecipe
from softline.tasks.sequence.task import SequenceClassification
from softline.tasks.sequence.tokens import TokenSample, list_samples, token_sample

BATCH_SIZE = 32
# of sequences that an exported network is compared with its original on
USUAL_LENGTH = 1024


class TrainedSequenceModel(Trained):
    """A model that gives each sequence one of its classes.

    facts: vocabulary, positions and parts of its sequences; see `SequenceClassification`.
    """

    kind = "a model of sequences"
    unit = "sequences"
    drawings = ("",)
    recipe: SequenceRecipe

    def __init__(self, name: str, model: nn.Module, recipe: SequenceRecipe, facts: Mapping[str, Any]) -> None:
        super().__init__(name, model, facts["classes"], recipe)
        self.facts = dict(facts)

    def graph(self) -> Graph:
        positions, parts = self.facts["positions"], self.facts["parts"]

        def sample(sizes: Sizes) -> Tensor:
            shape = (sizes[BATCH], parts, sizes[LENGTH])
            tokens = torch.randint(1, self.facts["vocabulary"], shape, generator=torch.Generator().manual_seed(0))
            # the second half of every other sequence is padding
            tokens[1::2, :, -(sizes[LENGTH] // 2) :] = 0
            return tokens

        return Graph(
            network=self.model,
            input="tokens",
            axes=(BATCH, None, LENGTH),
            outputs={"logits": (BATCH, None)},
            usual={LENGTH: min(positions, USUAL_LENGTH)},
            least={LENGTH: min(positions, LEAST_TOKENS)},
            most={LENGTH: positions},
            sample=sample,
        )

    def describe(self, fixed: Sizes) -> Description:
        return describe_recipe(self.recipe, self.facts)

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

    def predict(self, inputs: Any, *, top: int = 5, batch_size: int = BATCH_SIZE) -> Any:
        """Classify sequences: return `Probabilities` for a sequence, a list of them for a list of sequences.

        inputs: a sequence is a list, a 1-d array or a 1-d tensor of token ids, or what its tokens are made of: a text
            (text, retrieval), an expression (listops), or an image (image, pathfinder; see
            `softline.data.images.single.to_image`). A `Path` is a file that holds one of these. Of two sequences that
            are compared, a sample is a tuple, or a file in which a tab separates them. Texts are cut to the length that
            the model was trained with.
        top: how many classes the text, the dictionary and the picture of a result have.
        batch_size: the largest number of sequences that the model is given at once.
        """
        check_integer("top", top, 1)
        self.model.eval()
        open_sample = partial(token_sample, data=self.recipe.data, parts=self.facts["parts"])
        return predict_samples(
            inputs,
            list_samples(inputs, self.recipe.data, self.facts["parts"]),
            open_sample,
            partial(self._classify, top=top),
            what="sequence",
            batch_size=batch_size,
        )

    def _classify(self, samples: Sequence[TokenSample], *, top: int) -> list[Probabilities]:
        task = SequenceClassification(self.model, **self.facts)
        # labels are needed to collate, and do not matter
        tokens, _ = task.collate([(sample.parts, 0) for sample in samples])
        with torch.no_grad():
            found = class_probabilities(self.model(tokens.to(self.device)))
        return [
            Probabilities(class_names=self.classes, by_label=values, shown=top, name=sample.name)
            for sample, values in zip(samples, found, strict=True)
        ]
