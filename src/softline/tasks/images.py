"""What tasks on images share: how a model wants its images, and which images cannot be read."""

import logging
from collections.abc import Callable
from typing import Any

from timm.data import resolve_model_data_config
from torch import nn

from softline.data.images import (
    ImageSource,
    ImageStream,
    eval_transform,
    find_corrupt,
    without,
)
from softline.engine import distributed
from softline.errors import UserError
from softline.tasks.classification.recipe import ImageData
from softline.tasks.detection.recipe import DetectionData
from softline.tasks.segmentation.recipe import SemanticData

Notify = Callable[[str], None]


log = logging.getLogger(__name__)


def image_settings(model: nn.Module, data: ImageData | None = None) -> dict[str, Any]:
    """Size, mean, std, interpolation, crop and colour mode of the images: the recipe's, else the model's."""
    cfg = resolve_model_data_config(model)
    channels = int(getattr(model, "in_chans", cfg["input_size"][0]))
    own = {
        "image_size": cfg["input_size"][-1],
        "mean": cfg["mean"],
        "std": cfg["std"],
        "interpolation": cfg["interpolation"],
        "crop_pct": cfg["crop_pct"],
        "crop_mode": cfg["crop_mode"],
    }
    given = {key: value for key in own if (value := getattr(data, key, None)) is not None}
    settings = {**own, **given, "mode": _mode(channels)}
    for key in ("mean", "std"):
        if len(settings[key]) != channels:
            # ImageNet's three numbers mean nothing for grey images
            if key in given:
                raise UserError(f"data.{key} must have {channels} numbers for in_chans={channels}, got {given[key]}")
            settings[key] = (sum(settings[key]) / len(settings[key]),) * channels
    return settings


def eval_image_transform(settings: dict[str, Any]) -> Any:
    keys = ("mean", "std", "interpolation", "crop_pct", "crop_mode")
    return eval_transform(settings["image_size"], **{key: settings[key] for key in keys})


def leave_out_corrupt(source: ImageSource | ImageStream, split: str, notify: Notify) -> ImageSource:
    """The images that can be decoded; how many cannot, and which, goes to ``notify``."""
    if isinstance(source, ImageStream):
        raise UserError("skip_corrupt needs images that can be read in any order: a directory, a .tar, hfds/ or torch/")
    return without(source, corrupt_indices(source, split, notify))


def corrupt_indices(source: Any, split: str, notify: Notify) -> list[int]:
    """Of the images that cannot be loaded; all processes share the search."""
    notify(f"{split}: looking for corrupt images among {len(source):,}")
    corrupt = distributed.gather_lists(find_corrupt(source, shard=distributed.place()))
    names = ", ".join(f"{image.name} ({image.reason})" for image in corrupt[:10])
    names += ", ..." if len(corrupt) > 10 else ""
    notify(
        f"{split}: {len(corrupt)} of {len(source)} images are corrupt and left out" + (f": {names}" if corrupt else "")
    )
    if len(corrupt) == len(source):
        raise UserError(f"{split}: none of the {len(source)} images can be decoded")
    return [image.index for image in corrupt]


def _mode(channels: int) -> str:
    if channels not in (1, 3):
        raise UserError(f"images have 1 (grey) or 3 (colour) channels; the model's in_chans is {channels}")
    return "L" if channels == 1 else "RGB"


def _check_classes(train: tuple[str, ...], val: tuple[str, ...], data: DetectionData | SemanticData) -> None:
    if train != val:
        differ = sorted(set(train) ^ set(val))
        names = f": {', '.join(differ[:10])}" if differ else " in another order"
        raise UserError(f"{data.train_split} and {data.val_split} of {data.source} have different classes{names}")
