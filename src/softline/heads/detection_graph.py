"""A detector as a module with tensors only, from one image to its detections, which torch.export can trace.

`Detector` takes and returns lists and dicts, and decides in Python what depends on the data, which torch.export cannot
trace. The modules here are made of its parts and find the same. Their graph serves images of any height and width, and
torch.onnx translates all of it, non-maximum suppression and the pooling of regions included.

Differences from `Detector`:

- An image has the size at which the detector works: the caller resizes it, and maps the detections back.
- Masks are probabilities within their box. The caller pastes them into the image.
- RetinaNet first chooses the best candidates of each level and then applies the score threshold. The order does not
  matter: what has a lower score than the threshold has a lower score than everything above it.
- Boxes of different classes, or of different levels among region proposals, are kept apart by a shift, as torchvision
  does for up to 1000 boxes. For more it suppresses boxes class by class. The shift rounds coordinates, so the two may
  disagree on boxes whose overlap is within rounding of the limit.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.ops import MultiScaleRoIAlign, clip_boxes_to_image, nms, roi_align

from softline.errors import UserError
from softline.heads.cascade import CascadeHeads
from softline.heads.detectors import Detector, PaddedImages, StridedAnchors
from softline.heads.features import STRIDES

# torchvision's least side of a detection, in pixels
LEAST_SIDE = 1e-2


def detection_graph(detector: Detector) -> nn.Module:
    """The detector as a module from one image to its detections, with the detector's own parameters.

    The module takes images [1, 3, H, W] with values in [0, 1], already resized to the detector's size, and pads them to
    whole patches of the backbone. It returns the tuple boxes [n, 4] as x1, y1, x2, y2 in pixels of that image, scores
    [n] in descending order, labels [n] from 0 to num_classes - 1 and, if the detector predicts masks, masks
    [n, 28, 28], probabilities within the box. The number of detections n may be 0. The score threshold and the maximum
    number of detections are the detector's at the time of the call or, in an exported graph, of the trace.
    """
    parts: Any = detector.detector
    if isinstance(parts, RetinaNet):
        return RetinaNetGraph(parts).train(detector.training)
    if isinstance(parts, MaskRCNN):
        return MaskRCNNGraph(parts).train(detector.training)
    raise UserError(f"only RetinaNet and Mask R-CNN can be a graph, got {type(parts).__name__}")


class RetinaNetGraph(nn.Module):
    """Images [1, 3, H, W] -> boxes [n, 4], scores [n] and labels [n]."""

    def __init__(self, parts: RetinaNet) -> None:
        super().__init__()
        self.parts = parts
        _fix_anchors(parts.anchor_generator, parts)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts: Any = self.parts
        maps = _pyramid(parts, images)
        found = [
            _best_of_level(parts, level, anchors)
            for level, anchors in zip(maps, _level_anchors(parts.anchor_generator, maps), strict=True)
        ]
        boxes, scores, labels = (torch.cat(column) for column in zip(*found, strict=True))
        boxes = clip_boxes_to_image(boxes, images.shape[-2:])
        likely = _places(scores > parts.score_thresh)
        boxes, scores, labels = boxes[likely], scores[likely], labels[likely]
        kept = _suppress(boxes, scores, labels, parts.nms_thresh, parts.detections_per_img)
        return boxes[kept], scores[kept], labels[kept]


def _best_of_level(parts: Any, maps: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes [k, 4], scores [k] and labels [k] of a level [1, C, H, W] with anchors [H W A, 4]."""
    classes, shifts = parts.head.classification_head, parts.head.regression_head
    # [H W A K], in torchvision's order
    scores = _in_rows(classes.cls_logits(classes.conv(maps)), 1).sigmoid().flatten()
    offsets = _in_rows(shifts.bbox_reg(shifts.conv(maps)), 4)
    best, places = _best(scores, parts.topk_candidates)
    chosen = torch.div(places, classes.num_classes, rounding_mode="floor")
    return parts.box_coder.decode_single(offsets[chosen], anchors[chosen]), best, places % classes.num_classes


