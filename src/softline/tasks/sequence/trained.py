"""From recipes of sequences to their tasks: encoder, classifier, data."""

from collections.abc import Callable, Mapping
from typing import Any

from accelerate import Accelerator
from torch import nn

from softline.data.sequences.interface import SequenceSamples
from softline.engine.evaluate import Evaluation, evaluate
from softline.errors import UserError
from softline.tasks.images import Notify, log
from softline.tasks.sequence.build import open_sequences
from softline.tasks.sequence.recipe import SequenceRecipe
from softline.tasks.sequence.task import SequenceClassification


def evaluate_sequence(
    model: nn.Module,
    facts: Mapping[str, Any],
    recipe: SequenceRecipe,
    accelerator: Accelerator,
    *,
    batch_size: int = 32,
    workers: int = 0,
    notify: Notify = log.info,
    progress: Callable[[int, int | None], None] = lambda *_: None,
) -> Evaluation:
    """On the validation data that the recipe names, which must be there and fit the model."""
    source = open_sequences(recipe.data, recipe.data.val_split, make=False, notify=notify)
    for name, found in (("classes", list(source.classes)), ("vocabulary", source.vocabulary), ("parts", source.parts)):
        if found != facts[name]:
            raise UserError(f"{recipe.data.source} does not fit the model: {name} {found}, trained on {facts[name]}")
    task = SequenceClassification(model, **facts, val_set=SequenceSamples(source, by_length=True))
    model.to(accelerator.device)
    result = evaluate(task, model, accelerator, batch_size=batch_size, workers=workers, progress=progress)
    assert result is not None, "nothing stops it"
    return result
