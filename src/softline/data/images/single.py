"""Single images, as users name them."""

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
    """The image as it is meant to be seen."""
    check_file(path)
    with open(path, "rb") as file:
        try:
            image = decode(file)
        except UNREADABLE as error:
            raise UserError(f"{path} cannot be decoded ({describe(error)})") from None
    # cameras store the turn beside the pixels
    upright: Any = ImageOps.exif_transpose(image)
    try:
        return to_mode(upright, mode, lambda: path)
    except CorruptImageError as error:
        # its own text advises to leave it out, as data sets can
        raise UserError(f"{path} cannot be used: {error.reason}") from None
