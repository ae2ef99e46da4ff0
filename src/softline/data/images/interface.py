"""Interfaces of the sources of labelled images, and decoding."""

import io
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Protocol, runtime_checkable

from PIL import Image, UnidentifiedImageError

from softline.errors import UserError
from softline.files import open_regular

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
"""Formats that are decoded, whatever a file is called. Some of Pillow's others start other programs: EPS starts
Ghostscript."""
EXTENSIONS = (".png", ".jpg", ".jpeg")
"""Endings of the files in a folder that are images; those that timm.data looks for."""
MAX_BYTES = 2**30
"""Largest file that is read as an image."""
UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)
"""Pillow's exceptions for truncated, empty, oversized, damaged and mislabelled files."""


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


def open_image(file: BinaryIO, *, max_pixels: int | None = None) -> Image.Image:
    """Read the header of an image in one of `FORMATS`.

    max_pixels: largest number of pixels; Pillow's MAX_IMAGE_PIXELS by default, 89 million unless a program changes it.
    """
    image = Image.open(file, formats=FORMATS)
    # Pillow only warns up to twice its number
    most = Image.MAX_IMAGE_PIXELS if max_pixels is None else max_pixels
    if most is not None and image.width * image.height > most:
        size = f"{image.width:,} x {image.height:,} pixels"
        raise Image.DecompressionBombError(f"it has {size}; at most {most / 1e6:,.3g} million are read")
    return image


def decode(file: BinaryIO) -> Image.Image:
    """Decode the whole image, so that a truncated file fails here and not when its pixels are first used."""
    image = open_image(file)
    image.load()
    return image


def read_content(path: str, *, offset: int = 0, size: int = -1) -> io.BytesIO:
    """Read the bytes of an image file, or ``size`` bytes of it from ``offset`` on; -1 reads to its end."""
    with open_regular(path) as file:
        found = os.fstat(file.fileno()).st_size - offset if size < 0 else size
        if found > MAX_BYTES:
            raise ValueError(f"it has {found:,} bytes; at most {MAX_BYTES:,} are read")
        file.seek(offset)
        return io.BytesIO(file.read(size))


def load_image(path: str, *, name: str | None = None, offset: int = 0, size: int = -1) -> Image.Image:
    """Decode an image file, or the part of a file that `read_content` reads.

    name: what a `CorruptImageError` calls it; its path by default.
    """
    with decoding(name or path):
        return decode(read_content(path, offset=offset, size=size))


def is_image_name(name: str) -> bool:
    # macOS creates ._name.jpg files, which are not images
    return not name.startswith(".") and name.lower().endswith(EXTENSIONS)


def image_extensions() -> str:
    return ", ".join(EXTENSIONS)


@contextmanager
def decoding(name: str) -> Iterator[None]:
    """Turn Pillow's exceptions for a broken image into a `CorruptImageError` with that name."""
    try:
        yield
    except UNREADABLE as error:
        # an OSError with an errno comes from the operating system (a lost network drive), and the image may be intact;
        # a UserError already says what is wrong
        if isinstance(error, UserError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise CorruptImageError(name, describe(error)) from error


def describe(error: Exception) -> str:
    """Explain why an image could not be decoded."""
    # Pillow's text names the file object, which is of no use
    text = "not an image" if isinstance(error, UnidentifiedImageError) else str(error)
    return text or type(error).__name__
