"""Build a sequence classification task from its recipe: encoder, classifier, data."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from softline.backbones.creation import building
from softline.backbones.sequence import SequenceClassifier, SequenceEncoder
from softline.data.sequences.interface import SequenceForm, SequenceSamples, SequenceSource, Split, length_groups
from softline.data.sequences.listops import ListOpsSettings
from softline.data.sequences.lra import open_lra
from softline.engine import distributed
from softline.engine.machine import check_workers
from softline.engine.task import Notify, NotifyPreparing, Setup, log
from softline.errors import UserError
from softline.tasks.sequence.recipe import ListOpsRecipe, SequenceData, SequenceRecipe
from softline.tasks.sequence.task import SequenceClassification
from softline.weights.releases import read_weights
from softline.weights.renaming import check_keys


def build_sequence(recipe: SequenceRecipe, setup: Setup) -> SequenceClassification:
    data, notify = recipe.data, setup.notify
    with distributed.local_main_process_first():
        train = open_sequences(data, data.train_split, notify=notify, preparing=setup.preparing)
    val = open_sequences(data, data.val_split, notify=notify)
    notify(f"{data.name}: {len(train):,} sequences to train on, {len(val):,} to validate")
    if train.classes != val.classes:
        raise UserError(f"{data.train_split} and {data.val_split} of {data.source} have different classes")
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


def sequence_facts(recipe: SequenceRecipe, source: SequenceForm) -> dict[str, Any]:
    """Return what the network must know of the data."""
    positions = recipe.model.options.get("positions", _power_of_two(source.max_length))
    if positions < source.max_length:
        raise UserError(
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
    """Create the network of a recipe with random weights.

    facts: classes, vocabulary, positions and parts, as `SequenceClassification.facts` has them.
    """
    options = {name: value for name, value in recipe.model.options.items() if name not in ("positions", "hidden_dim")}
    hidden = {name: value for name, value in recipe.model.options.items() if name == "hidden_dim"}
    with building("model.options of lra_encoder"):
        encoder = SequenceEncoder(facts["vocabulary"], facts["positions"], **options)
        return SequenceClassifier(encoder, len(facts["classes"]), parts=facts["parts"], **hidden)


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
    preparing: NotifyPreparing = lambda *_: None,
) -> SequenceSource:
    """Open the sequences of a split.

    make: generate missing expressions of listops; False only reads.
    """
    if data.generate is not None:
        check_workers("data.generate.workers", data.generate.workers)
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
        raise UserError(f"data.group_lengths: the files of {recipe.data.name} tell their lengths only when read")
    return length_groups(lengths, recipe.batch_size)


def _load(model: nn.Module, path: str, notify: Notify) -> None:
    weights = read_weights(path, "lra_encoder")
    check_keys(model, weights, f"lra_encoder (model.checkpoint {path})")
    model.load_state_dict(weights)
    notify(f"lra_encoder: all {len(weights)} tensors loaded from {path}")


def _power_of_two(length: int) -> int:
    """Return the smallest power of two that is at least ``length``."""
    return 1 << (length - 1).bit_length()
