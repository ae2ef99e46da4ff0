"""What the engine asks of a task."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import MetricCollection


class Loss(NamedTuple):
    value: Tensor
    """Mean over the batch, differentiable."""
    logs: dict[str, Tensor]
    """Further scalars to show, such as the batch's accuracy."""


class Task(Protocol):
    model: nn.Module
    train_set: Dataset[Any] | None
    """Indexed by (epoch, index), or iterable with ``set_epoch`` where samples can only be read in order."""
    val_set: Dataset[Any] | None
    groups: Sequence[int] | None
    """A number for each training sample; a batch is made of samples with the same one. None: any."""
    monitor: str
    """The metric that tells the best checkpoint; more is better."""
    unit: str
    """What a sample is called: images, sequences."""

    def collate(self, samples: Sequence[Any]) -> Any:
        """A batch; the first tensor in it counts the samples in its first dimension."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Of a training batch. All randomness comes from the global generators."""

    def metrics(self) -> MetricCollection:
        """Empty metrics."""

    def update(self, metrics: MetricCollection, model: nn.Module, batch: Any, valid: int) -> None:
        """Run the model and count the first ``valid`` samples of the batch; the others are padding."""

    def details(self, metrics: MetricCollection) -> dict[str, Any]:
        """What a report says beside the metrics, such as numbers for each class. All processes call it."""

    def facts(self) -> dict[str, Any]:
        """What a checkpoint must know to be used without the data, such as the names of the classes."""