class MaskRCNNGraph(nn.Module):
    """Images [1, 3, H, W] -> boxes [n, 4], scores [n], labels [n] and masks [n, 28, 28]; also with `CascadeHeads`."""

    def __init__(self, parts: MaskRCNN) -> None:
        super().__init__()
        self.parts = parts
        _fix_anchors(parts.rpn.anchor_generator, parts)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        parts: Any = self.parts
        size, heads = images.shape[-2:], parts.roi_heads
        maps = _pyramid(parts, images)
        regions = _propose(parts.rpn, maps, size)
        if isinstance(heads, CascadeHeads):
            regions = _refine(heads, maps, regions, size)
        boxes, scores, labels = _classify(heads, maps, regions, size)
        return boxes, scores, labels, _mask(heads, maps, boxes, labels)


def _propose(rpn: Any, maps: Sequence[Tensor], size: Sequence[int]) -> Tensor:
    """The regions [n, 4] in which the region proposal network expects objects."""
    boxes, scores, levels = [], [], []
    for level, (level_maps, anchors) in enumerate(zip(maps, _level_anchors(rpn.anchor_generator, maps), strict=True)):
        (logits,), (shifts,) = rpn.head([level_maps])
        best, places = _best(_in_rows(logits, 1).flatten(), rpn.pre_nms_top_n())
        offsets = _in_rows(shifts, 4)
        boxes.append(rpn.box_coder.decode_single(offsets[places], anchors[places]))
        scores.append(best.sigmoid())
        levels.append(torch.full_like(places, level))
    regions = clip_boxes_to_image(torch.cat(boxes), size)
    likelihood = torch.cat(scores)
    likely = _places(_wide(regions, rpn.min_size) & (likelihood >= rpn.score_thresh))
    regions = regions[likely]
    return regions[
        _suppress(regions, likelihood[likely], torch.cat(levels)[likely], rpn.nms_thresh, rpn.post_nms_top_n())
    ]


def _refine(heads: Any, maps: Sequence[Tensor], regions: Tensor, size: Sequence[int]) -> Tensor:
    """Move regions [n, 4] by all stages of a cascade but the last."""
    for stage, box_head in zip(heads.earlier, heads.box_predictor.box_heads, strict=False):
        _, offsets = box_head(_pool(heads.box_roi_pool, maps, regions))
        regions = clip_boxes_to_image(stage.box_coder.decode_single(offsets, regions), size)
    return regions


def _classify(heads: Any, maps: Sequence[Tensor], regions: Tensor, size: Sequence[int]) -> tuple[Tensor, ...]:
    """Boxes [n, 4], scores [n] and labels [n] of the objects in some regions [m, 4]."""
    pooled = _pool(heads.box_roi_pool, maps, regions)
    logits, offsets = heads.box_predictor(heads.box_head(pooled))
    # label 0 is the background
    scores = logits.softmax(-1)[:, 1:]  # [m, K]
    boxes = heads.box_coder.decode_single(offsets, regions).unflatten(1, (-1, 4))[:, 1:]  # [m, K, 4]
    boxes = clip_boxes_to_image(boxes, size)
    likely, labels = ((scores > heads.score_thresh) & _wide(boxes, LEAST_SIDE)).nonzero().unbind(1)
    boxes, scores = boxes[likely, labels], scores[likely, labels]
    kept = _suppress(boxes, scores, labels, heads.nms_thresh, heads.detections_per_img)
    return boxes[kept], scores[kept], labels[kept]


def _mask(heads: Any, maps: Sequence[Tensor], boxes: Tensor, labels: Tensor) -> Tensor:
    """Probabilities [n, 28, 28] within boxes [n, 4] of the objects that have these labels."""
    logits = heads.mask_predictor(heads.mask_head(_pool(heads.mask_roi_pool, maps, boxes)))
    return logits[torch.arange(boxes.shape[0], device=boxes.device), labels + 1].sigmoid()


