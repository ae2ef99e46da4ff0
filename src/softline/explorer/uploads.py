"""Images that visitors upload, checked before they are decoded."""

import warnings
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from softline.data.images.datasets import check_bits
from softline.data.images.interface import FORMATS, UNREADABLE, CorruptImageError, describe, open_image
from softline.errors import UserError
from softline.files import open_regular

__all__ = ["FORMATS", "MAX_BYTES", "MAX_PIXELS", "RefusedImageError", "read_upload"]

MAX_BYTES = 20 * 2**20
MAX_PIXELS = 50 * 10**6
MIN_SIDE = 16
"""Side of one patch of DeiT."""
MAX_SIDE = 2048
"""Larger images are reduced: the page shows no more, and a session should not hold a camera's whole photograph."""


class RefusedImageError(UserError):
    """An upload that is refused; the visitor reads the text."""


def read_upload(path: Path, *, name: str) -> Image.Image:
    """Read an uploaded image as RGB, turned upright and at most 2048 pixels wide and high.

    name: the visitor's name of the file.
    """
    if not path.is_file():
        raise RefusedImageError(f"{name} is not a file")
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise RefusedImageError(
            f"{name} has {size / 2**20:,.0f} MB; at most {MAX_BYTES / 2**20:.0f} MB can be uploaded"
        )
    with open_regular(path) as file, warnings.catch_warnings():
        # Pillow warns of large images before it refuses larger ones; the limit here is lower
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            image = open_image(file)
            _check_header(image, name)
            image.load()
        except RefusedImageError:
            raise
        except UNREADABLE as error:
            raise RefusedImageError(f"{name} cannot be read as an image: {_reason(error)}") from None
    return _upright(image, name)


def _check_header(image: Image.Image, name: str) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise RefusedImageError(
            f"{name} has {width:,} x {height:,} pixels; at most {MAX_PIXELS / 1e6:.0f} million are read"
        )
    if min(width, height) < MIN_SIDE:
        raise RefusedImageError(
            f"{name} has {width} x {height} pixels, less than a patch: at least {MIN_SIDE} x {MIN_SIDE} are needed"
        )
    try:
        check_bits(image, lambda: name)
    except CorruptImageError as error:
        raise RefusedImageError(f"{name} cannot be shown: {error.reason}") from None


def _upright(image: Image.Image, name: str) -> Image.Image:
    try:
        # cameras store the rotation beside the pixels
        turned: Any = ImageOps.exif_transpose(image)
    except UNREADABLE as error:
        raise RefusedImageError(f"{name} has a broken orientation: {_reason(error)}") from None
    turned.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
    return _on_white(turned).convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """Put a transparent image on a white ground."""
    if not image.has_transparency_data:
        return image
    coloured = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), coloured)


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return f"it is none of {', '.join(FORMATS)}"
    if isinstance(error, Image.DecompressionBombError):
        return f"it claims more than the {MAX_PIXELS / 1e6:.0f} million pixels that are read"
    return describe(error)
