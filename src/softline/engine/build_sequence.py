"""From recipes of sequences to their tasks: encoder, classifier, data."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from softline.backbones.official import check_keys
from softline.backbones.sequence import SequenceClassifier, SequenceEncoder
from softline.checkpoints import read_weights
from softline.data.listops import ListOpsSettings
from softline.data.lra import open_lra
from softline.data.sequences import SequenceSamples, SequenceSource, Split, length_groups
from softline.engine import distributed
from softline.engine.build import Notify, log
from softline.engine.evaluate import Evaluation, evaluate
from softline.engine.recipe import ListOpsRecipe, SequenceData, SequenceRecipe
from softline.tasks.sequence import SequenceClassification

TellPreparing = Callable[[str, int, int], None]
"""Hears what is made before a run, how many of it there are, and of how many."""


def build_sequence(
    recipe: SequenceRecipe, *, notify: Notify = log.info, preparing: TellPreparing = lambda *_: None
) -> SequenceClassification:
    data = recipe.data
    with distributed.first_process_first():
        train = open_sequences(data, data.train_split, notify=notify, preparing=preparing)
    val = open_sequences(data, data.val_split, notify=notify)
    notify(f"{data.name}: {len(train):,} sequences to train on, {len(val):,} to validate")
    if train.classes != val.classes:
        raise ValueError(f"{data.train_split} and {data.val_split} of {data.source} have different classes")
    facts = sequence_facts(recipe, train)
    model = sequence_model(recipe, facts)
    if recipe.model.checkpoint is not None:
        _load(model, recipe.model.checkpoint, notify)
    return SequenceClassification(
        model,
        **facts,
        train_set=SequenceSamples(train),
        val_set=SequenceSamples(val, by_length=True),
        groups=_groups(train, recipe) if data.group_lengths else None,
    )


def sequence_facts(recipe: SequenceRecipe, source: SequenceSource) -> dict[str, Any]:
    """What of the data decides on the network."""
    positions = recipe.model.options.get("positions", _power_of_two(source.max_length))
    if positions < source.max_length:
        raise ValueError(
            f"model.options.positions ({positions}) must be at least the {source.max_length} tokens that a sequence of "
            f"{recipe.data.name} may have"
        )
    return {
        "classes": list(source.classes),
        "vocabulary": source.vocabulary,
        "positions": positions,
        "parts": source.parts,
    }


def sequence_model(recipe: SequenceRecipe, facts: Mapping[str, Any]) -> nn.Module:
    """The network of a recipe without any weights.

    facts: classes, vocabulary, positions and parts, as `SequenceClassification.facts` has them.
    """
    options = {name: value for name, value in recipe.model.options.items() if name not in ("positions", "hidden_dim")}
    hidden = {name: value for name, value in recipe.model.options.items() if name == "hidden_dim"}
    try:
        encoder = SequenceEncoder(facts["vocabulary"], facts["positions"], **options)
    except TypeError as error:
        raise ValueError(f"model.options of lra_encoder: {error}") from None
    return SequenceClassifier(encoder, len(facts["classes"]), parts=facts["parts"], **hidden)


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
            raise ValueError(f"{recipe.data.source} does not fit the model: {name} {found}, trained on {facts[name]}")
    task = SequenceClassification(model, **facts, val_set=SequenceSamples(source, by_length=True))
    model.to(accelerator.device)
    result = evaluate(task, model, accelerator, batch_size=batch_size, workers=workers, progress=progress)
    assert result is not None, "nothing stops it"
    return result


def listops_settings(recipe: ListOpsRecipe) -> ListOpsSettings:
    fields = dataclasses.asdict(recipe)
    del fields["workers"]
    return ListOpsSettings(**fields)


def open_sequences(
    data: SequenceData,
    split: Split,
    *,
    make: bool = True,
    notify: Notify = log.info,
    preparing: TellPreparing = lambda *_: None,
) -> SequenceSource:
    """The sequences of a split. make: False reads only, and generates none."""
    return open_lra(
        data.name,
        Path(data.source),
        split,
        max_length=data.max_length,
        generate=None if data.generate is None else listops_settings(data.generate),
        make=make,
        workers=1 if data.generate is None else data.generate.workers,
        progress=lambda done, total: preparing("expressions", done, total),
        notify=notify,
    )


def _groups(source: SequenceSource, recipe: SequenceRecipe) -> list[int]:
    lengths = source.lengths()
    if lengths is None:
        raise ValueError(f"data.group_lengths: the files of {recipe.data.name} tell their lengths only when read")
    return length_groups(lengths, recipe.batch_size)


def _load(model: nn.Module, path: str, notify: Notify) -> None:
    weights = read_weights(path, "lra_encoder")
    check_keys(model, weights, f"lra_encoder (model.checkpoint {path})")
    model.load_state_dict(weights)
    notify(f"lra_encoder: all {len(weights)} tensors loaded from {path}")


def _power_of_two(length: int) -> int:
    """The least that is not below ``length``."""
    return 1 << (length - 1).bit_length()
