"""How far a network with new attention is from its original."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from softline.backbones.creation import set_image_size
from softline.data.images import ImageStream
from softline.engine.trained import Evaluator
from softline.errors import UserError
from softline.replacing.replace import replaced_attention
from softline.tasks.classification.build import image_dataset
from softline.tasks.classification.trained import Classifier
from softline.tasks.images import eval_image_transform
from softline.tasks.linearization.build import open_split
from softline.tasks.linearization.recipe import DistillationRecipe, LinearizationRecipe
from softline.tasks.linearization.task import FineTuning, Transfer

BATCH_SIZE = 64


@dataclass(frozen=True)
class Scores:
    """A network on the validation images of one size."""

    size: int
    top1: float | None = None
    """None if the images have no labels."""
    agreement: float | None = None
    """Share of the images that get the original's class."""
    divergence: float | None = None
    """Kullback-Leibler divergence from the original's probabilities."""
    failure: str | None = None
    """Why images of this size cannot be used."""

    @property
    def text(self) -> str:
        if self.agreement is None:
            return f"not at {self.size} pixels: {self.failure}"
        top1 = "" if self.top1 is None else f"top-1 {100 * self.top1:.2f} %, "
        return f"{top1}agreement {100 * self.agreement:.2f} %"


@dataclass(frozen=True)
class LayerEffect:
    """What replacing the attention of one layer alone does."""

    layer: str
    agreement: float
    divergence: float

    @property
    def text(self) -> str:
        return f"agreement {100 * self.agreement:.2f} %, divergence {self.divergence:.4f}"


class Remembering(nn.Module):
    """A network whose outputs are kept, so that it is run once on images that are shown again in the same order."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.outputs: list[Tensor] = []
        self.shown: int | None = None
        """How many batches have been shown again; None while the outputs are not known."""

    def rewind(self) -> None:
        """Expect the first batch."""
        self.shown = 0 if self.outputs else None

    def forward(self, images: Tensor) -> Tensor:
        if self.shown is None:
            self.outputs.append(self.network(images))
            return self.outputs[-1]
        self.shown += 1
        return self.outputs[self.shown - 1]


class Judge:
    """Compares networks with their original.

    original: at the size of the recipe's images.
    recipe: of a stage, whose data is used.
    """

    def __init__(self, original: Classifier, recipe: LinearizationRecipe, evaluator: Evaluator) -> None:
        self.original, self.recipe, self.evaluator = original, recipe, evaluator
        self.size = recipe.data.image_size or original.settings["image_size"]
        data = recipe.data
        opened = {split: open_split(recipe, split) for split in (data.train_split, data.val_split)}
        labelled = {split: original.with_own_labels(source, data.source) for split, source in opened.items()}
        self.sources = {split: source for split, (source, _) in labelled.items()}
        self.classes = labelled[data.val_split][1]
        self.teachers: dict[tuple[str, int], Remembering] = {}
        """The original by the split and size of the images that it has seen."""

    def scores(self, network: nn.Module, size: int | None = None) -> Scores:
        """Compare classes and probabilities on the validation images.

        size: of the images; defaults to the recipe's.
        """
        size = size or self.size
        try:
            split = self.recipe.data.val_split
            teacher, student = self._teacher(split, size), self._resized(network, size)
        except UserError as error:
            return Scores(size, failure=str(error))
        found = self._compare(student, teacher, self._images(split, size))
        return Scores(size, found.get("top1"), found["agreement"], found["divergence_loss"])

    def errors(self, network: nn.Module) -> dict[str, float]:
        """Return the relative error of each new attention, given what the old one is given, on validation images."""
        teacher, student = (self._resized(model, self.size) for model in (self.original.model, network))
        images = self._images(self.recipe.data.val_split, self.size)
        task = Transfer(student, self.classes, teacher=teacher, val_set=images)
        found: dict[str, float] = self.evaluator.run(task, batch_size=BATCH_SIZE).details["errors"]
        return found

    def effect(self, network: nn.Module, layer: str, count: int) -> LayerEffect:
        """Measure what replacing the attention of one layer alone does, on ``count`` images of the training data."""
        split = self.recipe.data.train_split
        mixed, student = (self._resized(model, self.size) for model in (self.original.model, network))
        images: Any = self._images(split, self.size)
        if hasattr(images, "__len__") and len(images) > count:
            images = Subset(images, [index * len(images) // count for index in range(count)])
        found = self._compare(only(layer, student, mixed), self._teacher(split, self.size), images)
        return LayerEffect(layer, found["agreement"], found["divergence_loss"])

    def _compare(self, student: nn.Module, teacher: nn.Module, images: Dataset[Any]) -> dict[str, float]:
        task = FineTuning(
            student,
            self.classes,
            teacher=teacher,
            val_set=images,
            labelled=self.recipe.labelled,
            terms=DistillationRecipe(features=0.0),
        )
        return self.evaluator.run(task, batch_size=BATCH_SIZE).metrics

    def _images(self, split: str, size: int) -> Dataset[Any]:
        settings = {**self.original.settings, "image_size": size}
        source, rank = self.sources[split], self.evaluator.accelerator.process_index
        if isinstance(source, ImageStream) and split == self.recipe.data.train_split:
            raise UserError("single layers are measured on some of the images, which a stream cannot give")
        return image_dataset(source, eval_image_transform(settings), mode=settings["mode"], rank=rank)

    def _teacher(self, split: str, size: int) -> nn.Module:
        """Return the original, which is run once on the images of a split and size, unless their order may change."""
        if isinstance(self.sources[split], ImageStream):
            return self._resized(self.original.model, size)
        if (split, size) not in self.teachers:
            self.teachers[split, size] = Remembering(self._resized(self.original.model, size))
        teacher = self.teachers[split, size]
        teacher.rewind()
        return teacher

    def _resized(self, network: nn.Module, size: int) -> nn.Module:
        resized = copy.deepcopy(network)
        if size != self.size:
            set_image_size(resized, self.original.name, size)
        return resized


def only(layer: str, replaced: nn.Module, original: nn.Module) -> nn.Module:
    """Return ``replaced`` with all attention of the original but that of one layer; both are changed."""
    for name in replaced_attention(replaced):
        if name != layer:
            parent, _, attribute = name.rpartition(".")
            setattr(replaced.get_submodule(parent), attribute, original.get_submodule(name))
    return replaced


def larger_sizes(original: Classifier, size: int) -> tuple[int, ...]:
    """Return sides of images with twice and four times the pixels, or as near to it as whole patches are."""
    embed: Any = getattr(original.model, "patch_embed", None)
    patch = max(getattr(embed, "patch_size", None) or (32,))
    return tuple(round(size * factor / patch) * patch for factor in (2**0.5, 2))


def worst(effects: Sequence[LayerEffect], count: int) -> list[str]:
    """Return the ``count`` layers whose replacement changes the output most."""
    ranked = sorted(effects, key=lambda effect: effect.divergence, reverse=True)
    return [effect.layer for effect in ranked[:count]]
