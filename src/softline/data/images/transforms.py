"""timm's transforms from a Pillow image to a normalised float32 tensor [C, H, W].

For greyscale images (mode L) ``mean`` and ``std`` have one number. Every augmentation applies to them; those of hue and
saturation have no effect.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN as IMAGENET_MEAN
from timm.data import IMAGENET_DEFAULT_STD as IMAGENET_STD
from timm.data import ResizeKeepRatio, create_transform, str_to_interp_mode
from timm.data.auto_augment import AugmentOp
from timm.data.auto_augment import posterize as timm_posterize
from torch import Tensor

from softline.checks import check_integer, check_number, check_option, check_range
from softline.errors import UserError

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "Interpolation", "eval_transform", "train_transform"]

Interpolation = Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos", "random"]
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
# a name, then options: a word followed by a number, or t followed by the name of a set of operations
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
    """Random crop and flip, then colour jitter or an augmentation policy, then random erasing.

    image_size: side in pixels, or (height, width).
    mean, std: mean and standard deviation of each channel.
    interpolation: "random" chooses between bilinear and bicubic.
    scale: smallest and largest fraction of the area that a crop keeps.
    ratio: smallest and largest aspect ratio (width / height) of a crop.
    hflip: probability of a horizontal flip.
    color_jitter: strength of the jitter of brightness, contrast and saturation; timm omits it with any ``auto_augment``
        but "3a".
    auto_augment: name of a timm policy, such as rand-m9-mstd0.5-inc1, augmix-m3-w3, original, v0, 3a.
    erase_prob, erase_mode, erase_count: probability, fill and number of erased rectangles, as in timm.
    """
    _check_output(image_size, mean, std)
    check_option("interpolation", interpolation, (*INTERPOLATIONS, "random"))
    check_bounds("scale", scale)
    check_bounds("ratio", ratio)
    check_range("hflip", hflip, 0, 1)
    check_number("color_jitter", color_jitter, 0)
    check_range("erase_prob", erase_prob, 0, 1)
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
    """Resize and crop the centre.

    image_size: side in pixels, or (height, width).
    mean, std: mean and standard deviation of each channel.
    crop_pct: side of the crop relative to the resized image, at most 1.
    crop_mode: "center" keeps the aspect ratio and crops the margins, "squash" changes the aspect ratio, "border" keeps
        the whole image and pads it with the mean.
    """
    _check_output(image_size, mean, std)
    check_option("interpolation", interpolation, INTERPOLATIONS)
    check_option("crop_mode", crop_mode, ("center", "squash", "border"))
    check_range("crop_pct", crop_pct, 0, 1, open_low=True)
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
        # timm always resizes bilinearly here if height and width differ
        if isinstance(step, ResizeKeepRatio):
            step.interpolation = str_to_interp_mode(interpolation)
    return transform


def posterize(image: Image.Image, bits: int, **options: Any) -> Image.Image:
    """Keep the highest bits of each value.

    At full magnitude timm keeps none (2% of the images with rand-m9-mstd0.5-inc1): a black image, which Pillow 13
    refuses to make.
    """
    return timm_posterize(image, bits, **options) if bits > 0 else Image.new(image.mode, image.size)


def _operations(steps: Iterable[Any]) -> Iterable[AugmentOp]:
    """The operations of RandAugment and AugMix (``ops``) and of AutoAugment (``policy``, a list of lists)."""
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
        raise UserError(f"mean and std must both have 3 numbers, or 1 for greyscale images, got {mean} and {std}")
    if not all(value > 0 for value in std):
        raise UserError(f"std must be positive, got {std}")


def check_bounds(name: str, bounds: tuple[float, float]) -> None:
    if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
        raise UserError(f"{name} must be (least, greatest) with 0 < least <= greatest, got {bounds}")
