"""What is analysed: models, trained or fresh, and the images that they are shown."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from softline.backbones.inspection import Layer, LayerInput, attention_layers, find_backbone, look
from softline.checks import check_at_least, check_integer
from softline.data.images import ImageSource, open_source
from softline.data.images.datasets import to_mode
from softline.data.images.folders import image_extensions, is_image_name
from softline.data.images.photographs import PHOTOGRAPHS, open_photograph
from softline.data.images.single import read_image
from softline.engine.recipe import ModelRecipe
from softline.errors import UserError
from softline.measure.cases import parse_model
from softline.tasks.classification.recipe import ClassificationRecipe
from softline.tasks.images import eval_image_transform, image_settings
from softline.tasks.loading import load_trained
from softline.tasks.networks import build_model

CLASSES_OF_FRESH_MODELS = 1000


@dataclass(frozen=True)
class Subject:
    """A model in eval mode with all that is needed to show it an image."""

    name: str
    """What tables and figures call it."""
    model: nn.Module
    """A classifier; of a detector or segmenter its backbone."""
    classes: tuple[str, ...]
    """Names by label; empty if it names none."""
    settings: dict[str, Any]
    """Size, colours and crop of its images."""
    trained: bool
    data: tuple[str, str, str | None] | None = field(default=None)
    """Source, split and root of the images that its training was validated on."""

    @cached_property
    def layers(self) -> list[Layer]:
        """Attentions that can give their weights."""
        found = attention_layers(self.model)
        if not found:
            raise UserError(f"{self.name} has no attention to show: none of its blocks can give its weights")
        return found

    def prepare(self, image: Image.Image, size: int | None = None) -> Tensor:
        """What the model sees of an image: [C, size, size]; the size that it was made for unless given."""
        settings = self.settings if size is None else {**self.settings, "image_size": size}
        least = find_backbone(self.model).min_size
        if settings["image_size"] < least:
            raise UserError(
                f"{self.name} needs images of at least {least} x {least} pixels, got a size of {settings['image_size']}"
            )
        tensor: Tensor = eval_image_transform(settings)(to_mode(image, settings["mode"], lambda: "the image"))
        return tensor

    def shown(self, images: Tensor) -> Tensor:
        """Prepared images [..., C, H, W] back in 0 to 1, for people."""
        mean, std = (torch.tensor(self.settings[key])[:, None, None] for key in ("mean", "std"))
        return (images * std + mean).clamp(0, 1)

    def look(self, images: Tensor, layers: Sequence[Layer] | None = None) -> tuple[list[LayerInput], Tensor]:
        """What the layers, all of them by default, are given for images [B, C, H, W]; and the logits."""
        return look(self.model, images, self.layers if layers is None else layers)


def open_subject(text: str, *, name: str | None = None, seed: int = 0) -> Subject:
    """A checkpoint of `train`, a directory that timm saved, or a model by its name, with random weights.

    text: a path, or such as ``softpp_tiny`` or ``softpp_tiny:attention=inline``.
    name: what figures call it; by default the model's name.
    seed: of random weights.
    """
    path = Path(text)
    if not path.exists() and path.suffix not in (".pt", ".pth"):
        return _fresh(text, name, seed)
    trained = load_trained(text)
    if trained.task == "sequence":
        raise UserError(f"{text} was trained for sequences: there is no image to show it")
    model = trained.model.eval()
    if trained.task != "classification":
        model = find_backbone(model, text)
        return Subject(name or trained.name, model, (), image_settings(model), trained=True)
    find_backbone(model, text)
    data = None
    if isinstance(trained.recipe, ClassificationRecipe):
        given = trained.recipe.data
        data = (given.source, given.val_split, given.root)
    return Subject(name or trained.name, model, trained.classes, trained.settings, trained=True, data=data)


def _fresh(text: str, name: str | None, seed: int) -> Subject:
    if os.sep in text and not text.startswith(("hf-hub:", "local-dir:")):
        raise UserError(f"no such checkpoint: {text}")
    case = parse_model(text)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build_model(ModelRecipe(name=case.model, options=case.options), CLASSES_OF_FRESH_MODELS, None).eval()
    find_backbone(model, text)
    return Subject(name or text, model, (), image_settings(model), trained=False)


def open_subjects(texts: Sequence[str], *, seed: int = 0) -> list[Subject]:
    """Several models: each a text for `open_subject`, with a name before it if wanted (``NAME=PATH``).

    Checkpoints without one are called by what tells their paths apart, such as the directories of several runs.
    """
    pairs = [_split_name(text) for text in texts]
    paths = [text for name, text in pairs if name is None and Path(text).exists()]
    short = _telling_parts(paths) if len(paths) > 1 else {}
    check_integer("seed", seed, 0)
    if seed >= 2**63:
        raise UserError(f"seed must be below 2^63, got {seed}")
    subjects = [open_subject(text, name=name or short.get(text), seed=seed) for name, text in pairs]
    names = [subject.name for subject in subjects]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"several models are called {twice[0]}: name them apart by NAME=MODEL")
    return subjects


def _split_name(text: str) -> tuple[str | None, str]:
    """NAME=MODEL, where MODEL:KEY=VALUE is a model without a name."""
    name, equals, rest = text.partition("=")
    if not equals or ":" in name or os.sep in name or Path(text).exists():
        return None, text
    if not name or not rest:
        raise UserError(f"models are MODEL or NAME=MODEL, got {text!r}")
    return name, rest


def _telling_parts(paths: Sequence[str]) -> dict[str, str]:
    """The parts of each path that are not those of all, from the left and from the right."""
    parts = {path: list(Path(path).resolve().parts) for path in paths}
    for side in (0, -1):
        while all(len(part) > 1 for part in parts.values()) and len({part[side] for part in parts.values()}) == 1:
            for part in parts.values():
                part.pop(side)
    return {path: "/".join(part) for path, part in parts.items()}


# images


@dataclass(frozen=True)
class Picture:
    name: str
    image: Image.Image
    label: int | None = None


def choose_pictures(subject: Subject, paths: Sequence[str], count: int) -> list[Picture]:
    """``count`` images at most: those of files and folders; without any the subject's validation images.

    A model without data of its own is shown the package's photographs.
    """
    check_at_least("count", count, 1)
    if paths:
        return read_pictures(paths, count)
    if subject.data is not None:
        return source_pictures(own_source(subject), count)
    return [Picture(name, open_photograph(name)) for name in list(PHOTOGRAPHS)[:count]]


def own_source(subject: Subject) -> ImageSource:
    """The images that the subject's training was validated on."""
    if subject.data is None:
        raise UserError(f"{subject.name} was not trained by softline for classification: it has no images of its own")
    source, split, root = subject.data
    opened = open_source(source, split, root=root)
    if not isinstance(opened, ImageSource):
        raise UserError(f"the images of {source} can only be read in order: name files or folders by --images")
    return opened


def read_pictures(paths: Sequence[str], count: int) -> list[Picture]:
    """The first ``count`` images of files and folders, folders searched throughout and in alphabetical order."""
    files: list[Path] = []
    for path in map(Path, paths):
        found = sorted(file for file in path.rglob("*") if is_image_name(file.name)) if path.is_dir() else [path]
        if not found:
            raise UserError(f"{path} holds no images ({image_extensions()})")
        files += found
    return [Picture(file.name, read_image(str(file), "RGB")) for file in files[:count]]


def source_pictures(source: ImageSource, count: int) -> list[Picture]:
    """``count`` images spread evenly over the source."""
    check_at_least("count", count, 1)
    count = min(count, len(source))
    if not count:
        raise UserError("the validation data is empty")
    places = [place * len(source) // count for place in range(count)]
    return [Picture(source.name(place), *source.load(place)) for place in places]
