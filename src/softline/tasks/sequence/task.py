"""Loss and metrics of sequence classification."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from softline.engine.task import Loss
from softline.errors import UserError

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

Sample = tuple[tuple[Tensor, ...], int]


@dataclass(eq=False)
class SequenceClassification:
    """Cross-entropy and accuracy.

    model: maps token ids [B, parts, N], where 0 is padding, to logits [B, K].
    train_set, val_set: datasets of (sequences [length] of a sample, label), of which one may be missing.
    vocabulary: token ids are below this number.
    positions: length of the longest possible sequence.
    parts: number of sequences in a sample.
    groups: a group number for each training sample; a batch has samples of one group, such as the short ones.
    """

    model: nn.Module
    classes: Sequence[str]
    _: KW_ONLY
    vocabulary: int
    positions: int
    parts: int = 1
    train_set: Dataset[Any] | None = None
    val_set: Dataset[Any] | None = None
    groups: Sequence[int] | None = None
    monitor = "accuracy"
    unit = "sequences"

    def collate(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Return token ids [B, parts, N], padded with zeros to the longest sequence, and labels [B]."""
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

    def metrics(self) -> "MetricCollection":
        from torchmetrics import MeanMetric, MetricCollection
        from torchmetrics.classification import MulticlassAccuracy

        accuracy = MulticlassAccuracy(len(self.classes), average="micro")
        return MetricCollection({"accuracy": accuracy, "loss": MeanMetric()}, compute_groups=False)

    def update(self, metrics: "MetricCollection", model: nn.Module, batch: tuple[Tensor, Tensor], valid: int) -> None:
        tokens, labels = batch
        logits, labels = model(tokens).float()[:valid], labels[:valid]
        if valid:
            metrics["accuracy"].update(logits, labels)
            metrics["loss"].update(F.cross_entropy(logits, labels, reduction="none"))

    def details(self, metrics: "MetricCollection") -> dict[str, Any]:
        return {}

    def facts(self) -> dict[str, Any]:
        sizes = {"vocabulary": self.vocabulary, "positions": self.positions, "parts": self.parts}
        return {"classes": list(self.classes), **sizes}
