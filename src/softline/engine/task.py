"""What the engine asks of a task, and how a kind of task becomes known to it.

Three things make a kind of task: a subclass of `Recipe` with its keys; a `TaskDefinition`, which builds the `Task` that
the training loop runs; and a subclass of `softline.engine.trained.Trained`, which is what a checkpoint of it becomes.
A package declares its definition as an entry point of the group ``softline.tasks``, as softline does its own.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from softline.checks import check_option
from softline.engine.recipe import Recipe
from softline.errors import UserError
from softline.plain import check_entries
from softline.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import Dataset
    from torchmetrics import MetricCollection

    from softline.engine.trained import Trained

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Recipe)
Notify: TypeAlias = Callable[[str], None]
"""Receives what a user should know, such as which samples were left out."""
NotifyPreparing: TypeAlias = Callable[[str, int, int], None]
"""Receives what is generated before a run, how many are done, and how many there will be."""


@dataclass(frozen=True)
class Setup:
    """What building a task may need beside its recipe."""

    rank: int = 0
    """Index of this process among those that train together."""
    notify: Notify = log.info
    preparing: NotifyPreparing = lambda *_: None


class Loss(NamedTuple):
    value: "Tensor"
    """The differentiable mean over the batch."""
    logs: "dict[str, Tensor]"
    """Further scalars to log, such as the accuracy on the batch."""


class Task(Protocol):
    """A network with its data, loss and metrics, ready to be trained and evaluated."""

    model: "nn.Module"
    train_set: "Dataset[Any] | None"
    """Indexed by (epoch, index), or iterable with ``set_epoch`` where samples can only be read in order."""
    val_set: "Dataset[Any] | None"
    groups: Sequence[int] | None
    """A group number for each training sample; a batch has samples of one group. None puts all into one group."""
    monitor: str
    """The metric that decides which checkpoint is best; higher is better."""
    unit: str
    """What samples are called, in the plural: images, sequences."""

    def collate(self, samples: Sequence[Any]) -> Any:
        """Build a batch; its first tensor has the samples in its first dimension."""

    def loss(self, model: "nn.Module", batch: Any) -> Loss:
        """Compute the loss of a training batch; random numbers come from the global generators."""

    def metrics(self) -> "MetricCollection":
        """Create empty metrics."""

    def update(self, metrics: "MetricCollection", model: "nn.Module", batch: Any, valid: int) -> None:
        """Run the model and count the first ``valid`` samples of the batch; the others are padding."""

    def details(self, metrics: "MetricCollection") -> dict[str, Any]:
        """Return what a report says beside the metrics, such as a row for each class. All processes call it."""

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint must know to be used without the data, such as the names of the classes."""


class TaskDefinition(ABC, Generic[R]):
    """A kind of task: its recipe, how it is built, and what a trained one can do."""

    recipe_type: type[R]

    @abstractmethod
    def build(self, recipe: R, setup: Setup) -> Task:
        """Open the data and create the network of a recipe."""

    @abstractmethod
    def network(self, recipe: R, facts: Mapping[str, Any]) -> "nn.Module":
        """Create the network of a recipe with random weights, without opening its data.

        facts: as returned by `Task.facts`.
        """

    @abstractmethod
    def trained(self, model: "nn.Module", recipe: R, facts: Mapping[str, Any]) -> "Trained":
        """Wrap a network that has its trained weights."""

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """Raise UserError unless facts from a checkpoint are what `network` and `trained` need."""

    def known_facts(self, recipe: R, classes: Sequence[str] | None) -> dict[str, Any]:
        """Return the facts that `network` needs as far as the recipe tells them, without opening its data.

        classes: names of the classes, for recipes that leave them to the data; None if the caller names none. Most
            tasks call `choose_classes`.
        """
        if classes is not None:
            raise UserError(f"classes has no meaning for the task {recipe.task}, got {len(classes)} of them")
        return {}

    def reopen(self, network: "nn.Module", described: Mapping[str, Any]) -> "Trained":
        """Wrap an exported network, given what `Trained.describe` returned; the values may come from anywhere.

        By default it is wrapped as the original was, for tasks whose `describe` calls `describe_recipe`.

        network: returns what the network of `Trained.graph` does, and has no parameters.
        """
        from softline.engine.shipping import read_description

        recipe, facts = read_description(described, self.recipe_type)
        self.check_facts(facts)
        return self.trained(network, recipe, facts)

    def settled(self, recipe: R) -> R:
        """Spell out what the recipe leaves to its model, so that other models can be trained in the same way."""
        return recipe


TASKS: Registry[TaskDefinition[Any]] = Registry("task", group="softline.tasks")
"""Definitions by the name that recipes give as ``task``."""


def definition_of(recipe: Recipe) -> TaskDefinition[Any]:
    """Look up the definition of the task that a recipe names."""
    check_option("task", recipe.task, TASKS)
    return TASKS[recipe.task]


def build_task(recipe: Recipe, setup: Setup | None = None) -> Task:
    """Build the task that a recipe names."""
    checkpoint = recipe.model.checkpoint
    if checkpoint is not None and not Path(checkpoint).is_file():
        # before the data, which may take minutes to read
        raise UserError(f"model.checkpoint: no such file: {checkpoint}")
    return definition_of(recipe).build(recipe, setup or Setup())


def numbered(count: int) -> tuple[str, ...]:
    """Return names for classes that have none."""
    return tuple(str(label) for label in range(count))


def choose_classes(
    given: Sequence[str] | None, known: Sequence[str] | None, what: str, *, fixed: bool = True
) -> list[str]:
    """Return the names of the classes that a network is built for.

    given: the names that the caller of `TaskDefinition.known_facts` has passed.
    known: those that the recipe tells.
    what: the part of the recipe that tells them, or does not.
    fixed: whether the data must have the known classes; otherwise ``given`` takes precedence.
    """
    if known is None and given is None:
        raise UserError(f"{what} does not tell its classes: name them, or say how many there are, by classes=")
    if known is not None and given is not None and fixed and len(given) != len(known):
        raise UserError(f"{what} has {len(known)} classes, got classes={len(given)}")
    chosen = known if given is None else given
    assert chosen is not None, "one of them is there"
    return list(chosen)


def check_classes(facts: Mapping[str, Any]) -> None:
    """Check that the facts of a checkpoint name the classes, as those of most tasks do."""
    check_entries(facts, {"classes": list[str]}, "facts")
    if not facts["classes"]:
        raise UserError("facts name no classes")
