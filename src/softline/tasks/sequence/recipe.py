"""The recipe keys of sequence classification."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from softline.checks import check_range
from softline.engine.recipe import MOST_SEED, Recipe
from softline.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ListOpsRecipe:
    """ListOps expressions to generate; see `softline.data.sequences.listops.ListOpsSettings`."""

    samples: tuple[int, int, int] = (96_000, 2_000, 2_000)
    """Number of training, validation and test expressions."""
    min_length: int = 500
    """Expressions have more tokens than this."""
    max_length: int = 2000
    """Expressions have fewer tokens than this."""
    seed: int = 0
    workers: int = 1
    """Number of generating processes."""

    def check(self, name: str) -> None:
        for count in self.samples:
            check_range(f"{name}.samples", count, 1)
        check_range(f"{name}.min_length", self.min_length, 0)
        check_range(f"{name}.max_length", self.max_length, self.min_length + 2)
        check_range(f"{name}.seed", self.seed, 0, MOST_SEED)
        check_range(f"{name}.workers", self.workers, 1)


@dataclass(frozen=True, kw_only=True)
class SequenceData:
    name: Literal["listops", "text", "retrieval", "image", "pathfinder"]
    """Name of the task in the Long Range Arena."""
    source: str
    """Directory with its files, such as lra_release."""
    generate: ListOpsRecipe | None = None
    """Generate the expressions of listops and keep them in source, instead of reading the benchmark's files."""
    train_split: Literal["train", "val", "test"] = "train"
    val_split: Literal["train", "val", "test"] = "val"
    max_length: int | None = None
    """Number of bytes that texts are cut to (text and retrieval); defaults to the benchmark's 4000."""
    group_lengths: bool = False
    """Put sequences of similar length into a batch, which needs less padding; the benchmark does not."""


@dataclass(frozen=True, kw_only=True)
class SequenceRecipe(Recipe):
    """One label for a sequence; ``model`` is lra_encoder."""

    free_keys: ClassVar[frozenset[str]] = Recipe.free_keys | {"data.source", "data.generate.workers"}

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
