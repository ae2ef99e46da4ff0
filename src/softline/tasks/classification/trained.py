"""Trained classifiers: evaluate them at several image sizes, name what is on an image."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from softline.attention.hooks import uncapped_landmarks
from softline.backbones.creation import check_model_name, create_saved, set_image_size
from softline.checks import check_integer, check_option
from softline.data.images import ImageSource, ImageStream, in_order, open_source
from softline.engine.footprint import check_image_memory
from softline.engine.graph import BATCH, HEIGHT, IMAGE_AXES, WIDTH, Description, Graph, Sizes, image_graph
from softline.engine.recipe import ModelRecipe, check_channels
from softline.engine.shipping import check_ends, check_sides, floats
from softline.engine.trained import Evaluator, ImageView, Measured, Trained
from softline.errors import UserError
from softline.plain import check_entries
from softline.tasks.classification.build import image_dataset
from softline.tasks.classification.recipe import ClassificationRecipe
from softline.tasks.classification.task import Classification
from softline.tasks.images import eval_image_transform, image_settings, leave_out_corrupt
from softline.tasks.predicting import Photograph, predict_images
from softline.tasks.probabilities import Probabilities, class_probabilities, names_by_label

BATCH_SIZE = 64
CHANNELS = {"L": 1, "RGB": 3}


class Classifier(Trained):
    """A model that gives each image one of its classes.

    settings: size, mean, std, interpolation, crop and colour mode of its images.
    options: keyword arguments with which timm creates the model, for one without a recipe.
    """

    kind = "a classifier"
    unit = "images"
    drawings = ("",)
    recipe: ClassificationRecipe | None

    def __init__(
        self,
        name: str,
        model: nn.Module,
        classes: Sequence[str],
        settings: dict[str, Any],
        recipe: ClassificationRecipe | None = None,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(name, model, classes, recipe)
        self.settings = settings
        self.options = dict(options or {})

    @property
    def task(self) -> str:
        # timm's models have no recipe
        return "classification" if self.recipe is None else self.recipe.task

    @property
    def architecture(self) -> ModelRecipe:
        """How the model is created, without weights."""
        return ModelRecipe(name=self.name, options=self.options) if self.recipe is None else self.recipe.model

    def resize(self, size: int) -> None:
        """Adapt the model to images of another size; position embeddings are interpolated."""
        if size != self.settings["image_size"]:
            set_image_size(self.model, self.name, size)
            self.settings = {**self.settings, "image_size": size}

    def evaluate(
        self,
        data: str | None,
        evaluator: Evaluator,
        *,
        split: str = "val",
        root: str | None = None,
        sizes: Sequence[int] | None = None,
        uncapped: bool = False,
        skip_corrupt: bool = False,
    ) -> Iterator[Measured]:
        """Measure the accuracy on images of each size, as in Table 6 of the SOFT paper.

        data: a source of `softline.data.images.open_source`.
        sizes: sides of the images; defaults to the size that the model was trained for.
        uncapped: take SOFT's landmarks at the paper's fixed ratio, whose number grows with the image.
        """
        if data is None:
            raise UserError("name the data to evaluate on, such as a directory")
        images = open_source(data, split, root=root)
        if skip_corrupt:
            images = leave_out_corrupt(images, split, evaluator.notify)
        images, classes = self.with_own_labels(images, data)
        for size in sizes or [self.settings["image_size"]]:
            settings = {**self.settings, "image_size": size}
            # resized position embeddings cannot be resized back
            model = copy.deepcopy(self.model)
            set_image_size(model, self.name, size)
            rank = evaluator.accelerator.process_index
            self._check_memory(model, size)
            dataset = image_dataset(images, eval_image_transform(settings), mode=settings["mode"], rank=rank)
            task = Classification(model, classes, val_set=dataset)
            with uncapped_landmarks(model) if uncapped else nullcontext():
                result = evaluator.run(task, batch_size=BATCH_SIZE)
            yield Measured({"size": size}, result)

    def predict(self, inputs: Any, *, top: int = 5, batch_size: int = 32) -> Any:
        """Find the classes of images: return `Probabilities` for an image, a list of them for a list of images.

        inputs: paths, Pillow images, arrays or tensors; see `softline.data.images.single.to_image`.
        top: how many classes the text, the dictionary and the picture of a result have.
        batch_size: the largest number of images that the model is given at once.
        """
        check_integer("top", top, 1)
        self.model.eval()
        run = partial(self._classify, transform=eval_image_transform(self.settings), top=top)
        return predict_images(inputs, run, mode=self.settings["mode"], batch_size=batch_size)

    def _classify(self, photographs: Sequence[Photograph], *, transform: Any, top: int) -> list[Probabilities]:
        self._check_memory(self.model, self.settings["image_size"])
        pixels = torch.stack([transform(each.image) for each in photographs])
        with torch.no_grad():
            found = class_probabilities(self.model(pixels.to(self.device)))
        names = names_by_label(self.classes, found.shape[1])
        return [
            Probabilities(class_names=names, by_label=values, shown=top, image=each.image, name=each.name)
            for each, values in zip(photographs, found, strict=True)
        ]

    def _check_memory(self, model: nn.Module, size: int) -> None:
        # exported networks run outside torch
        if self.settings["mode"] == "RGB" and next(model.parameters(), None) is not None:
            check_image_memory(model, model, (size, size), what="an image", instead="choose a smaller size (--sizes)")

    def graph(self) -> Graph:
        size = self.settings["image_size"]
        keys = ("mean", "std", "mode")
        return image_graph(
            self.model,
            {"logits": (BATCH, None)},
            size=(size, size),
            least=int(getattr(self.model, "min_size", 1)),
            **{key: self.settings[key] for key in keys},
        )

    def describe(self, fixed: Sizes) -> Description:
        count = int(getattr(self.model, "num_classes", len(self.classes)))
        settings = dict(self.settings)
        if fixed.get(HEIGHT) is not None and fixed.get(HEIGHT) == fixed.get(WIDTH):
            settings["image_size"] = fixed[HEIGHT]
        return {"model": self.name, "classes": list(self.classes), "count": count, "settings": settings}

    def view(self) -> ImageView:
        data = None
        if self.recipe is not None:
            data = (self.recipe.data.source, self.recipe.data.val_split, self.recipe.data.root)
        return ImageView(self.model, self.classes, self.settings, data)

    def with_own_labels(
        self, images: ImageSource | ImageStream, source: str
    ) -> tuple[ImageSource | ImageStream, tuple[str, ...]]:
        """Return images with the model's labels, and the model's classes, which must be those of the images."""
        classes = self._check_classes(images.classes, source)
        return (in_order(images, classes) if images.classes and images.classes != classes else images), classes

    def _check_classes(self, found: tuple[str, ...], source: str) -> tuple[str, ...]:
        """Return the model's classes, which must be those of the data."""
        count = int(getattr(self.model, "num_classes", len(self.classes)))
        if self.classes and found and set(found) != set(self.classes):
            missing, extra = sorted(set(self.classes) - set(found)), sorted(set(found) - set(self.classes))
            raise UserError(
                f"the classes of {source} are not those the model was trained for: "
                f"missing {', '.join(missing[:10]) or 'none'}; unknown {', '.join(extra[:10]) or 'none'}"
            )
        if found and len(found) != count:
            raise UserError(f"{source} has {len(found)} classes, the model {count}")
        return self.classes or found or tuple(str(index) for index in range(count))


