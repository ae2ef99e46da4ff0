"""Reading single image files."""

from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from softline.data.images.datasets import Mode, to_mode
from softline.data.images.interface import UNREADABLE, CorruptImageError, decode, describe
from softline.errors import UserError


def check_file(path: str) -> None:
    if not Path(path).is_file():
        raise UserError(f"{path} is a directory: name image files" if Path(path).is_dir() else f"no such image: {path}")


def read_image(path: str, mode: Mode) -> Image.Image:
    """Read an image in ``mode`` and apply its EXIF orientation."""
    check_file(path)
    with open(path, "rb") as file:
        try:
            image = decode(file)
        except UNREADABLE as error:
            raise UserError(f"{path} cannot be decoded ({describe(error)})") from error
    upright: Any = ImageOps.exif_transpose(image)
    try:
        return to_mode(upright, mode, lambda: path)
    except CorruptImageError as error:
        # its own text recommends --skip-corrupt, which is for datasets
        raise UserError(f"{path} cannot be used: {error.reason}") from None
