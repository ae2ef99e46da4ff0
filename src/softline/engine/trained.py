"""Trained models of any task: evaluate them, use them on new samples, look inside."""

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from accelerate import Accelerator
from PIL import Image
from torch import nn

from softline.engine.evaluate import Evaluation, evaluate
from softline.engine.graph import Description, Graph, Sizes
from softline.engine.recipe import Recipe
from softline.engine.task import Notify, Task
from softline.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluator:
    """How evaluations run, whatever is evaluated."""

    accelerator: Accelerator
    batch_size: int | None = None
    """Samples at once in each process; defaults to the task's choice."""
    workers: int = 0
    """Loading processes for each process."""
    notify: Notify = log.info
    progress: Callable[[int, int | None], None] = lambda *_: None
    """Receives about once a second how many of this process's samples are done, and how many there are."""

    def run(self, task: Task, *, batch_size: int) -> Evaluation:
        """Evaluate the task's model on its validation set.

        batch_size: used unless the evaluator has its own.
        """
        model = task.model.to(self.accelerator.device)
        size = self.batch_size or batch_size
        result = evaluate(task, model, self.accelerator, batch_size=size, workers=self.workers, progress=self.progress)
        assert result is not None, "nothing stops it"
        return result


@dataclass(frozen=True)
class Measured:
    """One evaluation of a trained model."""

    on: dict[str, Any]
    """What it was measured on, such as the image size, or the source and split of the data."""
    result: Evaluation


class Result(ABC):
    """What a model finds in one sample, on the CPU. The text of a result, ``str(result)``, is for people.

    Subclasses are frozen dataclasses.
    """

    name: str | None
    """Path of the file that the sample came from; None if it came from memory."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dictionaries, which can be written as JSON."""

    @abstractmethod
    def __str__(self) -> str: ...

    def __repr__(self) -> str:
        of = "" if self.name is None else f"{self.name}: "
        found = ", ".join(" ".join(line.split()) for line in str(self).splitlines())
        return f"{type(self).__name__}({of}{found})"

    def draw(self) -> Image.Image:
        """Draw what was found."""
        raise UserError(f"there is no picture of a {type(self).__name__}")

    def drawings(self) -> dict[str, Image.Image]:
        """Return the pictures that the command line writes, by the suffix of their names; see `Trained.drawings`."""
        return {"": self.draw()}


@dataclass(frozen=True)
class ImageView:
    """The part of a model that sees images, with what is needed to show it one."""

    model: nn.Module
    classes: tuple[str, ...]
    """Names by label; empty if the part does not classify."""
    settings: dict[str, Any]
    """Size, mean, std, interpolation, crop and colour mode of its images."""
    data: tuple[str, str, str | None] | None = None
    """Source, split and root of labelled images that it was validated on; see `softline.data.images.open_source`."""


class Trained(ABC):
    """A trained model. Subclasses say what can be done with it.

    The keyword-only parameters of `evaluate` and `predict` are the options that the command line accepts for the task.
    `predict` needs nothing of the model but what calling it returns.
    """

    unit: str = "samples"
    """What samples are called, in the plural."""
    drawings: tuple[str, ...] = ()
    """Suffixes of the pictures that results have, for NAME.jpg: "" is NAME.png, "_labels" is NAME_labels.png."""

    def __init__(self, name: str, model: nn.Module, classes: Sequence[str], recipe: Recipe | None = None) -> None:
        self.name, self.model, self.classes, self.recipe = name, model, tuple(classes), recipe

    def __repr__(self) -> str:
        classes = f", {len(self.classes)} classes" if self.classes else ""
        return f"{type(self).__name__} {self.name}{classes}, task {self.task}"

    @property
    def task(self) -> str | None:
        """Name of the task; None for a model without a recipe whose class does not know it."""
        return None if self.recipe is None else self.recipe.task

    @property
    def device(self) -> torch.device:
        """The device that the model is on, where `predict` runs; the CPU if the model has no parameters."""
        first = next(self.model.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def to(self, device: torch.device | str) -> Self:
        """Move the model to a device."""
        self.model.to(device)
        return self

    @property
    @abstractmethod
    def kind(self) -> str:
        """What messages call the model, such as "a classifier"."""

    @abstractmethod
    def evaluate(self, data: str | None, evaluator: Evaluator) -> Iterator[Measured]:
        """Evaluate the model.

        data: where the data lies; None takes the recipe's.
        """

    @abstractmethod
    def predict(self, inputs: Any, *, batch_size: int = 32) -> Any:
        """Use the model on new samples: return a `Result` for one, a list of them for a list or tuple, in its order.

        A `Path` is a file that holds a sample. Results do not depend on the other samples.

        batch_size: the largest number of samples that the model is given at once.
        """

    def graph(self) -> Graph:
        """Return the network that is exported."""
        raise UserError(f"{self.name} is {self.kind}, which cannot be exported")

    def describe(self, fixed: Sizes) -> Description:
        """Return what an exported file must know, for `TaskDefinition.reopen`.

        fixed: lengths of axes that the exported network has been made for.
        """
        raise UserError(f"{self.name} is {self.kind}, which cannot be exported")

    def view(self) -> ImageView:
        """Return the part that sees images, for analyses and the explorer."""
        raise UserError(f"{self.name} is {self.kind}: there is no image to show it")


def check_options(method: Callable[..., Any], options: Mapping[str, Any], *, kind: str) -> None:
    """Refuse options that a task's `Trained.evaluate` or `Trained.predict` does not take.

    kind: what the message calls the model, such as "a classifier".
    """
    parameters = inspect.signature(method).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            listed = ", ".join(f"--{option.replace('_', '-')}" for option in known)
            raise UserError(f"--{name.replace('_', '-')} has no meaning for {kind}, which takes {listed or 'none'}")
