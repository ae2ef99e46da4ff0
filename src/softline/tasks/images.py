"""What tasks on images share: how a model wants its images, and which images cannot be read."""

from collections.abc import Sequence
from typing import Any, Protocol

from timm.data import resolve_model_data_config
from torch import nn

from softline.backbones.inspection import find_backbone
from softline.data.images import (
    ImageSource,
    ImageStream,
    eval_transform,
    find_corrupt,
    without,
)
from softline.engine import distributed
from softline.engine.task import Notify
from softline.engine.trained import ImageView
from softline.errors import UserError


class SplitData(Protocol):
    """The part of a recipe that names training and validation data."""

    @property
    def source(self) -> str: ...

    @property
    def train_split(self) -> str: ...

    @property
    def val_split(self) -> str: ...


def image_settings(model: nn.Module, data: Any = None) -> dict[str, Any]:
    """Return size, mean, std, interpolation, crop and colour mode of a model's images.

    data: the part of a recipe that describes images; what it leaves out is the model's own.
    """
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


def backbone_view(model: nn.Module, name: str) -> ImageView:
    """Return the view of the backbone inside a model with a head."""
    backbone = find_backbone(model, name)
    return ImageView(backbone, (), image_settings(backbone))


def eval_image_transform(settings: dict[str, Any]) -> Any:
    keys = ("mean", "std", "interpolation", "crop_pct", "crop_mode")
    return eval_transform(settings["image_size"], **{key: settings[key] for key in keys})


def leave_out_corrupt(source: ImageSource | ImageStream, split: str, notify: Notify) -> ImageSource:
    """Return the images that can be decoded; ``notify`` receives how many cannot, and which."""
    if isinstance(source, ImageStream):
        raise UserError("skip_corrupt needs images that can be read in any order: a directory, a .tar, hfds/ or torch/")
    return without(source, corrupt_indices(source, split, notify))


def corrupt_indices(source: Any, split: str, notify: Notify) -> list[int]:
    """Return the indices of images that cannot be loaded; all processes share the search."""
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


def check_split_classes(train: Sequence[str], val: Sequence[str], data: SplitData) -> None:
    """Check that training and validation data have the same classes in the same order."""
    if tuple(train) != tuple(val):
        differ = sorted(set(train) ^ set(val))
        names = f": {', '.join(differ[:10])}" if differ else " in another order"
        raise UserError(f"{data.train_split} and {data.val_split} of {data.source} have different classes{names}")


def check_trained_classes(trained: Sequence[str], found: Sequence[str], source: str) -> None:
    """Check that data has the classes that a model was trained for, in the same order."""
    if tuple(found) != tuple(trained):
        differ = sorted(set(found) ^ set(trained))
        names = f": {', '.join(differ[:10])} in one of them only" if differ else ", but in another order"
        raise UserError(f"the classes of {source} are not those the model was trained for{names}")
