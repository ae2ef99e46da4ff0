"""The subjects of an analysis, which are trained or fresh models, and the images that they are shown."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from PIL import Image
from torch import Tensor, nn

from softline.backbones.creation import create_for_size
from softline.backbones.inspection import Layer, LayerInput, attention_layers, find_backbone, look
from softline.checks import check_at_least, check_integer
from softline.data.images import ImageSource, is_fetched, open_source
from softline.data.images.datasets import to_mode
from softline.data.images.folders import image_extensions, is_image_name
from softline.data.images.photographs import PHOTOGRAPHS, open_photograph
from softline.data.images.single import read_image
from softline.data.reading import walk
from softline.errors import UserError
from softline.measure.cases import parse_model
from softline.tasks.images import eval_image_transform, image_settings
from softline.tasks.loading import load_trained

ImageSize: TypeAlias = int | tuple[int, int]
"""The side of a square image in pixels, or (height, width)."""


@dataclass(frozen=True)
class Subject:
    """A model in eval mode, with everything needed to show it an image."""

    name: str
    """What tables and figures call the model."""
    model: nn.Module
    classes: tuple[str, ...]
    """Names by label; empty if the model names none."""
    settings: dict[str, Any]
    """Size, mean, std, interpolation, crop and colour mode of the model's images."""
    trained: bool
    data: tuple[str, str, str | None] | None = None
    """Source, split and root of the images on which its training was validated."""

    @cached_property
    def layers(self) -> list[Layer]:
        """The layers whose attention can return its weights."""
        found = attention_layers(self.model)
        if not found:
            raise UserError(f"{self.name} has no attention to show: none of its blocks can give its weights")
        return found

    def prepare(self, image: Image.Image, size: ImageSize | None = None) -> Tensor:
        """Convert an image to the model's input [C, height, width].

        size: side in pixels, or (height, width); defaults to the model's own.
        """
        settings = self.settings if size is None else {**self.settings, "image_size": size}
        least, asked = find_backbone(self.model).min_size, settings["image_size"]
        if min(asked if isinstance(asked, tuple) else (asked,)) < least:
            shown = " x ".join(map(str, asked)) if isinstance(asked, tuple) else asked
            raise UserError(f"{self.name} needs images of at least {least} x {least} pixels, got a size of {shown}")
        tensor: Tensor = eval_image_transform(settings)(to_mode(image, settings["mode"], lambda: "the image"))
        return tensor

    def shown(self, images: Tensor) -> Tensor:
        """Undo the normalisation of prepared images [..., C, H, W]: values from 0 to 1."""
        mean, std = (torch.tensor(self.settings[key])[:, None, None] for key in ("mean", "std"))
        return (images * std + mean).clamp(0, 1)

    def look(self, images: Tensor, layers: Sequence[Layer] | None = None) -> tuple[list[LayerInput], Tensor]:
        """Run the model on images [B, C, H, W]; return what the layers are given, and the logits.

        layers: defaults to all of them.
        """
        return look(self.model, images, self.layers if layers is None else layers)


def open_subject(text: str, *, name: str | None = None, seed: int = 0) -> Subject:
    """Load a checkpoint of `train` or a directory saved by timm, or create a model with random weights by its name.

    text: a path, or a model such as ``softpp_tiny`` or ``softpp_tiny:attention=inline``.
    name: what figures call the model; defaults to its own name.
    seed: seed of random weights.
    """
    path = Path(text)
    if not path.exists() and path.suffix not in (".pt", ".pth"):
        return _fresh(text, name, seed)
    trained = load_trained(text)
    view = trained.view()
    find_backbone(view.model, text)
    return Subject(name or trained.name, view.model.eval(), view.classes, view.settings, trained=True, data=view.data)


def _fresh(text: str, name: str | None, seed: int) -> Subject:
    if os.sep in text and not text.startswith(("hf-hub:", "local-dir:")):
        raise UserError(f"no such checkpoint: {text}")
    case = parse_model(text)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = create_for_size(case.model, None, **case.options).eval()
    find_backbone(model, text)
    return Subject(name or text, model, (), image_settings(model), trained=False)


def open_subjects(texts: Sequence[str], *, seed: int = 0) -> list[Subject]:
    """Open several models, each described as for `open_subject`, optionally with a name before it (``NAME=PATH``).

    Checkpoints without a name are called by the parts of their paths that differ, such as the directories of the runs.
    """
    pairs = named_texts(texts, "models", "MODEL")
    check_integer("seed", seed, 0)
    if seed >= 2**63:
        raise UserError(f"seed must be below 2^63, got {seed}")
    subjects = [open_subject(text, name=name, seed=seed) for name, text in pairs]
    check_distinct([subject.name for subject in subjects], "models", "MODEL")
    return subjects


