"""Loss and metrics of classification."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from softline.engine.task import Loss
from softline.errors import UserError

if TYPE_CHECKING:
    from torchmetrics import MetricCollection


@dataclass(eq=False)
class Classification:
    """Cross-entropy with label smoothing, mixup and cutmix; top-1 and top-5 accuracy.

    train_set, val_set: datasets of (image [C, H, W], label); the one that is not used may be missing.
    mixup: timm's Mixup, which then also smooths the labels.
    """

    model: nn.Module
    classes: Sequence[str]
    _: KW_ONLY
    train_set: Dataset[Any] | None = None
    val_set: Dataset[Any] | None = None
    mixup: Mixup | None = None
    smoothing: float = 0.0
    channels_last: bool = False
    groups: Sequence[int] | None = None
    monitor = "top1"
    unit = "images"

    @property
    def layout(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def collate(self, samples: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
        for _, label in samples:
            if not 0 <= label < len(self.classes):
                raise UserError(f"labels must be from 0 to {len(self.classes) - 1}, one for each class, got {label}")
        batch: list[Tensor] = default_collate(list(samples))
        return batch

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        images, labels = batch
        if self.mixup is None:
            targets, smoothing = labels, self.smoothing
        else:
            images, targets = self.mixed(images, labels)
            smoothing = 0.0
        logits = model(images.contiguous(memory_format=self.layout)).float()
        value = F.cross_entropy(logits, targets, label_smoothing=smoothing)
        likely = targets if targets.ndim == 1 else targets.argmax(1)
        return Loss(value, {"accuracy": (logits.detach().argmax(1) == likely).float().mean()})

    def mixed(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Apply mixup and cutmix: return images, and targets [B, classes]."""
        assert self.mixup is not None, "asked before"
        if len(images) % 2:
            raise UserError(f"mixup and cutmix pair images: each process needs an even number, got {len(images)}")
        # timm's Mixup works in place
        mixed, targets = self.mixup(images.clone(), labels)
        return mixed, targets

    def metrics(self) -> "MetricCollection":
        from torchmetrics import MeanMetric, MetricCollection
        from torchmetrics.classification import MulticlassAccuracy

        count = len(self.classes)
        return MetricCollection(
            {
                "top1": MulticlassAccuracy(count, top_k=1, average="micro"),
                "top5": MulticlassAccuracy(count, top_k=min(5, count), average="micro"),
                "loss": MeanMetric(),
            },
            compute_groups=False,
        )

    def update(self, metrics: "MetricCollection", model: nn.Module, batch: list[Tensor], valid: int) -> None:
        images, labels = batch
        logits = model(images.contiguous(memory_format=self.layout)).float()[:valid]
        if valid:
            self.count(metrics, logits, labels[:valid])

    def count(self, metrics: "MetricCollection", logits: Tensor, labels: Tensor) -> None:
        metrics["top1"].update(logits, labels)
        metrics["top5"].update(logits, labels)
        metrics["loss"].update(F.cross_entropy(logits, labels, reduction="none"))

    def details(self, metrics: "MetricCollection") -> dict[str, Any]:
        return {}

    def facts(self) -> dict[str, Any]:
        return {"classes": list(self.classes)}
