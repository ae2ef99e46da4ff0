"""Transforms from a Pillow image and its labels to tensors.

Those of training make a normalised float32 image [3, H, W] and int64 labels [H, W]. Those of evaluation keep bytes,
since photographs may be large: `normalization` makes them what models expect, a part at a time.

Training follows mmsegmentation's pipeline: random scale, crop, flip, colour distortion, then padding. It differs in
details:

- images are antialiased when downscaled, and labels are those of the pixel whose centre is nearest, which keeps them
  aligned with the image; mmsegmentation does not antialias and takes the pixel to the upper left
- brightness is multiplied by a factor of 1 +- 1/8 at most; mmsegmentation adds up to +- 32 of 255
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from softline.checks import check_integer, check_range
from softline.data.images.transforms import IMAGENET_MEAN, IMAGENET_STD, check_bounds
from softline.data.semantic.classes import IGNORE
from softline.errors import UserError

SemanticTransform = Callable[[Image.Image, NDArray[np.uint8]], tuple[Tensor, Tensor]]
TRIES = 10
"""How many times a crop dominated by one class is drawn again."""


def semantic_train_transform(
    crop: tuple[int, int],
    *,
    scale: tuple[float, float] = (0.5, 2.0),
    base_size: tuple[int, int] | None = None,
    largest_share: float = 0.75,
    hflip: float = 0.5,
    distort: bool = True,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> SemanticTransform:
    """Random scale, crop, flip and colour distortion; images smaller than the crop are padded at the right and bottom.

    crop: (height, width) of the result.
    scale: smallest and largest scale factor.
    base_size: (short side, long side) into which the image is fitted before it is scaled; None keeps its own size.
    largest_share: maximum fraction of a crop's labelled pixels that one class may fill; otherwise another crop is
        drawn, up to 10 times. 1 accepts the first crop.
    hflip: probability of a horizontal flip.
    distort: change brightness, contrast, saturation and hue, each with probability 1/2.
    mean, std: mean and standard deviation of each channel.

    Padding is 0 in the image, which is the mean colour, and IGNORE in the labels.
    """
    _check_sides("crop", crop)
    if base_size is not None:
        _check_sides("base_size", base_size)
        if base_size[0] > base_size[1]:
            raise UserError(f"base_size must be (short side, long side), got {base_size}")
    check_bounds("scale", scale)
    check_range("largest_share", largest_share, 0, 1)
    check_range("hflip", hflip, 0, 1)
    _check_colours(mean, std)
    steps = [
        RandomScale(scale, base_size),
        MixedCrop(crop, largest_share),
        v2.RandomHorizontalFlip(hflip),
        *([colour_distortion()] if distort else []),
        *_normalise(mean, std),
        PadTo(crop),
    ]
    return _Pair(v2.Compose(steps))


def semantic_eval_transform(
    *,
    short_side: int | None = None,
    long_side: int | None = None,
) -> SemanticTransform:
    """The pixels of the whole image, uint8; its labels, uint8, keep their size, to which predictions are resized.

    short_side: shorter side of the image after resizing; None keeps its size.
    long_side: maximum longer side after resizing; it takes precedence over ``short_side``.
    """
    if short_side is not None:
        check_integer("short_side", short_side, 1)
        if long_side is not None:
            check_integer("long_side", long_side, short_side)
    elif long_side is not None:
        raise UserError(f"long_side needs short_side, which is None; got {long_side}")
    return partial(_evaluated, short_side=short_side, long_side=long_side)


def _evaluated(image: Image.Image, labels: NDArray[np.uint8], **sides: int | None) -> tuple[Tensor, Tensor]:
    return eval_pixels(image, **sides), torch.from_numpy(labels)


def eval_pixels(image: Image.Image, *, short_side: int | None = None, long_side: int | None = None) -> Tensor:
    """The pixels [3, H, W], uint8, of an image, resized as by `semantic_eval_transform`."""
    pixels: Tensor = v2.functional.pil_to_tensor(image)
    if short_side is None:
        return pixels
    short, long = sorted(pixels.shape[-2:])
    factor = short_side / short
    if long_side is not None:
        factor = min(factor, long_side / long)
    resized: Tensor = v2.functional.resize(pixels, [max(round(side * factor), 1) for side in pixels.shape[-2:]])
    return resized


def normalization(mean: Sequence[float], std: Sequence[float]) -> Callable[[Tensor], Tensor]:
    """From pixels [..., 3, H, W], uint8, to float32 with the mean 0 and the standard deviation 1 of each channel."""
    _check_colours(mean, std)
    return v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])


class _Pair:
    """Applies a torchvision transform to an image and its labels together."""

    def __init__(self, transform: v2.Transform) -> None:
        self.transform = transform

    def __call__(self, image: Image.Image, labels: NDArray[np.uint8]) -> tuple[Tensor, Tensor]:
        pixels, mask = self.transform(
            tv_tensors.Image(v2.functional.pil_to_tensor(image)),  # uint8 [3, H, W]
            tv_tensors.Mask(torch.from_numpy(labels)[None]),  # uint8 [1, H, W]
        )
        return pixels.as_subclass(Tensor).contiguous(), mask.as_subclass(Tensor)[0].contiguous()


class RandomScale:
    """Resizes by a random factor, uniform between two bounds."""

    def __init__(self, scale: tuple[float, float], base_size: tuple[int, int] | None) -> None:
        self.scale, self.base_size = scale, base_size

    def __call__(self, image: tv_tensors.Image, labels: tv_tensors.Mask) -> tuple[tv_tensors.Image, tv_tensors.Mask]:
        sides = image.shape[-2:]
        factor = float(torch.empty(()).uniform_(*self.scale))
        if self.base_size is not None:
            short, long = self.base_size
            factor *= min(short / min(sides), long / max(sides))
        # a side of one pixel must not become 0
        size = [max(round(side * factor), 1) for side in sides]
        resized = v2.functional.resize(labels.as_subclass(Tensor), size, v2.InterpolationMode.NEAREST_EXACT)
        return v2.functional.resize(image, size), tv_tensors.Mask(resized)


class MixedCrop:
    """Crops a random part of which no class fills more than ``largest_share``, or the last of several tries.

    A side shorter than the crop's is kept whole.
    """

    def __init__(self, crop: tuple[int, int], largest_share: float) -> None:
        self.crop, self.largest_share = crop, largest_share

    def __call__(self, image: tv_tensors.Image, labels: tv_tensors.Mask) -> tuple[tv_tensors.Image, tv_tensors.Mask]:
        height, width = (min(side, crop) for side, crop in zip(labels.shape[-2:], self.crop, strict=True))
        for _ in range(1 + TRIES):
            top = int(torch.randint(labels.shape[-2] - height + 1, ()))
            left = int(torch.randint(labels.shape[-1] - width + 1, ()))
            part = v2.functional.crop(labels, top, left, height, width)
            if share_of_largest(part) <= self.largest_share:
                break
        return v2.functional.crop(image, top, left, height, width), part


class PadTo:
    """Pads to a size at the right and the bottom."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size

    def __call__(self, image: tv_tensors.Image, labels: tv_tensors.Mask) -> tuple[tv_tensors.Image, tv_tensors.Mask]:
        below, right = (size - side for size, side in zip(self.size, labels.shape[-2:], strict=True))
        padding = [0, 0, right, below]
        return v2.functional.pad(image, padding, fill=0), v2.functional.pad(labels, padding, fill=IGNORE)