def named_texts(texts: Sequence[str], what: str, kind: str) -> list[tuple[str | None, str]]:
    """Split each NAME=TEXT; of several paths without a name, the parts that differ are their names.

    what, kind: what an error calls several of them, and one of them.
    """
    pairs = [_split_name(text, what, kind) for text in texts]
    paths = [text for name, text in pairs if name is None and Path(text).exists()]
    short = _differing_parts(paths) if len(paths) > 1 else {}
    return [(name or short.get(text), text) for name, text in pairs]


def check_distinct(names: Sequence[str], what: str, kind: str) -> None:
    """Raise if a name is used twice; ``what`` and ``kind`` as in `named_texts`."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"several {what} are called {twice[0]}: name them apart by NAME={kind}")


def _split_name(text: str, what: str, kind: str) -> tuple[str | None, str]:
    """Split NAME=TEXT; in MODEL:KEY=VALUE the model has no name."""
    name, equals, rest = text.partition("=")
    if not equals or ":" in name or os.sep in name or Path(text).exists():
        return None, text
    if not name or not rest:
        raise UserError(f"{what} are {kind} or NAME={kind}, got {text!r}")
    return name, rest


def _differing_parts(paths: Sequence[str]) -> dict[str, str]:
    """Each path without the parts at its beginning and end that all paths share."""
    parts = {path: list(Path(path).resolve().parts) for path in paths}
    for side in (0, -1):
        while all(len(part) > 1 for part in parts.values()) and len({part[side] for part in parts.values()}) == 1:
            for part in parts.values():
                part.pop(side)
    return {path: "/".join(part) for path, part in parts.items()}


# images


@dataclass(frozen=True)
class Picture:
    """An image to show to models."""

    name: str
    image: Image.Image
    label: int | None = None


def choose_pictures(subject: Subject, paths: Sequence[str], count: int) -> list[Picture]:
    """Choose at most ``count`` images from files and folders; without paths, from the subject's validation images.

    A model without data of its own is shown the photographs that come with the package.
    """
    check_at_least("count", count, 1)
    if paths:
        return read_pictures(paths, count)
    if subject.data is not None:
        return source_pictures(own_source(subject), count)
    return [Picture(name, open_photograph(name)) for name in list(PHOTOGRAPHS)[:count]]


def choose_sets(subject: Subject, texts: Sequence[str], count: int) -> dict[str, list[Picture]]:
    """Choose at most ``count`` images for each set that is named by ``NAME=PATH``.

    A name that is used several times is one set. Without names, all images are one set, which is called "".
    """
    pairs = [_split_name(text, "images", "PATH") for text in texts]
    names = list(dict.fromkeys(name for name, _ in pairs))
    if None in names and len(names) > 1:
        unnamed = next(path for name, path in pairs if name is None)
        raise UserError(f"either all images are given as NAME=PATH or none of them, got {unnamed!r} without a name")
    paths = {name or "": [path for other, path in pairs if other == name] for name in names or [None]}
    return {name: choose_pictures(subject, found, count) for name, found in paths.items()}


def own_source(subject: Subject) -> ImageSource:
    """Open the images on which the subject's training was validated."""
    if subject.data is None:
        raise UserError(f"{subject.name} has no labelled images of its own: softline did not train it to classify")
    source, split, root = subject.data
    if is_fetched(source):
        raise UserError(
            f"the images of {source}, which {subject.name} names, may have to be fetched: name files by --images"
        )
    opened = open_source(source, split, root=root)
    if not isinstance(opened, ImageSource):
        raise UserError(f"the images of {source} can only be read in order: name files or folders by --images")
    return opened


def read_pictures(paths: Sequence[str], count: int) -> list[Picture]:
    """Read the first ``count`` images of files and folders; folders are searched recursively, in alphabetical order."""
    files: list[Path] = []
    for path in map(Path, paths):
        found = image_files(path) if path.is_dir() else [path]
        if not found:
            raise UserError(f"{path} holds no images ({image_extensions()})")
        files += found
    return [Picture(file.name, read_image(str(file), "RGB")) for file in files[:count]]


def image_files(folder: Path) -> list[Path]:
    """List the images in a folder and below, in alphabetical order."""
    return sorted(found.path / name for found in walk(folder, wanted=is_image_name) for name in found.files)


def source_pictures(source: ImageSource, count: int) -> list[Picture]:
    """Load ``count`` images spread evenly over a source."""
    check_at_least("count", count, 1)
    count = min(count, len(source))
    if not count:
        raise UserError("the validation data is empty")
    places = [place * len(source) // count for place in range(count)]
    return [Picture(source.name(place), *source.load(place)) for place in places]
