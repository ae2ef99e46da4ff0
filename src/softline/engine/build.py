"""From a recipe of classification to its task: model, data, transforms."""

import difflib
import logging
from collections.abc import Callable
from typing import Any

import timm
import torch
from timm.data import Mixup, resolve_model_data_config
from timm.layers import freeze_batch_norm_2d
from torch import nn
from torch.utils.data import Dataset

from softline.backbones import MODEL_NAMES
from softline.backbones.backbone import fit_positions
from softline.backbones.official import check_keys
from softline.checkpoints import read_weights
from softline.data import (
    ImageSource,
    ImageStream,
    LabelledImages,
    StreamImages,
    check_same_classes,
    eval_transform,
    find_corrupt,
    open_source,
    train_transform,
    without,
)
from softline.engine import distributed
from softline.engine.recipe import Augment, ClassificationRecipe, ImageData, ModelRecipe
from softline.tasks import Classification

Notify = Callable[[str], None]
log = logging.getLogger(__name__)


def build_classification(recipe: ClassificationRecipe, *, rank: int = 0, notify: Notify = log.info) -> Classification:
    train_source = _open(recipe.data, recipe.data.train_split, notify)
    val_source = _open(recipe.data, recipe.data.val_split, notify)
    check_same_classes(train_source, val_source)
    classes = class_names(train_source, recipe.model)
    model = build_model(recipe.model, len(classes), recipe.data.image_size)
    settings = image_settings(model, recipe.data)
    make_train = train_image_transform(recipe.augment, settings)
    return Classification(
        model,
        classes,
        train_set=image_dataset(train_source, make_train, seed=recipe.seed, rank=rank, mode=settings["mode"]),
        val_set=image_dataset(val_source, eval_image_transform(settings), rank=rank, mode=settings["mode"]),
        mixup=build_mixup(recipe.augment, len(classes)),
        smoothing=recipe.augment.smoothing,
        channels_last=recipe.model.channels_last,
    )


def build_model(
    recipe: ModelRecipe, num_classes: int, image_size: int | None = None, *, device: Any = None
) -> nn.Module:
    """The model, its classifier fitted to the classes and softline's positions to the images."""
    check_model_name(recipe.name)
    options: dict[str, Any] = {"num_classes": num_classes, **recipe.options}
    if device is not None:
        options["device"] = device
    model = create_for_size(recipe.name, image_size, pretrained=recipe.pretrained, **options)
    if recipe.checkpoint is not None:
        load_weights(model, recipe.checkpoint, name=recipe.name)
    network = prepare_network(model, recipe)
    return network.to(memory_format=torch.channels_last) if recipe.channels_last else network


def prepare_network(network: Any, recipe: ModelRecipe) -> nn.Module:
    """What a recipe wants of a network once it has its weights."""
    if recipe.grad_checkpointing:
        try:
            network.set_grad_checkpointing(True)
        except (AssertionError, AttributeError):
            # timm asserts
            raise ValueError(f"model.grad_checkpointing: {recipe.name} does not offer it") from None
    prepared: nn.Module = freeze_batch_norm_2d(network) if recipe.freeze_batch_norm else network
    return prepared


