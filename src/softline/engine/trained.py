"""Use a trained model: load it; evaluate a classifier at several image sizes, name what is on an image."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from softline.backbones.official import check_keys
from softline.data import in_order, open_source
from softline.engine.build import (
    Notify,
    build_model,
    check_model_name,
    eval_image_transform,
    image_dataset,
    image_settings,
    leave_out_corrupt,
    log,
    set_image_size,
)
from softline.engine.build_sequence import sequence_model
from softline.engine.checkpoint import load_checkpoint
from softline.engine.evaluate import Evaluation, evaluate
from softline.engine.images import read_image
from softline.engine.reading import read_recipe
from softline.engine.recipe import ClassificationRecipe, Recipe, SequenceRecipe
from softline.tasks import Classification


@dataclass(frozen=True)
class Trained:
    """A model with all that is needed to show it an image."""

    name: str
    model: nn.Module
    classes: tuple[str, ...]
    """Names by label; empty if unknown."""
    settings: dict[str, Any]
    """Of the images it was trained for: size, mean, std, interpolation, crop, colour mode; of sequences their
    vocabulary, positions and parts; none for dense tasks, whose recipe has them."""
    recipe: Recipe | None = None
    """By which it was trained, if softline did."""

    @property
    def task(self) -> str:
        return "classification" if self.recipe is None else self.recipe.task


@dataclass(frozen=True)
class Prediction:
    name: str
    """The image's."""
    classes: list[str]
    """The likeliest first."""
    probabilities: list[float]


def load_trained(checkpoint: str) -> Trained:
    """A checkpoint of `train`, a directory that timm saved, or the name of a model with published weights."""
    path = Path(checkpoint)
    if path.is_dir():
        if not (path / "config.json").is_file():
            inside = " (there is a best.pt in it)" if (path / "best.pt").is_file() else ""
            raise ValueError(f"{path} is a directory without timm's config.json: name a checkpoint file{inside}")
        return _load_timm(f"local-dir:{path}")
    if path.is_file() or path.suffix in (".pt", ".pth"):
        return _load_checkpoint(path)
    return _load_timm(checkpoint)


def evaluate_sizes(
    trained: Trained,
    source: str,
    accelerator: Accelerator,
    *,
    sizes: Sequence[int] | None = None,
    split: str = "val",
    root: str | None = None,
    batch_size: int = 64,
    workers: int = 0,
    skip_corrupt: bool = False,
    notify: Notify = log.info,
    progress: Callable[[int, int | None], None] = lambda *_: None,
) -> Iterator[tuple[int, Evaluation]]:
    """Accuracy on images of each size, as in Table 6 of the SOFT paper; the size it was trained for by default."""
    images = open_source(source, split, root=root)
    if skip_corrupt:
        images = leave_out_corrupt(images, split, notify)
    classes = _check_classes(trained, images.classes, source)
    if images.classes and images.classes != classes:
        images = in_order(images, classes)
    trained.model.to(accelerator.device)
    for size in sizes or [trained.settings["image_size"]]:
        settings = {**trained.settings, "image_size": size}
        # resized positions cannot be sized back
        model = copy.deepcopy(trained.model)
        set_image_size(model, trained.name, size)
        dataset = image_dataset(
            images, eval_image_transform(settings), mode=settings["mode"], rank=accelerator.process_index
        )
        task = Classification(model, classes, val_set=dataset)
        result = evaluate(task, model, accelerator, batch_size=batch_size, workers=workers, progress=progress)
        assert result is not None, "nothing stops it"
        yield size, result


def predict(trained: Trained, paths: Sequence[str], *, top: int = 5) -> Iterator[Prediction]:
    """The likeliest classes of each image."""
    transform = eval_image_transform(trained.settings)
    trained.model.eval()
    for path in paths:
        image = read_image(path, trained.settings["mode"])
        with torch.no_grad():
            logits: Tensor = trained.model(transform(image).unsqueeze(0))[0]
        probabilities = logits.float().softmax(0)
        best = probabilities.topk(min(top, len(probabilities)))
        labels = [trained.classes[i] if trained.classes else str(i) for i in best.indices.tolist()]
        yield Prediction(path, labels, best.values.tolist())


def _load_checkpoint(path: Path) -> Trained:
    content = load_checkpoint(path)
    recipe = read_recipe(content["recipe"], where=str(path))
    classes = tuple(content["facts"]["classes"])
    settings: dict[str, Any] = {}
    if isinstance(recipe, ClassificationRecipe):
        model = build_model(recipe.without_weights().model, len(classes), recipe.data.image_size)
        settings = image_settings(model, recipe.data)
    elif isinstance(recipe, SequenceRecipe):
        model = sequence_model(recipe, content["facts"])
        settings = content["facts"]
    else:
        # dense tasks need further packages
        from softline.engine.dense import dense_model

        model = dense_model(recipe, len(classes))
    weights = content["state_dict"] if content["state_dict_ema"] is None else content["state_dict_ema"]
    check_keys(model, weights, f"{recipe.model.name} ({path})")
    model.load_state_dict(weights)
    return Trained(recipe.model.name, model, classes, settings, recipe)


def _load_timm(name: str) -> Trained:
    check_model_name(name)
    try:
        model = timm.create_model(name, pretrained=True)
    except RuntimeError as error:
        raise ValueError(f"{name}: {error}") from None
    cfg: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    classes = tuple(cfg.get("label_names") or ())
    return Trained(str(cfg.get("architecture") or name), model, classes, image_settings(model))


def _check_classes(trained: Trained, found: tuple[str, ...], source: str) -> tuple[str, ...]:
    """Those of the data, which must be the model's."""
    count = int(getattr(trained.model, "num_classes", len(trained.classes)))
    if trained.classes and found and set(found) != set(trained.classes):
        missing, extra = sorted(set(trained.classes) - set(found)), sorted(set(found) - set(trained.classes))
        raise ValueError(
            f"the classes of {source} are not those the model was trained for: "
            f"missing {', '.join(missing[:10]) or 'none'}; unknown {', '.join(extra[:10]) or 'none'}"
        )
    if found and len(found) != count:
        raise ValueError(f"{source} has {len(found)} classes, the model {count}")
    # the model's, in its order
    return trained.classes or found or tuple(str(index) for index in range(count))
