"""One label for each sequence of tokens, or for two that are compared."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from softline.engine.task import Loss
from softline.errors import UserError

Sample = tuple[tuple[Tensor, ...], int]


class SequenceClassification:
    """Cross-entropy; accuracy.

    model: token ids [B, parts, N], 0 where there is none, to logits [B, K].
    train_set, val_set: give (sequences [length] of a sample, label); only what is used must be there.
    vocabulary: ids are below it.
    positions: no sequence is longer.
    parts: sequences of a sample.
    groups: of each training sample; batches are made within a group, such as that of short sequences.
    """

    monitor = "accuracy"
    unit = "sequences"

    def __init__(
        self,
        model: nn.Module,
        classes: Sequence[str],
        *,
        vocabulary: int,
        positions: int,
        parts: int = 1,
        train_set: Dataset[Any] | None = None,
        val_set: Dataset[Any] | None = None,
        groups: Sequence[int] | None = None,
    ) -> None:
        self.model = model
        self.groups = groups
        self.classes = tuple(classes)
        self.vocabulary, self.positions, self.parts = vocabulary, positions, parts
        self.train_set = train_set
        self.val_set = val_set

    def collate(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Ids [B, parts, N], padded with zeros to the longest sequence, and labels [B]."""
        for sequences, label in samples:
            self._check(sequences, label)
        longest = max(len(part) for sequences, _ in samples for part in sequences)
        tokens = torch.stack(
            [torch.stack([F.pad(part, (0, longest - len(part))) for part in sequences]) for sequences, _ in samples]
        )
        return tokens, torch.tensor([label for _, label in samples])

    def _check(self, sequences: tuple[Tensor, ...], label: int) -> None:
        if len(sequences) != self.parts:
            raise UserError(f"a sample must have {self.parts} sequences, got {len(sequences)}")
        if not 0 <= label < len(self.classes):
            raise UserError(f"labels must be 0 to {len(self.classes) - 1}, got {label}")
        for part in sequences:
            if not 0 < len(part) <= self.positions:
                raise UserError(f"a sequence must have 1 to {self.positions} tokens (positions), got {len(part)}")
            low, high = int(part.min()), int(part.max())
            if low < 0 or high >= self.vocabulary:
                wrong = low if low < 0 else high
                raise UserError(f"token ids must be 0 to {self.vocabulary - 1} (vocabulary), got {wrong}")

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        tokens, labels = batch
        logits = model(tokens).float()
        accuracy = (logits.detach().argmax(1) == labels).float().mean()
        return Loss(F.cross_entropy(logits, labels), {"accuracy": accuracy})

    def metrics(self) -> MetricCollection:
        accuracy = MulticlassAccuracy(len(self.classes), average="micro")
        return MetricCollection({"accuracy": accuracy, "loss": MeanMetric()}, compute_groups=False)

    def update(self, metrics: MetricCollection, model: nn.Module, batch: tuple[Tensor, Tensor], valid: int) -> None:
        tokens, labels = batch
        logits, labels = model(tokens).float()[:valid], labels[:valid]
        if valid:
            metrics["accuracy"].update(logits, labels)
            metrics["loss"].update(F.cross_entropy(logits, labels, reduction="none"))

    def details(self, metrics: MetricCollection) -> dict[str, Any]:
        return {}

    def facts(self) -> dict[str, Any]:
        sizes = {"vocabulary": self.vocabulary, "positions": self.positions, "parts": self.parts}
        return {"classes": list(self.classes), **sizes}