def set_image_size(model: nn.Module, name: str, size: int) -> None:
    """Fit one of timm's models, already built, to images of another size; softline's own take any."""
    if name in MODEL_NAMES or not hasattr(model, "set_input_size"):
        return
    try:
        model.set_input_size(img_size=size)  # type: ignore[operator]
    except (AssertionError, RuntimeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{name} cannot take images of {size} x {size} pixels: {error}") from None


def create_for_size(name: str, size: int | None, **options: Any) -> Any:
    """`timm.create_model` for images of ``size``, where the model's constructor asks for it.

    Not by its set_input_size, which also changes what is learned for a size, such as the windows of Swin.
    """
    if size is None or "img_size" in options:
        return _create(name, options)
    try:
        model = timm.create_model(name, img_size=size, **options)
        if 0 in (getattr(getattr(model, "patch_embed", None), "grid_size", None) or ()):
            raise ValueError("they are smaller than a patch")
        return model
    except (AssertionError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        failure = error.with_traceback(None)
    # what fails without the size too is the fault of something else, and says so
    model = _create(name, options)
    if isinstance(failure, TypeError) and "img_size" in str(failure):
        # a network of convolutions takes any size
        return model
    raise ValueError(f"{name} cannot take images of {size} x {size} pixels: {failure}")


def _create(name: str, options: dict[str, Any]) -> Any:
    try:
        return timm.create_model(name, **options)
    except TypeError as error:
        raise ValueError(f"model.options of {name}: {error}") from None
    except (AssertionError, RuntimeError, ZeroDivisionError) as error:
        raise ValueError(f"{name} cannot be built: {error}") from None


def check_model_name(name: str) -> None:
    # local-dir: and hf-hub: are for timm to resolve
    if ":" in name or timm.is_model(name):
        return
    near = difflib.get_close_matches(name, sorted({*MODEL_NAMES, *timm.list_models()}), 3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; `softline models` lists softline's"
    raise ValueError(f"timm knows no model {name!r}{hint}")


def load_weights(model: nn.Module, path: str, *, name: str) -> None:
    """Start from a checkpoint: positions are interpolated, a classifier for other classes is left as it is."""
    weights = fit_positions(read_weights(path, name), model)
    own = model.state_dict()
    classifier = [key for key in own if key.startswith(f"{_classifier_name(model)}.")]
    if any(key in weights and weights[key].shape != own[key].shape for key in classifier):
        weights |= {key: own[key] for key in classifier}
    check_keys(model, weights, f"{name} (model.checkpoint {path})")
    model.load_state_dict(weights)


def _classifier_name(model: nn.Module) -> str:
    cfg: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    return str(cfg.get("classifier") or "head")


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
                raise ValueError(f"data.{key} must have {channels} numbers for in_chans={channels}, got {given[key]}")
            settings[key] = (sum(settings[key]) / len(settings[key]),) * channels
    return settings


def train_image_transform(augment: Augment, settings: dict[str, Any]) -> Any:
    return train_transform(
        settings["image_size"],
        mean=settings["mean"],
        std=settings["std"],
        interpolation="random" if augment.random_interpolation else settings["interpolation"],
        scale=augment.scale,
        ratio=augment.ratio,
        hflip=augment.hflip,
        color_jitter=augment.color_jitter,
        auto_augment=augment.auto_augment,
        erase_prob=augment.erase_prob,
        erase_mode=augment.erase_mode,
        erase_count=augment.erase_count,
    )


def eval_image_transform(settings: dict[str, Any]) -> Any:
    keys = ("mean", "std", "interpolation", "crop_pct", "crop_mode")
    return eval_transform(settings["image_size"], **{key: settings[key] for key in keys})


def build_mixup(augment: Augment, num_classes: int) -> Mixup | None:
    if not augment.mixup and not augment.cutmix:
        return None
    return Mixup(
        mixup_alpha=augment.mixup,
        cutmix_alpha=augment.cutmix,
        prob=augment.mixup_prob,
        switch_prob=augment.switch_prob,
        mode="batch",
        label_smoothing=augment.smoothing,
        num_classes=num_classes,
    )


def class_names(source: ImageSource | ImageStream, model: ModelRecipe) -> tuple[str, ...]:
    """The source's, or numbers where it has none but the recipe says how many."""
    if source.classes:
        return source.classes
    if "num_classes" not in model.options:
        raise ValueError("the data does not name its classes: say how many by --model.options.num_classes")
    return tuple(str(index) for index in range(model.options["num_classes"]))


def _open(data: ImageData, split: str, notify: Notify) -> ImageSource | ImageStream:
    source = open_source(data.source, split, root=data.root)
    return leave_out_corrupt(source, split, notify) if data.skip_corrupt else source


def leave_out_corrupt(source: ImageSource | ImageStream, split: str, notify: Notify) -> ImageSource:
    """The images that can be decoded; how many cannot, and which, goes to ``notify``."""
    if isinstance(source, ImageStream):
        raise ValueError(
            "skip_corrupt needs images that can be read in any order: a directory, a .tar, hfds/ or torch/"
        )
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
        raise ValueError(f"{split}: none of the {len(source)} images can be decoded")
    return [image.index for image in corrupt]


def image_dataset(
    source: ImageSource | ImageStream, transform: Any, *, mode: Any, seed: int = 0, rank: int = 0
) -> Dataset[Any]:
    if isinstance(source, ImageStream):
        return StreamImages(source, transform, seed=seed, rank=rank, mode=mode)
    return LabelledImages(source, transform, seed=seed, mode=mode)


def _mode(channels: int) -> str:
    if channels not in (1, 3):
        raise ValueError(f"images have 1 (grey) or 3 (colour) channels; the model's in_chans is {channels}")
    return "L" if channels == 1 else "RGB"
