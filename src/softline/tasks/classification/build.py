"""Build a classification task from its recipe: network, data, transforms."""

from typing import Any

from timm.data import Mixup
from torch.utils.data import Dataset

from softline.data.images import (
    ImageSource,
    ImageStream,
    LabelledImages,
    StreamImages,
    check_same_classes,
    open_source,
    train_transform,
)
from softline.engine import distributed
from softline.engine.machine import check_batch_memory
from softline.engine.recipe import ModelRecipe
from softline.engine.task import Notify, Setup
from softline.errors import UserError
from softline.tasks.classification.recipe import Augment, ClassificationRecipe, ImageData
from softline.tasks.classification.task import Classification
from softline.tasks.images import eval_image_transform, image_settings, leave_out_corrupt
from softline.tasks.networks import build_model


def build_classification(recipe: ClassificationRecipe, setup: Setup) -> Classification:
    check_image_memory(recipe)
    train_source = _open(recipe.data, recipe.data.train_split, setup.notify)
    val_source = _open(recipe.data, recipe.data.val_split, setup.notify)
    check_same_classes(train_source, val_source)
    classes = class_names(train_source, recipe.model)
    model = build_model(recipe.model, len(classes), recipe.data.image_size)
    settings = image_settings(model, recipe.data)
    make_train = train_image_transform(recipe.augment, settings)
    return Classification(
        model,
        classes,
        train_set=image_dataset(train_source, make_train, seed=recipe.seed, rank=setup.rank, mode=settings["mode"]),
        val_set=image_dataset(val_source, eval_image_transform(settings), rank=setup.rank, mode=settings["mode"]),
        mixup=build_mixup(recipe.augment, len(classes)),
        smoothing=recipe.augment.smoothing,
        channels_last=recipe.model.channels_last,
    )


def check_image_memory(recipe: ClassificationRecipe) -> None:
    """Check that a batch of images fits into memory, if the recipe tells their size."""
    if recipe.data.image_size is not None:
        channels = recipe.model.options.get("in_chans", 3)
        # anything but a number is refused by the model
        shape = (channels if isinstance(channels, int) else 3, recipe.data.image_size, recipe.data.image_size)
        check_batch_memory(recipe, shape, processes=distributed.place()[1])


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
    """Return the source's class names, or numbers if it has none and the recipe says how many there are."""
    if source.classes:
        return source.classes
    if "num_classes" not in model.options:
        raise UserError("the data does not name its classes: say how many by --model.options.num_classes")
    return tuple(str(index) for index in range(model.options["num_classes"]))


def _open(data: ImageData, split: str, notify: Notify) -> ImageSource | ImageStream:
    source = open_source(data.source, split, root=data.root)
    return leave_out_corrupt(source, split, notify) if data.skip_corrupt else source


def image_dataset(
    source: ImageSource | ImageStream, transform: Any, *, mode: Any, seed: int = 0, rank: int = 0
) -> Dataset[Any]:
    if isinstance(source, ImageStream):
        return StreamImages(source, transform, seed=seed, rank=rank, mode=mode)
    return LabelledImages(source, transform, seed=seed, mode=mode)
