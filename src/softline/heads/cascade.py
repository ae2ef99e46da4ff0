"""The heads of Cascade Mask R-CNN, from the parts of torchvision's Mask R-CNN.

Cascade R-CNN: Delving into High Quality Object Detection, https://arxiv.org/abs/1712.00726

Each of three stages classifies regions and moves them, and the next one works on the moved regions: it is trained on
regions that overlap their object better, and its box targets are scaled up to keep their variance. The box regression
is the same for all classes, and in evaluation the score of a detection is the mean probability that the three
classifiers give to the regions of the last stage. The losses of the stages have the weights 1, 0.5 and 0.25.

Masks are predicted in the last stage only.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss
from torchvision.ops import clip_boxes_to_image


class Refinement(NamedTuple):
    """How one stage is trained."""

    iou: float
    """Least overlap of a region with its object."""
    box_weights: tuple[float, float, float, float]
    """Factors of the box targets x, y, width and height."""
    loss_weight: float


STAGES = (
    Refinement(0.5, (10.0, 10.0, 5.0, 5.0), 1.0),
    Refinement(0.6, (20.0, 20.0, 10.0, 10.0), 0.5),
    Refinement(0.7, (30.0, 30.0, 15.0, 15.0), 0.25),
)


class CascadeHeads(RoIHeads):  # type: ignore[misc]
    """Three stages of box heads, and the mask head on the boxes of the last.

    heads: torchvision's heads of Mask R-CNN, whose pooling, mask head and limits are taken over.
    box_heads: one for each stage, from pooled maps to class logits [n, K + 1] and box offsets [n, 4].
    """

    def __init__(self, heads: RoIHeads, box_heads: Sequence[nn.Module]) -> None:
        *earlier, last = (_limits(heads, stage) for stage in STAGES)
        super().__init__(
            heads.box_roi_pool,
            # the box heads of all stages take the pooled maps
            nn.Identity(),
            MeanScores(box_heads),
            mask_roi_pool=heads.mask_roi_pool,
            mask_head=heads.mask_head,
            mask_predictor=heads.mask_predictor,
            **last,
        )
        # they match regions with objects, and have no parameters
        self.earlier = nn.ModuleList(RoIHeads(None, None, None, **limits) for limits in earlier)

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Move the proposals [n, 4] of each image stage by stage; return detections or losses, as torchvision does."""
        found: dict[str, Tensor] = {}
        stages: Any = self.earlier
        for index, stage in enumerate(stages):
            if self.training:
                proposals, _, labels, wanted = stage.select_training_samples(proposals, targets)
            pooled = self.box_roi_pool(features, proposals, image_shapes)
            logits, offsets = self.box_predictor.box_heads[index](pooled)
            if self.training:
                losses = fastrcnn_loss(logits, _for_each_class(offsets, logits), labels, wanted)
                found |= _weighted(index, dict(zip(("loss_classifier", "loss_box_reg"), losses, strict=True)))
            proposals = _moved(stage, offsets.detach(), proposals, image_shapes)
        result, losses = super().forward(features, proposals, image_shapes, targets)
        masks = {"loss_mask": losses.pop("loss_mask")} if self.training else {}
        return result, found | _weighted(len(STAGES) - 1, losses) | masks


class MeanScores(nn.Module):
    """The last stage's logits and box offsets; in evaluation the logits of the mean probability of all stages."""

    def __init__(self, box_heads: Sequence[nn.Module]) -> None:
        super().__init__()
        self.box_heads = nn.ModuleList(box_heads)

    def forward(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """Regions [n, C, S, S] -> logits [n, K + 1] and offsets [n, 4 (K + 1)]."""
        if self.training:
            logits, offsets = self.box_heads[-1](pooled)
        else:
            outputs = [head(pooled) for head in self.box_heads]
            offsets = outputs[-1][1]
            # torchvision's softmax turns log-probabilities into the probabilities
            logits = torch.stack([scores.softmax(-1) for scores, _ in outputs]).mean(0).log()
        return logits, _for_each_class(offsets, logits)


def box_head(in_channels: int, channels: int, num_classes: int) -> nn.Sequential:
    """Two linear layers, class logits with the background's first, and box offsets that all classes share."""
    predictor = FastRCNNPredictor(channels, num_classes + 1)
    predictor.bbox_pred = nn.Linear(channels, 4)
    return nn.Sequential(TwoMLPHead(in_channels, channels), predictor)


def _limits(heads: RoIHeads, stage: Refinement) -> dict[str, Any]:
    sampler: Any = heads.fg_bg_sampler
    return {
        "fg_iou_thresh": stage.iou,
        "bg_iou_thresh": stage.iou,
        "batch_size_per_image": sampler.batch_size_per_image,
        "positive_fraction": sampler.positive_fraction,
        "bbox_reg_weights": stage.box_weights,
        "score_thresh": heads.score_thresh,
        "nms_thresh": heads.nms_thresh,
        "detections_per_img": heads.detections_per_img,
    }


def _for_each_class(offsets: Tensor, logits: Tensor) -> Tensor:
    """Offsets [n, 4] -> [n, 4 (K + 1)], as torchvision takes them."""
    return offsets.repeat(1, logits.shape[-1])


def _weighted(index: int, losses: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}_{index + 1}": STAGES[index].loss_weight * loss for name, loss in losses.items()}


def _moved(stage: Any, offsets: Tensor, regions: list[Tensor], image_shapes: list[tuple[int, int]]) -> list[Tensor]:
    """Move the regions [n, 4] of each image by their offsets [sum of n, 4], within the image."""
    boxes = stage.box_coder.decode(offsets, regions).reshape(-1, 4).split([len(part) for part in regions])
    return [clip_boxes_to_image(part, shape) for part, shape in zip(boxes, image_shapes, strict=True)]
