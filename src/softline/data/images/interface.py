"""Interfaces of the sources of labelled images, and decoding."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Protocol, runtime_checkable

from PIL import Image, UnidentifiedImageError

from softline.errors import UserError

# Pillow's exceptions for truncated, empty, oversized and mislabelled files; UnidentifiedImageError is an OSError
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)


class CorruptImageError(UserError):
    """An image that cannot be decoded.

    An exception from a DataLoader worker is raised again with its text as ``name`` and without a reason.
    """

    text = "{name} cannot be decoded ({reason}); repair or delete it, or leave it out by --skip-corrupt"

    def __init__(self, name: str, reason: str = "") -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return self.text.format(name=self.name, reason=self.reason) if self.reason else self.name


@runtime_checkable
class ImageSource(Protocol):
    """Images that can be read in any order, by several threads and processes."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names by label; empty if the source has none."""

    def __len__(self) -> int: ...

    def load(self, index: int) -> tuple[Image.Image, int]:
        """The decoded image and its label; `CorruptImageError` if it cannot be decoded."""

    def name(self, index: int) -> str:
        """Path of the file, or the position of the image in the source."""


@runtime_checkable
class ImageStream(Protocol):
    """Images that can only be read in order."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names by label; empty if the source has none."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[Image.Image, int]]: ...

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""


def decode(file: BinaryIO) -> Image.Image:
    """Decode the whole image, so that a truncated file fails here and not when its pixels are first used."""
    image = Image.open(file)
    image.load()
    return image


@contextmanager
def decoding(name: str) -> Iterator[None]:
    """Turn Pillow's exceptions for a broken image into a `CorruptImageError` with that name."""
    try:
        yield
    except UNREADABLE as error:
        # an OSError with an errno comes from the operating system (a lost network drive), and the image may be intact
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise CorruptImageError(name, describe(error)) from error


def describe(error: Exception) -> str:
    """Explain why an image could not be decoded."""
    # Pillow's text names the file object, which is of no use
    text = "not an image" if isinstance(error, UnidentifiedImageError) else str(error)
    return text or type(error).__name__
