"""Recipes: everything that decides a training run, typed and checked, before any data is touched."""

from dataclasses import dataclass
from typing import Literal

from softline.checks import check_range
from softline.engine.recipe import Recipe
from softline.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ListOpsRecipe:
    """Expressions to generate; see `softline.data.sequences.listops.ListOpsSettings`."""

    samples: tuple[int, int, int] = (96_000, 2_000, 2_000)
    """To train on, validate and test."""
    min_length: int = 500
    """Expressions have more tokens than this,"""
    max_length: int = 2000
    """and fewer than this."""
    seed: int = 0
    workers: int = 1
    """Processes that generate."""

    def check(self, name: str) -> None:
        for count in self.samples:
            check_range(f"{name}.samples", count, 1)
        check_range(f"{name}.min_length", self.min_length, 0)
        check_range(f"{name}.max_length", self.max_length, self.min_length + 2)
        check_range(f"{name}.seed", self.seed, 0)
        check_range(f"{name}.workers", self.workers, 1)


@dataclass(frozen=True, kw_only=True)
class SequenceData:
    name: Literal["listops", "text", "retrieval", "image", "pathfinder"]
    """The task of the Long Range Arena."""
    source: str
    """Directory with its files, such as lra_release."""
    generate: ListOpsRecipe | None = None
    """Of listops: expressions are made and kept in source, instead of read from the benchmark's files."""
    train_split: Literal["train", "val", "test"] = "train"
    val_split: Literal["train", "val", "test"] = "val"
    max_length: int | None = None
    """Of text and retrieval: bytes to which texts are cut; the benchmark's 4000 by default."""
    group_lengths: bool = False
    """Batches of sequences that are alike in length, so that less of them is padding; the benchmark's are not."""


@dataclass(frozen=True, kw_only=True)
class SequenceRecipe(Recipe):
    """One label for a sequence; ``model`` is lra_encoder."""

    data: SequenceData

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.name != "lra_encoder":
            raise UserError(f"model.name must be lra_encoder for sequences, got {self.model.name}")
        for name in ("pretrained", "grad_checkpointing", "freeze_batch_norm", "sync_batch_norm", "channels_last"):
            if getattr(self.model, name):
                raise UserError(f"model.{name} is for images, not for sequences")
        if self.data.generate is not None:
            if self.data.name != "listops":
                raise UserError(f"data.generate is for listops; {self.data.name} is read from files")
            self.data.generate.check("data.generate")
        if self.data.max_length is not None:
            check_range("data.max_length", self.data.max_length, 1)
            if self.data.name not in ("text", "retrieval"):
                raise UserError(f"data.max_length is for text and retrieval; {self.data.name} is never cut")