def _pyramid(parts: Any, images: Tensor) -> list[Tensor]:
    """The levels of the pyramid, [1, C, H, W] each, of images [1, 3, H, W] with values in [0, 1]."""
    if parts.training:
        raise UserError("the graph of a detector is for evaluation only: call eval() first")
    if images.dim() != 4 or tuple(images.shape[:2]) != (1, 3):
        raise UserError(f"images must be one image [1, 3, H, W], got {list(images.shape)}")
    height, width = images.shape[-2:]
    normal = parts.transform.normalize_whole(images)
    padded = F.pad(normal, (0, _whole_patches(width) - width, 0, _whole_patches(height) - height))
    return list(parts.backbone(PaddedImages(padded, [(padded.shape[-2], padded.shape[-1])])).values())


def _whole_patches(side: int) -> int:
    return (side + STRIDES[-1] - 1) // STRIDES[-1] * STRIDES[-1]


def _fix_anchors(generator: StridedAnchors, parts: nn.Module) -> None:
    """Move the anchors of a cell to the device of the parameters, which cannot be done while a graph is traced."""
    generator.set_cell_anchors(torch.float32, next(parts.parameters()).device)


def _level_anchors(generator: Any, maps: Sequence[Tensor]) -> list[Tensor]:
    """The anchors [H W A, 4] of each level."""
    anchors: list[Tensor] = generator.grid_anchors(
        [level.shape[-2:] for level in maps], [(stride, stride) for stride in generator.strides]
    )
    return anchors


def _in_rows(outputs: Tensor, columns: int) -> Tensor:
    """Outputs [1, C, H, W] -> the rows [H W C / columns, columns] of each place, one place after the other."""
    return outputs[0].permute(1, 2, 0).reshape(-1, columns)


def _best(scores: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """The ``limit`` largest of some scores [n], or all of them, in descending order, and their places."""
    values, places = scores.topk(torch.sym_min(limit, scores.shape[0]))
    return values, places


def _places(condition: Tensor) -> Tensor:
    return condition.nonzero().squeeze(1)


def _wide(boxes: Tensor, least: float) -> Tensor:
    """Whether both sides of boxes [..., 4] have at least this length."""
    return (boxes[..., 2:] - boxes[..., :2] >= least).all(-1)


def _suppress(boxes: Tensor, scores: Tensor, groups: Tensor, overlap: float, limit: int) -> Tensor:
    """Places of the best ``limit`` boxes, by descending score, that overlap no better one of their group."""
    # the last two always remain: torchvision tells torch.export that at least two do, and an empty set has no maximum
    boxes = torch.cat([boxes, boxes.new_tensor([[-2, -2, -1, -1], [-4, -4, -3, -3]])])
    scores = torch.cat([scores, scores.new_tensor([-1, -1])])
    shifts = F.pad(groups, (0, 2)) * (boxes.max() + 1)
    return nms(boxes + shifts[:, None], scores, overlap)[:-2][:limit]


def _pool(pooling: MultiScaleRoIAlign, maps: Sequence[Tensor], regions: Tensor) -> Tensor:
    """Pool regions [n, 4], each from the level of its size: [n, C, S, S]."""
    levels = pooling.map_levels([regions])
    # the first column is the image's place in the batch
    regions = F.pad(regions, (1, 0))
    chosen, pooled = [], []
    for level, scale in enumerate(pooling.scales):
        chosen.append(_places(levels == level))
        # in float32, as the regions are: half precision has steps of 2 pixels above 2048
        level_maps = maps[level].float()
        pooled.append(roi_align(level_maps, regions[chosen[-1]], pooling.output_size, scale, pooling.sampling_ratio))
    order = torch.cat(chosen)
    places = torch.zeros_like(levels).scatter(0, order, torch.arange(order.shape[0], device=order.device))
    return torch.cat(pooled)[places].to(maps[0])
