"""From a Pillow image to a normalised float32 tensor [C, H, W], through timm's transforms.

Grey images (mode L) take ``mean`` and ``std`` of one number; every augmentation applies to them, those of hue and
saturation without effect.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import AugmentOp
from timm.data.auto_augment import posterize as timm_posterize
from timm.data.constants import IMAGENET_DEFAULT_MEAN as IMAGENET_MEAN
from timm.data.constants import IMAGENET_DEFAULT_STD as IMAGENET_STD
from timm.data.transforms import ResizeKeepRatio, str_to_interp_mode
from torch import Tensor

from softline.checks import check_integer, check_number, check_option
from softline.errors import UserError

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "Interpolation", "eval_transform", "train_transform"]

Interpolation = Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos", "random"]
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
# a name, then options: a letter or word and a number, or t and the name of a set of operations
POLICY = re.compile(r"(rand|augmix|originalr?|v0r?|3a)(-([a-z]+[0-9.]+|t[a-z0-9]+))*")


def train_transform(
    image_size: int | tuple[int, int],
    *,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    interpolation: Interpolation = "bicubic",
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    hflip: float = 0.5,
    color_jitter: float = 0.0,
    auto_augment: str | None = None,
    erase_prob: float = 0.0,
    erase_mode: Literal["const", "rand", "pixel"] = "pixel",
    erase_count: int = 1,
) -> Callable[[Image.Image], Tensor]:
    """Random crop and flip, then colours or a policy, then erased rectangles.

    image_size: pixels, or (height, width).
    interpolation: "random" is bilinear or bicubic.
    scale: least and greatest part of the area that a crop keeps.
    ratio: least and greatest width / height of a crop.
    color_jitter: of brightness, contrast and saturation; timm leaves it out beside any ``auto_augment`` but "3a".
    auto_augment: timm's name of a policy, such as rand-m9-mstd0.5-inc1, augmix-m3-w3, original, v0, 3a.
    """
    _check_output(image_size, mean, std)
    check_option("interpolation", interpolation, (*INTERPOLATIONS, "random"))
    _check_range("scale", scale)
    _check_range("ratio", ratio)
    check_part("hflip", hflip)
    check_number("color_jitter", color_jitter, 0)
    check_part("erase_prob", erase_prob)
    check_option("erase_mode", erase_mode, ("const", "rand", "pixel"))
    check_integer("erase_count", erase_count, 1)
    return _create_augmentation(
        image_size,
        is_training=True,
        mean=tuple(mean),
        std=tuple(std),
        interpolation=interpolation,
        scale=scale,
        ratio=ratio,
        hflip=hflip,
        color_jitter=color_jitter,
        auto_augment=auto_augment,
        re_prob=erase_prob,
        re_mode=erase_mode,
        re_count=erase_count,
    )


def _create_augmentation(
    image_size: int | tuple[int, int], *, auto_augment: str | None, **options: Any
) -> Callable[[Image.Image], Tensor]:
    if auto_augment is not None and not POLICY.fullmatch(auto_augment):
        raise UserError(f"auto_augment must be a policy such as rand-m9-mstd0.5-inc1, got {auto_augment!r}")
    try:
        transform = create_transform(image_size, auto_augment=auto_augment, **options)
    except (AssertionError, KeyError, ValueError) as error:
        raise UserError(f"auto_augment must be a policy of timm, got {auto_augment!r}: {error}") from error
    for operation in _operations(transform.transforms):
        if operation.aug_fn is timm_posterize:
            operation.aug_fn = posterize
    return transform


def eval_transform(
    image_size: int | tuple[int, int],
    *,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    interpolation: Interpolation = "bicubic",
    crop_pct: float = 0.875,
    crop_mode: Literal["center", "squash", "border"] = "center",
) -> Callable[[Image.Image], Tensor]:
    """Resize and cut out the centre.

    image_size: pixels, or (height, width).
    crop_pct: side of the cut relative to the resized image, at most 1.
    crop_mode: "center" keeps the aspect ratio and loses the margins, "squash" changes it, "border" keeps everything
        and fills the rest with the mean.
    """
    _check_output(image_size, mean, std)
    check_option("interpolation", interpolation, INTERPOLATIONS)
    check_option("crop_mode", crop_mode, ("center", "squash", "border"))
    check_part("crop_pct", crop_pct)
    if crop_pct == 0:
        raise UserError("crop_pct must be more than 0, got 0")
    transform = create_transform(
        image_size,
        is_training=False,
        mean=tuple(mean),
        std=tuple(std),
        interpolation=interpolation,
        crop_pct=crop_pct,
        crop_mode=crop_mode,
    )
    for step in transform.transforms:
        # timm resizes bilinearly here if height and width differ
        if isinstance(step, ResizeKeepRatio):
            step.interpolation = str_to_interp_mode(interpolation)
    return transform


def posterize(image: Image.Image, bits: int, **options: Any) -> Image.Image:
    """Keep the highest bits. timm asks for none at full magnitude, as happens to 2% of the images of
    rand-m9-mstd0.5-inc1: black, which Pillow 13 refuses."""
    return timm_posterize(image, bits, **options) if bits > 0 else Image.new(image.mode, image.size)


def _operations(steps: Iterable[Any]) -> Iterable[AugmentOp]:
    """Of RandAugment and AugMix (ops) and of AutoAugment (policy, a list of lists)."""
    for step in steps:
        yield from getattr(step, "ops", ())
        for operations in getattr(step, "policy", ()):
            yield from operations


def _check_output(image_size: int | tuple[int, int], mean: Sequence[float], std: Sequence[float]) -> None:
    sides = image_size if isinstance(image_size, tuple) else (image_size,)
    if len(sides) > 2:
        raise UserError(f"image_size must be a number or (height, width), got {image_size}")
    for side in sides:
        check_integer("image_size", side, 1)
    if len(mean) not in (1, 3) or len(mean) != len(std):
        raise UserError(f"mean and std must both have 3 numbers, or 1 for grey images, got {mean} and {std}")
    if not all(value > 0 for value in std):
        raise UserError(f"std must be positive, got {std}")


def _check_range(name: str, bounds: tuple[float, float]) -> None:
    if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
        raise UserError(f"{name} must be (least, greatest) with 0 < least <= greatest, got {bounds}")


def check_part(name: str, value: float) -> None:
    """A probability or a share: 0 to 1."""
    check_number(name, value, 0)
    if value > 1:
        raise UserError(f"{name} must be at most 1, got {value}")
