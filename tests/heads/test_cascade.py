import math

import pytest
import timm
import torch
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.ops import clip_boxes_to_image

import softline  # noqa: F401  registers the backbones
from softline.heads.cascade import STAGES
from softline.heads.detectors import Detector, cascade_mask_rcnn, mask_rcnn

IMAGE = [(96, 128)]
# boxes of four regions in an image of 96 x 128
REGIONS = torch.tensor([[10.0, 12, 50, 60], [30, 5, 90, 44], [0, 0, 128, 96], [70, 50, 120, 90]])


def small(build=cascade_mask_rcnn, *, num_classes=3, width=16, **options) -> Detector:
    torch.manual_seed(0)
    body = timm.create_model("inline_micro", features_only=True)
    return build(body, num_classes, width=width, short_side=96, long_side=128, score_threshold=0.0, **options)


def trained_looking(detector):
    """Give the box heads outputs that differ between regions, classes and stages."""
    for head in detector.detector.roi_heads.box_predictor.box_heads:
        torch.nn.init.normal_(head[1].cls_score.weight, std=0.5)
        torch.nn.init.normal_(head[1].bbox_pred.weight, std=0.3)
    return detector


def feature_maps(width=16):
    torch.manual_seed(1)
    return {str(level): torch.randn(1, width, 96 >> level + 2, 128 >> level + 2) for level in range(4)}


def moved(regions, offsets, weights):
    """The boxes of Faster R-CNN's parametrisation, one by one."""
    boxes = []
    for (x1, y1, x2, y2), offset in zip(regions.tolist(), offsets, strict=True):
        dx, dy, dw, dh = (offset / torch.tensor(weights)).tolist()
        width, height = x2 - x1, y2 - y1
        x, y = x1 + width / 2 + dx * width, y1 + height / 2 + dy * height
        half_width, half_height = width * torch.tensor(dw).exp() / 2, height * torch.tensor(dh).exp() / 2
        boxes.append(torch.stack([x - half_width, y - half_height, x + half_width, y + half_height]))
    return clip_boxes_to_image(torch.stack(boxes), IMAGE[0])


def test_each_stage_works_on_the_boxes_of_the_one_before():
    heads = trained_looking(small()).detector.roi_heads.eval()
    features, seen, regions = feature_maps(), [], REGIONS
    with torch.no_grad():
        heads.box_roi_pool.register_forward_hook(lambda _, inputs, out: seen.append(inputs[1][0]))
        heads(features, [REGIONS], IMAGE)
        for stage, head, given in zip(STAGES, heads.box_predictor.box_heads, list(seen), strict=True):
            torch.testing.assert_close(given, regions)
            _, offsets = head(heads.box_roi_pool(features, [regions], IMAGE))
            regions = moved(regions, offsets, stage.box_weights)


def test_scores_are_the_mean_probability_of_all_stages_on_the_last_regions():
    heads = trained_looking(small()).detector.roi_heads.eval()
    features, pooled = feature_maps(), []
    heads.nms_thresh = 1.0
    with torch.no_grad():
        heads.box_roi_pool.register_forward_hook(lambda _, inputs, out: pooled.append(out))
        (found,), losses = heads(features, [REGIONS], IMAGE)
        probabilities = sum(head(pooled[2])[0].softmax(-1) for head in heads.box_predictor.box_heads) / 3
    assert losses == {}
    # box by box and class by class; the first class is the background
    expected = probabilities[:, 1:].flatten()
    torch.testing.assert_close(found["scores"], expected.sort(descending=True).values)
    # one box for all classes
    assert len(found["boxes"].unique(dim=0)) == len(REGIONS)
    assert found["masks"].shape == (12, 1, 28, 28)


def test_later_stages_want_a_better_overlap():
    """A region of 30 x 40 inside an object of 40 x 40 overlaps it by 3/4; one of 22 x 40 by 0.55; 26 x 40 by 0.65."""
    heads = small().detector.roi_heads
    regions = [torch.tensor([[0.0, 0, 30, 40], [0, 0, 22, 40], [0, 0, 26, 40], [0, 0, 18, 40]])]
    boxes, labels = [torch.tensor([[0.0, 0, 40, 40]])], [torch.tensor([2])]
    found = [
        stage.assign_targets_to_proposals(regions, boxes, labels)[1][0].tolist() for stage in (*heads.earlier, heads)
    ]
    assert found == [[2, 2, 2, 0], [2, 0, 2, 0], [2, 0, 0, 0]]


def test_losses_of_later_stages_count_less():
    """Where all heads say the same of the same regions, the classifiers' losses are in the ratio of the weights."""
    heads = small().detector.roi_heads
    features, targets = feature_maps(), [{"boxes": REGIONS[:0], "labels": torch.zeros(0, dtype=torch.long)}]
    targets[0]["masks"] = torch.zeros(0, *IMAGE[0], dtype=torch.uint8)
    for head in heads.box_predictor.box_heads:
        for layer in (head[1].cls_score, head[1].bbox_pred):
            torch.nn.init.zeros_(layer.weight)
            torch.nn.init.zeros_(layer.bias)
    _, losses = heads(features, [REGIONS], IMAGE, targets)
    found = [losses[f"loss_classifier_{stage}"].item() / math.log(4) for stage in (1, 2, 3)]
    assert found == pytest.approx([1, 0.5, 0.25])


def test_a_cascade_has_two_more_box_heads_that_share_offsets_between_classes():
    """Of 80 classes and 256 channels, as in the recipes."""
    with torch.device("meta"):
        counts = [
            sum(parameter.numel() for parameter in small(build, num_classes=80, width=256).parameters())
            for build in (cascade_mask_rcnn, mask_rcnn)
        ]
    layers = 256 * 49 * 1024 + 1024 + 1024 * 1024 + 1024
    classes, offsets = 1025 * 81, 1025 * 4
    assert counts[0] - counts[1] == 3 * (layers + classes + offsets) - (layers + classes + 81 * offsets)


def test_earlier_stages_hold_no_parameters_of_their_own():
    heads = small().detector.roi_heads
    assert all(isinstance(stage, RoIHeads) and not list(stage.parameters()) for stage in heads.earlier)
    assert len(heads.earlier) == len(STAGES) - 1