def share_of_largest(labels: Tensor) -> float:
    """Fraction of the labelled pixels in the most frequent class; 1 if no pixel is labelled."""
    counts = torch.bincount(labels.flatten(), minlength=IGNORE + 1)[:IGNORE]
    return float(counts.max() / counts.sum()) if counts.any() else 1.0


def colour_distortion() -> v2.Transform:
    """Brightness, contrast, saturation and hue, each with probability 1/2; contrast before or after the last two."""
    brightness, contrast, saturation, hue = (
        v2.RandomApply([v2.ColorJitter(**options)], p=0.5)
        for options in ({"brightness": 1 / 8}, {"contrast": 0.5}, {"saturation": 0.5}, {"hue": 0.1})
    )
    colours = [saturation, hue]
    order = v2.RandomChoice([v2.Compose([contrast, *colours]), v2.Compose([*colours, contrast])])
    return v2.Compose([brightness, order])


def _normalise(mean: Sequence[float], std: Sequence[float]) -> list[Any]:
    dtypes = {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}
    return [v2.ToDtype(dtypes, scale=True), v2.Normalize(mean, std)]


def _check_sides(name: str, sides: tuple[int, int]) -> None:
    if isinstance(sides, int) or len(sides) != 2:
        raise UserError(f"{name} must be two sizes in pixels, got {sides}")
    for side in sides:
        check_integer(name, side, 1)


def _check_colours(mean: Sequence[float], std: Sequence[float]) -> None:
    if len(mean) != 3 or len(std) != 3 or not all(value > 0 for value in std):
        raise UserError(f"mean and std must have 3 numbers each, std positive; got {mean} and {std}")
