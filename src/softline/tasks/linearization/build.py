"""Build both stages from their recipe: teacher, network, data."""

import copy
import dataclasses
import hashlib
from typing import Any

import torch
from torch import nn

from softline.data.images import ImageSource, ImageStream, open_source
from softline.engine.task import Notify, Setup
from softline.errors import UserError
from softline.tasks.classification.build import build_mixup, check_image_memory, image_dataset, train_image_transform
from softline.tasks.classification.trained import Classifier
from softline.tasks.images import eval_image_transform, image_settings, leave_out_corrupt
from softline.tasks.linearization.adapters import add_adapters
from softline.tasks.linearization.recipe import LinearizationRecipe
from softline.tasks.linearization.task import FineTuning, Linearization, Transfer
from softline.tasks.networks import build_model, furnish, load_weights
from softline.weights.renaming import check_keys


def build_linearization(recipe: LinearizationRecipe, setup: Setup) -> Linearization:
    check_image_memory(recipe)
    teacher = open_teacher(recipe)
    train_source, classes = _open(recipe, recipe.data.train_split, teacher, setup.notify)
    val_source, _ = _open(recipe, recipe.data.val_split, teacher, setup.notify)
    network = student(recipe, teacher.model, len(classes))
    settings = image_settings(network, recipe.data)
    make_train = train_image_transform(recipe.augment, settings)
    options: dict[str, Any] = {
        "teacher": teacher.model,
        "labelled": recipe.labelled,
        "train_set": image_dataset(train_source, make_train, seed=recipe.seed, rank=setup.rank, mode=settings["mode"]),
        "val_set": image_dataset(val_source, eval_image_transform(settings), rank=setup.rank, mode=settings["mode"]),
        "mixup": build_mixup(recipe.augment, len(classes)),
        "smoothing": recipe.augment.smoothing,
        "channels_last": recipe.model.channels_last,
    }
    if recipe.stage == "transfer":
        return Transfer(network, classes, **options)
    return FineTuning(network, classes, **options, terms=recipe.loss)


def open_teacher(recipe: LinearizationRecipe) -> Classifier:
    """Open the classifier that a recipe names, for images of the recipe's size."""
    # which imports the tasks
    from softline.tasks.loading import load_trained

    teacher = load_trained(recipe.teacher)
    if not isinstance(teacher, Classifier):
        raise UserError(f"teacher must be a classifier of images; {recipe.teacher} is {teacher.kind}")
    if recipe.teacher_digest not in (None, weights_digest(teacher.model)):
        raise UserError(f"the weights of teacher {recipe.teacher} are not those of teacher_digest")
    if recipe.data.image_size is not None:
        teacher.resize(recipe.data.image_size)
    return teacher


def weights_digest(network: nn.Module) -> str:
    """Return a SHA-256 of the names and values of a network's weights, at the size that it was trained for."""
    digest = hashlib.sha256()
    for name, value in network.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        # numpy has no bfloat16
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def student(recipe: LinearizationRecipe, teacher: nn.Module, num_classes: int) -> nn.Module:
    """Create the network of a recipe, which inherits the teacher's weights unless the recipe names its own."""
    plain = dataclasses.replace(recipe.model, replace=None, checkpoint=None)
    network = build_model(plain, num_classes, recipe.data.image_size)
    weights = teacher.state_dict()
    check_keys(network, weights, f"{recipe.model.name} with model.options (teacher {recipe.teacher})")
    network.load_state_dict(copy.deepcopy(weights))
    furnish(network, recipe.model, load_weights)
    return network if recipe.adapters is None else add_adapters(network, recipe.adapters)


def _open(
    recipe: LinearizationRecipe, split: str, teacher: Classifier, notify: Notify
) -> tuple[ImageSource | ImageStream, tuple[str, ...]]:
    """Open a split with the teacher's labels; return it and the classes."""
    source = open_split(recipe, split)
    if recipe.data.skip_corrupt:
        source = leave_out_corrupt(source, split, notify)
    return teacher.with_own_labels(source, recipe.data.source)


def open_split(recipe: LinearizationRecipe, split: str) -> ImageSource | ImageStream:
    data = recipe.data
    return open_source(data.source, split, root=data.root, labelled=recipe.labelled)
