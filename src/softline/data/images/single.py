"""Single images: files, Pillow's images, arrays and tensors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from softline.data.images.datasets import Mode, to_mode
from softline.data.images.interface import CorruptImageError, decoding, load_image
from softline.errors import UserError
from softline.files import check_regular

ImageInput: TypeAlias = str | Path | Image.Image | NDArray[Any] | Tensor
"""What `to_image` takes."""


def check_file(path: str | Path, kind: str = "image") -> None:
    """Check that a file can be read.

    kind: what an error calls it.
    """
    if not Path(path).exists():
        raise UserError(f"no such {kind}: {path}")
    if Path(path).is_dir():
        raise UserError(f"{path} is a directory: name {kind}s")
    check_regular(path)


def read_image(path: str, mode: Mode) -> Image.Image:
    """Read an image in ``mode`` and apply its EXIF orientation."""
    check_file(path)
    try:
        image = load_image(path)
    except CorruptImageError as error:
        # its own text recommends --skip-corrupt, which is for datasets
        raise UserError(f"{path} cannot be decoded ({error.reason})") from error
    return _upright(image, mode, path, own=True)


def list_images(inputs: Any) -> list[Any] | None:
    """Return the images of a list, a tuple or a batch, an array or tensor of four dimensions; None for one image."""
    if isinstance(inputs, list | tuple):
        return list(inputs)
    return list(inputs) if isinstance(inputs, np.ndarray | Tensor) and inputs.ndim == 4 else None


def to_image(given: ImageInput, mode: Mode, *, name: str = "the image") -> Image.Image:
    """Convert what a program may hold to an image of 8 bits for each colour, in ``mode``.

    given: the path of a file; a Pillow image of 8 bits, whose EXIF orientation is applied as that of a file; an array
        [H, W], [H, W, 1] or [H, W, 3]; or a tensor [H, W], [1, H, W] or [3, H, W]. Values are uint8, or floating-point
        numbers from 0 to 1, which are rounded to multiples of 1 / 255.
    name: what an error calls it, unless it is a file.
    """
    if isinstance(given, str | Path):
        return read_image(str(given), mode)
    if isinstance(given, Image.Image):
        return _upright(given, mode, name)
    if isinstance(given, Tensor):
        pixels = given.detach().cpu()
        _check_shape(name, "tensor", pixels.shape, ("[H, W]", "[1, H, W]", "[3, H, W]"), channels=0)
        # numpy has no bfloat16
        pixels = pixels.double() if pixels.is_floating_point() else pixels
        return _from_array((pixels.movedim(0, -1) if pixels.ndim == 3 else pixels).numpy(), mode, name)
    if isinstance(given, np.ndarray):
        _check_shape(name, "array", given.shape, ("[H, W]", "[H, W, 1]", "[H, W, 3]"), channels=-1)
        return _from_array(given, mode, name)
    raise UserError(f"{name} must be a path, a Pillow image, an array or a tensor, got {type(given).__name__}")


def _check_shape(name: str, kind: str, shape: Sequence[int], rules: tuple[str, ...], *, channels: int) -> None:
    fits = len(shape) == 2 or (len(shape) == 3 and shape[channels] in (1, 3))
    if not fits or 0 in shape:
        raise UserError(f"{name} must be {', '.join(rules[:-1])} or {rules[-1]} as {kind}, got {list(shape)}")


def _from_array(values: NDArray[Any], mode: Mode, name: str) -> Image.Image:
    """values: [H, W] or [H, W, channels]."""
    if np.issubdtype(values.dtype, np.floating):
        low, high = float(values.min()), float(values.max())
        # also false for NaN
        if not (low >= 0 and high <= 1):
            wrong = high if low >= 0 else low
            raise UserError(f"{name} must have values from 0 to 1 if they are floating-point numbers, got {wrong:g}")
        values = (values * 255).round().astype(np.uint8)
    if values.dtype != np.uint8:
        raise UserError(f"{name} must have values of type uint8, or floating-point numbers; they are {values.dtype}")
    grey = values.ndim == 3 and values.shape[-1] == 1
    return to_mode(Image.fromarray(np.ascontiguousarray(values[..., 0] if grey else values)), mode, lambda: name)


def _upright(image: Image.Image, mode: Mode, name: str, *, own: bool = False) -> Image.Image:
    """own: nobody else has the image, so that it need not be copied."""
    try:
        with decoding(name):
            if own:
                ImageOps.exif_transpose(image, in_place=True)
            upright: Any = image if own else ImageOps.exif_transpose(image)
            upright.load()
        return to_mode(upright, mode, lambda: name)
    except CorruptImageError as error:
        raise UserError(f"{name} cannot be used: {error.reason}") from None