def reopen_classifier(network: nn.Module, described: Mapping[str, Any]) -> Classifier:
    """Wrap an exported classifier; see `Classifier.describe`."""
    entries = {"model": str, "classes": list[str], "count": int, "settings": dict}
    check_entries(described, entries, "the description")
    settings = described["settings"]
    kinds = {"image_size": int, "mean": list[float], "std": list[float], "mode": str}
    check_entries(settings, {**kinds, "interpolation": str, "crop_pct": float, "crop_mode": str}, "settings")
    check_integer("count", described["count"], 1)
    if len(described["classes"]) not in (0, described["count"]):
        raise UserError(f"the description names {len(described['classes'])} of {described['count']} classes")
    # raises if they make no sense
    eval_image_transform(settings)
    check_channels(settings["mean"], settings["std"])
    check_option("mode", settings["mode"], CHANNELS)
    if len(settings["mean"]) != CHANNELS[settings["mode"]]:
        raise UserError(f"{settings['mode']} has {CHANNELS[settings['mode']]} channels, mean has {settings['mean']}")
    # before they are cropped
    check_sides(**{"image_size / crop_pct": settings["image_size"] / settings["crop_pct"]})
    check_ends(network, floats(*IMAGE_AXES), {"logits": floats(BATCH, described["count"])})
    network.num_classes = described["count"]
    return Classifier(described["model"], network, described["classes"], settings)


def load_published(name: str) -> Classifier:
    """Create a timm model by its name, with its published weights."""
    check_model_name(name)
    try:
        model = timm.create_model(name, pretrained=True)
    except (RuntimeError, OSError, ValueError) as error:
        # the network, and what is behind it
        raise UserError(f"{name}: {error}") from error
    return _as_classifier(model, name, {})


def load_directory(path: Path) -> Classifier:
    """Create the model in a directory that timm saved; softline reads the files, and timm sees what is in them."""
    try:
        model, options = create_saved(path)
        return _as_classifier(model, str(path), options)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _as_classifier(model: nn.Module, name: str, options: Mapping[str, Any]) -> Classifier:
    cfg: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    classes = cfg.get("label_names") or ()
    settings = image_settings(model)
    if isinstance(options.get("img_size"), int):
        # what the model says of its images is often what its architecture was published with
        settings["image_size"] = options["img_size"]
    # raises if the model's description of its images makes no sense
    eval_image_transform(settings)
    return Classifier(str(cfg.get("architecture") or name), model, classes, settings, options=options)
