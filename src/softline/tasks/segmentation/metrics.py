"""Metrics of semantic segmentation, computed from a confusion matrix of pixels."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from softline.checks import check_integer
from softline.data.semantic.classes import IGNORE
from softline.errors import UserError

# pixels that are counted at once: each needs about 40 bytes
PIXELS = 2**22


class ClassScore(NamedTuple):
    name: str
    iou: float | None
    """Intersection over union of the labelled and the predicted pixels; None if there are no such pixels."""
    accuracy: float | None
    """Share of the pixels of the class that were predicted correctly; None if there are none."""
    pixels: int
    """Number of pixels of the class."""


class SegmentationMetrics(Metric):
    """mIoU, mean accuracy and pixel accuracy from 0 to 1, over all pixels of all images together.

    A class that is neither labelled nor predicted anywhere is left out of mIoU. A class that is predicted but never
    labelled has an IoU of 0 and is left out of the mean accuracy. Pixels without a label (255) do not count.
    """

    full_state_update = False
    higher_is_better = True
    is_differentiable = False
    confusion: Tensor
    """Pixels [K, K] int64: rows are labels, columns predictions."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        check_integer("num_classes", num_classes, 1)
        if num_classes > IGNORE:
            raise UserError(f"num_classes must be at most {IGNORE}, which is the label of no class, got {num_classes}")
        self.num_classes = num_classes
        self.add_state("confusion", torch.zeros(num_classes, num_classes, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Count the pixels of predicted classes and labels, two integer tensors of the same shape."""
        if predictions.shape != labels.shape:
            raise UserError(
                f"predictions must have the shape of the labels {tuple(labels.shape)}, got {tuple(predictions.shape)}"
            )
        for found, truth in zip(predictions.flatten().split(PIXELS), labels.flatten().split(PIXELS), strict=True):
            self._count(found, truth)

    def _count(self, found: Tensor, truth: Tensor) -> None:
        labelled = truth != IGNORE
        found, truth = found[labelled].long(), truth[labelled].long()
        self._check_classes("predictions", found)
        self._check_classes("labels", truth)
        # torchmetrics' own needs K x K numbers for each pixel where torch is set to deterministic algorithms
        pixels = torch.bincount(truth * self.num_classes + found, minlength=self.num_classes**2)
        self.confusion += pixels.view(self.num_classes, self.num_classes)

    def compute(self) -> dict[str, Tensor]:
        """Return mIoU, mean_accuracy and pixel_accuracy as scalars."""
        if not self.confusion.any():
            raise UserError(f"no pixel has a label: every one that was counted is {IGNORE}")
        iou, accuracy = _scores(self.confusion)
        found = self.confusion.diagonal().sum().double() / self.confusion.sum().double()
        return {"mIoU": iou.nanmean(), "mean_accuracy": accuracy.nanmean(), "pixel_accuracy": found}

    def per_class(self, names: Sequence[str]) -> list[ClassScore]:
        """Return one row for each class, over all processes; all must call it.

        names: names of the classes by label.
        """
        if len(names) != self.num_classes:
            raise UserError(f"names must be one for each of {self.num_classes} classes, got {len(names)}")
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            confusion = self.confusion.clone()
        iou, accuracy = _scores(confusion)
        rows = zip(names, _known(iou), _known(accuracy), confusion.sum(1).tolist(), strict=True)
        return [ClassScore(*row) for row in rows]

    def _check_classes(self, name: str, values: Tensor) -> None:
        wrong = values[(values < 0) | (values >= self.num_classes)]
        if len(wrong):
            raise UserError(f"{name} must be in 0..{self.num_classes - 1} where labelled, got {int(wrong[0])}")


def _known(scores: Tensor) -> list[float | None]:
    """Replace NaN, which JSON does not have, by None."""
    return [None if math.isnan(score) else score for score in scores.tolist()]


def _scores(confusion: Tensor) -> tuple[Tensor, Tensor]:
    """Return IoU and accuracy of each class [K]; NaN where the denominator is 0."""
    # float32 is exact up to 2^24 pixels only
    counts = confusion.double()
    found, truth, taken = counts.diagonal(), counts.sum(1), counts.sum(0)
    return found / (truth + taken - found), found / truth
