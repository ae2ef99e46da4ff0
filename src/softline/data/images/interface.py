"""What every source of labelled images offers."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Protocol, runtime_checkable

from PIL import Image, UnidentifiedImageError

from softline.errors import UserError

# what Pillow raises for truncated, empty, oversized and mislabelled files; UnidentifiedImageError is an OSError
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)


class CorruptImageError(UserError):
    """An image that cannot be decoded; out of a DataLoader's worker it comes with its text alone."""

    def __init__(self, name: str, reason: str = "") -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        if not self.reason:
            return self.name
        return f"{self.name} cannot be decoded ({self.reason}); repair or delete it, or leave it out by --skip-corrupt"


@runtime_checkable
class ImageSource(Protocol):
    """Images that can be read in any order, by several threads and processes."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names by label; empty if the source has none."""

    def __len__(self) -> int: ...

    def load(self, index: int) -> tuple[Image.Image, int]:
        """The decoded image and its label; `CorruptImageError` if it cannot be decoded."""

    def name(self, index: int) -> str:
        """The file, or where the image lies in the source."""


@runtime_checkable
class ImageStream(Protocol):
    """Images that can only be read in order."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names by label; empty if the source has none."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[Image.Image, int]]: ...

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""


def decode(file: BinaryIO) -> Image.Image:
    """The whole image: a truncated file fails here, not where its pixels are first used."""
    image = Image.open(file)
    image.load()
    return image


@contextmanager
def decoding(name: str) -> Iterator[None]:
    """What Pillow raises for a broken image becomes a `CorruptImageError` of that name."""
    try:
        yield
    except UNREADABLE as error:
        # with a number it comes from the operating system, such as a lost network drive: the image may be sound
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise CorruptImageError(name, describe(error)) from error


def describe(error: Exception) -> str:
    """Why an image could not be decoded."""
    # Pillow's text names the file object, which says nothing
    text = "not an image" if isinstance(error, UnidentifiedImageError) else str(error)
    return text or type(error).__name__
