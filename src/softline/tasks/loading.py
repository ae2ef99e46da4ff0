"""Use a trained model: load it; evaluate a classifier at several image sizes, name what is on an image."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
from torch import nn

from softline.backbones.creation import check_model_name
from softline.engine.checkpoint import load_checkpoint
from softline.engine.reading import read_recipe
from softline.engine.recipe import Recipe
from softline.errors import UserError
from softline.tasks.classification.recipe import ClassificationRecipe
from softline.tasks.images import image_settings
from softline.tasks.networks import build_model
from softline.tasks.sequence.build import sequence_model
from softline.tasks.sequence.recipe import SequenceRecipe
from softline.weights.renaming import check_keys


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


def load_trained(checkpoint: str) -> Trained:
    """A checkpoint of `train`, a directory that timm saved, or the name of a model with published weights."""
    path = Path(checkpoint)
    if path.is_dir():
        if not (path / "config.json").is_file():
            inside = " (there is a best.pt in it)" if (path / "best.pt").is_file() else ""
            raise UserError(f"{path} is a directory without timm's config.json: name a checkpoint file{inside}")
        return _load_timm(f"local-dir:{path}")
    if path.is_file() or path.suffix in (".pt", ".pth"):
        return _load_checkpoint(path)
    return _load_timm(checkpoint)


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
        from softline.tasks.dense import dense_model

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
        raise UserError(f"{name}: {error}") from None
    cfg: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    classes = tuple(cfg.get("label_names") or ())
    return Trained(str(cfg.get("architecture") or name), model, classes, image_settings(model))
