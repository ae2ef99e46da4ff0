"""Reading single image files."""

from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from softline.data.images.datasets import Mode, to_mode
from softline.data.images.interface import CorruptImageError, decoding, load_image
from softline.errors import UserError
from softline.files import check_regular


def check_file(path: str) -> None:
    if not Path(path).exists():
        raise UserError(f"no such image: {path}")
    if Path(path).is_dir():
        raise UserError(f"{path} is a directory: name image files")
    check_regular(path)


def read_image(path: str, mode: Mode) -> Image.Image:
    """Read an image in ``mode`` and apply its EXIF orientation."""
    check_file(path)
    try:
        image = load_image(path)
    except CorruptImageError as error:
        # its own text recommends --skip-corrupt, which is for datasets
        raise UserError(f"{path} cannot be decoded ({error.reason})") from error
    try:
        with decoding(path):
            upright: Any = ImageOps.exif_transpose(image)
        return to_mode(upright, mode, lambda: path)
    except CorruptImageError as error:
        raise UserError(f"{path} cannot be used: {error.reason}") from None
