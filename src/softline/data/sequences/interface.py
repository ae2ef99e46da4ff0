"""Interface of the sources of labelled token sequences, and their dataset.

All tasks of the Long Range Arena (https://arxiv.org/abs/2011.04006) have this form. Token ids are 1 to
``vocabulary - 1``; 0 is padding.
"""

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from softline.errors import UserError

Tokens = NDArray[np.uint16]
Notify = Callable[[str], None]
Split = Literal["train", "val", "test"]
# with fewer batches per group these hardly change between epochs, with more the lengths in a batch differ too much
GROUP_BATCHES = 32


class SequenceError(UserError):
    """A sample that does not have the form its task requires."""


class SequenceForm(Protocol):
    """What all sequences of a source have in common."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names by label."""

    @property
    def vocabulary(self) -> int:
        """Upper bound (exclusive) of the token ids."""

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in a sequence."""

    @property
    def parts(self) -> int:
        """Number of sequences in a sample: 1, or 2 that are compared."""


@runtime_checkable
class SequenceSource(SequenceForm, Protocol):
    """Sequences that can be read in any order, by several processes."""

    def __len__(self) -> int: ...

    def load(self, index: int) -> tuple[tuple[Tokens, ...], int]:
        """The sequences of a sample, [length] with length >= 1, and its label; `SequenceError` if it is invalid."""

    def lengths(self) -> NDArray[np.int64] | None:
        """Number of tokens in the longest sequence of each sample; None if that requires reading them."""

    def name(self, index: int) -> str:
        """File and line of the sample."""


def length_groups(lengths: NDArray[np.int64], batch_size: int) -> list[int]:
    """A group number for each sample; samples of a group have similar lengths and form about GROUP_BATCHES batches."""
    groups = max(len(lengths) // (GROUP_BATCHES * batch_size), 1)
    ranks = np.empty(len(lengths), np.int64)
    ranks[np.argsort(lengths, kind="stable")] = np.arange(len(lengths))
    return (ranks * groups // len(lengths)).tolist()


class SequenceSamples(Dataset[tuple[tuple[Tensor, ...], int]]):
    """Sequences of a source as int64 tensors [length], and labels, by index or by (epoch, index); nothing is random.

    by_length: sort samples by length, if the source knows the lengths, so that batches in this order have little
        padding.
    """

    def __init__(self, source: SequenceSource, *, by_length: bool = False) -> None:
        self.source = source
        lengths = source.lengths() if by_length else None
        self.order = None if lengths is None else np.argsort(lengths, kind="stable")

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: int | tuple[int, int]) -> tuple[tuple[Tensor, ...], int]:
        place = key[1] if isinstance(key, tuple) else key
        index = place if self.order is None else int(self.order[place])
        parts, label = self.source.load(index)
        for part in parts:
            self._check(part, index)
        return tuple(torch.from_numpy(part.astype(np.int64)) for part in parts), label

    def _check(self, tokens: Tokens, index: int) -> None:
        most, vocabulary = self.source.max_length, self.source.vocabulary
        if not 0 < len(tokens) <= most:
            raise SequenceError(
                f"{self.source.name(index)}: a sequence must have 1 to {most} tokens, it has {len(tokens)}"
            )
        if tokens.max() >= vocabulary:
            raise SequenceError(f"{self.source.name(index)}: token ids must be below {vocabulary}, got {tokens.max()}")
