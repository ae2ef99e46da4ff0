"""COCO's average precision of boxes and masks.

torchmetrics collects the detections, faster-coco-eval evaluates them, and the numbers are those of pycocotools. Where
torchmetrics 1.9 deviates, and how that is avoided here:

- Its thresholds are float32: a recall of exactly 0.3 is below 0.30000001, which moves an average by up to 0.01. COCO's
  own are float64.
- Between processes it gathers one image at a time, and waits forever when they have unequally many.
- With masks alone, images without true objects are left out, so that detections in them are not counted as false. Boxes
  are always counted here, and those images with them.
- An area of 0 is replaced by the box's; the smallest number above 0 keeps the object among the small ones.
- It takes all masks of an image as one tensor, 2.4 GB for 100 of 24 megapixels; here they are encoded one at a time.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics.detection import MeanAveragePrecision
from torchvision.ops import box_convert

from softline.data.coco.source import encode_mask
from softline.errors import UserError

NAMES = {
    "AP": "map",
    "AP50": "map_50",
    "AP75": "map_75",
    "APs": "map_small",
    "APm": "map_medium",
    "APl": "map_large",
}
"""COCO's names for the mean over IoU 0.50 to 0.95, for IoU 0.50 and 0.75, and for small (up to 32 x 32), medium (up to
96 x 96) and large objects."""

# as pycocotools makes them
_IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10).tolist()
_RECALL_THRESHOLDS = np.linspace(0.0, 1.0, 101).tolist()

_TINY = torch.finfo(torch.float32).tiny

# torchmetrics' lists of what is counted, without "detection_" or "groundtruth_"
_STATES = {
    "boxes": "box",
    "masks": "mask",
    "labels": "labels",
    "scores": "scores",
    "iscrowd": "crowds",
    "area": "area",
}


class CocoMetrics(MeanAveragePrecision):
    """Average precision AP, AP50, AP75, APs, APm, APl of boxes and mask_AP, ... of masks; -1 without such objects.

    Images without objects count, and so do those where nothing is found. Objects are small, medium or large by the area
    of their annotation. The order of images does not matter, nor how they are divided among processes.

    masks: whether to count masks too.
    """

    image_ids: list[Tensor]

    def __init__(self, *, masks: bool = False) -> None:
        super().__init__(
            iou_type=("bbox", "segm") if masks else "bbox",
            iou_thresholds=_IOU_THRESHOLDS,
            rec_thresholds=_RECALL_THRESHOLDS,
            backend="faster_coco_eval",
        )
        self.masks = masks
        self.add_state("image_ids", default=[], dist_reduce_fx=None)

    def update(self, found: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> None:
        """Count the objects of some images.

        found: boxes [n, 4] as x1, y1, x2, y2, labels [n], scores [n] and, if masks are counted, n masks [H, W], in a
            tensor or in `softline.heads.masks.ObjectMasks`.
        targets: boxes, labels and masks in the same form, iscrowd [n], area [n], and the number image_id.
        """
        shapes = ("boxes", "masks") if self.masks else ("boxes",)
        for image, target in zip(found, targets, strict=True):
            self._add("detection", _pick(image, (*shapes, "labels", "scores")))
            self._add("groundtruth", _pick(target, (*shapes, "labels", "iscrowd", "area")))
            self.image_ids.append(target["image_id"].reshape(()).cpu())

    def _add(self, kind: str, picked: dict[str, Any]) -> None:
        """Append what is counted of an image to torchmetrics' lists."""
        for name, values in picked.items():
            getattr(self, f"{kind}_{_STATES[name]}").append(values)

    def compute(self) -> dict[str, Tensor]:
        self._sort()
        values = super().compute()
        if not self.masks:
            return {name: values[key] for name, key in NAMES.items()}
        boxes = {name: values[f"bbox_{key}"] for name, key in NAMES.items()}
        return boxes | {f"mask_{name}": values[f"segm_{key}"] for name, key in NAMES.items()}

    def _sort(self) -> None:
        """Sort the images by id, since pycocotools and faster-coco-eval rank equal scores by the order of images."""
        ids = [int(image_id) for image_id in self.image_ids]
        order = sorted(range(len(ids)), key=ids.__getitem__)
        for first, second in itertools.pairwise(order):
            if ids[first] == ids[second]:
                raise UserError(f"image_id must be different for each image, got {ids[first]} twice")
        for name in self._defaults:
            state = getattr(self, name)
            # masks are missing where only boxes are counted
            if state:
                setattr(self, name, [state[place] for place in order])

    def _sync_dist(self, dist_sync_fn: Callable[..., Any] | None = None, process_group: Any = None) -> None:
        group = process_group or self.process_group
        states = {name: getattr(self, name) for name in self._defaults}
        parts: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(parts, states, group=group)
        for name in states:
            setattr(self, name, [image for part in parts for image in part[name]])


def _pick(image: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Pick what is counted of an image, in the form in which torchmetrics keeps it."""
    missing = [name for name in names if name not in image]
    if missing:
        raise UserError(f"COCO's metrics need {', '.join(names)} of each image: {', '.join(missing)} is missing")
    counts = {name: len(image[name]) for name in names}
    if len(set(counts.values())) > 1:
        raise UserError(f"COCO's metrics need as many {', '.join(names)} of an image, got {counts}")
    picked = {name: image[name].detach().cpu() for name in names if name != "masks"}
    picked["boxes"] = box_convert(picked["boxes"].float().reshape(-1, 4), "xyxy", "xywh")
    if "masks" in names:
        # one at a time, because those of a large image need gigabytes
        picked["masks"] = tuple(map(_runs, image["masks"]))
    if "scores" in picked:
        picked["scores"] = picked["scores"].float()
    if "area" in picked:
        area = picked["area"].float()
        if (area < 0).any():
            raise UserError(f"area must not be negative, got {area.min().item()} in image {int(image['image_id'])}")
        picked["area"] = area.clamp_min(_TINY)
    return picked


def _runs(mask: Tensor) -> tuple[tuple[int, ...], bytes]:
    """Return the size of a mask [H, W] and its run-length encoding."""
    encoded = encode_mask(mask.bool().cpu().numpy())
    return tuple(encoded["size"]), encoded["counts"].encode()
