"""Trained models of any task: evaluate them, use them on new samples, look inside."""

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from PIL import Image
from torch import nn

from softline.engine.evaluate import Evaluation, evaluate
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


@dataclass(frozen=True)
class Prediction:
    """What a model finds in one file."""

    name: str
    """Path of the file."""
    found: dict[str, Any]
    """Plain numbers, strings, lists and dictionaries."""
    text: str
    """The same for people."""
    images: dict[str, Image.Image] = field(default_factory=dict)
    """Pictures to write, by the suffix of their file name; see `Trained.drawings`."""


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
    """

    unit: str = "samples"
    """What samples are called, in the plural."""
    drawings: tuple[str, ...] = ()
    """Suffixes of the pictures that `predict` makes of NAME.jpg: "" is NAME.png, "_labels" is NAME_labels.png."""

    def __init__(self, name: str, model: nn.Module, classes: Sequence[str], recipe: Recipe | None = None) -> None:
        self.name, self.model, self.classes, self.recipe = name, model, tuple(classes), recipe

    @property
    def device(self) -> torch.device:
        """The device that the model is on, where `predict` runs."""
        return next(self.model.parameters()).device

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
    def predict(self, paths: Sequence[str]) -> Iterator[Prediction]:
        """Use the model on files, one after the other."""

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
