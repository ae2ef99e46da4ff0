"""Loss and metrics of detection."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from softline.engine.task import Loss
from softline.errors import UserError

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

Target = dict[str, Tensor]
Batch = tuple[Tensor, list[Tensor], list[Target]]


@dataclass(eq=False)
class Detection:
    """The sum of a detector's losses, and COCO's average precision.

    model: follows `softline.heads.detectors.Detector`.
    train_set, val_set: datasets of (image [3, H, W] in 0..1, target), of which one may be missing; validation images
        may also be uint8. A target has boxes [n, 4] as x1, y1, x2, y2 in pixels, labels [n] from 0 on, image_id [], for
        evaluation iscrowd [n] and area [n], and with ``masks`` masks [n, H, W].
    masks: whether the detector finds masks too.
    groups: a group number for each training image; a batch has images of one group, such as the wide ones.
    """

    model: nn.Module
    classes: Sequence[str]
    _: KW_ONLY
    train_set: Dataset[Any] | None = None
    val_set: Dataset[Any] | None = None
    masks: bool = False
    groups: Sequence[int] | None = None
    monitor = "AP"
    unit = "images"

    def collate(self, samples: Sequence[tuple[Tensor, Target]]) -> Batch:
        """Return image ids [B], and lists of images and targets, since each image has its own size."""
        for image, target in samples:
            check_target(image, target, classes=len(self.classes), masks=self.masks)
        images, targets = [image for image, _ in samples], [target for _, target in samples]
        return torch.stack([target["image_id"] for target in targets]), images, targets

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        _, images, targets = batch
        losses: dict[str, Tensor] = model(images, targets)
        return Loss(torch.stack(list(losses.values())).sum(), {name: value.detach() for name, value in losses.items()})

    def metrics(self) -> "MetricCollection":
        from torchmetrics import MetricCollection

        from softline.tasks.detection.metrics import CocoMetrics

        return MetricCollection({"coco": CocoMetrics(masks=self.masks)}, compute_groups=False)

    def update(self, metrics: "MetricCollection", model: nn.Module, batch: Batch, valid: int) -> None:
        _, images, targets = batch
        found = model(images)
        metrics["coco"].update(found[:valid], targets[:valid])

    def details(self, metrics: "MetricCollection") -> dict[str, Any]:
        return {}

    def facts(self) -> dict[str, Any]:
        return {"classes": list(self.classes), "masks": self.masks}


def check_target(image: Tensor, target: Target, *, classes: int, masks: bool) -> None:
    """Check that a detector can learn from a target, or be measured by it.

    image: [3, H, W].
    """
    name = f"image {int(target['image_id'])}"
    boxes, labels = target["boxes"], target["labels"]
    if boxes.ndim != 2 or boxes.shape[1] != 4 or len(boxes) != len(labels):
        raise UserError(
            f"{name}: boxes must be [n, 4] and labels [n], got {tuple(boxes.shape)} and {tuple(labels.shape)}"
        )
    bad = ~boxes.isfinite().all(1) | (boxes[:, 2:] <= boxes[:, :2]).any(1)
    if bad.any():
        raise UserError(f"{name}: boxes must be finite with x1 < x2 and y1 < y2, got {boxes[bad][0].tolist()}")
    outside = (labels < 0) | (labels >= classes)
    if outside.any():
        raise UserError(f"{name}: labels must be 0 to {classes - 1}, got {labels[outside][0].item()}")
    if not masks:
        return
    if "masks" not in target:
        raise UserError(f"{name}: masks are missing, and the detector finds them")
    shape = (len(boxes), *image.shape[-2:])
    if tuple(target["masks"].shape) != shape:
        raise UserError(f"{name}: masks must be {shape}, as boxes and image, got {tuple(target['masks'].shape)}")
