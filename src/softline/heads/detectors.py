"""torchvision's RetinaNet and Mask R-CNN with a feature pyramid on any backbone with strides 4, 8, 16 and 32.

Focal Loss for Dense Object Detection, https://arxiv.org/abs/1708.02002
Mask R-CNN, https://arxiv.org/abs/1703.06870
Cascade R-CNN: Delving into High Quality Object Detection, https://arxiv.org/abs/1712.00726
MobileNets, https://arxiv.org/abs/1704.04861, whose separable convolutions `retinanet_lite` has

Differences from torchvision's own detectors:

- The backbone, whose attention is global, never sees padding. In training the feature maps are padded to form a batch;
  in evaluation each image is run on its own, so that its detections do not depend on the rest of the batch.
- Anchors are placed at the strides of the pyramid. torchvision divides the padded size by that of the map, which for
  the coarse levels depends on the batch: 800 rows give 13 on P6, hence a stride of 61 instead of 64.
- Regions are pooled at the strides of the pyramid. torchvision infers them once, from the first batch, by rounding.
- Under autocast, outputs and anchors are float32: in bfloat16, coordinates above 512 are multiples of 4.
- Images are downscaled with antialiasing, as in training.
- Masks are bool, and pasted into the image one at a time: see `softline.heads.masks`.
- torchvision has no cascade: see `softline.heads.cascade`.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelMaxPool, LastLevelP6P7
from torchvision.ops.poolers import LevelMapper
from torchvision.transforms.v2.functional import resize, to_dtype

from softline.checks import check_at_least, check_integer, check_range
from softline.errors import UserError
from softline.heads.cascade import STAGES, CascadeHeads, box_head
from softline.heads.features import STRIDES, StageMaps
from softline.heads.masks import ObjectMasks
from softline.layers.grid import pad_to_whole

ANCHOR_SIZES = (32, 64, 128, 256, 512)
ASPECT_RATIOS = (0.5, 1.0, 2.0)
# side of the map that is pooled from a region
BOX_MAP, MASK_MAP = 7, 14
# group size of GroupNorm: 32 groups of 256 channels
CHANNELS_OF_A_GROUP = 8

Target = dict[str, Tensor]


class PaddedImages(NamedTuple):
    """The images of a batch and their sizes without padding."""

    pixels: Tensor
    """[B, 3, H, W]"""
    sizes: list[tuple[int, int]]
    """Rows and columns of each image."""


class Detector(nn.Module):
    """A torchvision detector whose labels, in targets and results, are 0 to num_classes - 1.

    The attribute ``masks`` tells whether it predicts masks, and needs them in training.
    """

    def __init__(self, detector: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.detector = detector
        self.num_classes = num_classes
        self.masks = isinstance(detector, MaskRCNN)
        # where torchvision classifies regions, label 0 is the background
        self.first_label = int(self.masks)

    @property
    def score_threshold(self) -> float:
        """Detections with a score up to this are dropped."""
        return float(self._scored.score_thresh)

    @score_threshold.setter
    def score_threshold(self, value: float) -> None:
        check_score(value)
        self._scored.score_thresh = value

    @property
    def _scored(self) -> Any:
        return self.detector.roi_heads if self.masks else self.detector

    def forward(self, images: Sequence[Tensor], targets: Sequence[Target] | None = None) -> Any:
        """Detect objects in images [3, H, W], each of its own size, with values in [0, 1] or in evaluation uint8.

        In training images keep their size, and the result is a dict of losses. ``targets`` has for each image boxes
        [n, 4] as x1, y1, x2, y2 in pixels, labels [n] and, if the detector predicts masks, masks [n, H, W]; n may be 0.
        A padded batch differs from single images only after the backbone: convolutions and pooling extend over an
        image's lower and right border, which changes one row and column of each level of the pyramid, and as in
        torchvision, positions in the padding are trained as background.

        In evaluation images are resized, and the result is a dict per image, in pixels of that image: boxes [n, 4],
        labels [n], scores [n] in descending order and, if the detector predicts masks, masks, which are `ObjectMasks`.
        """
        if not self.training:
            return [self._found(self.detector([image])[0]) for image in images]
        if targets is None:
            raise UserError("a detector in training needs targets")
        shifted = [{**target, "labels": target["labels"] + self.first_label} for target in targets]
        return self.detector(list(images), shifted)

    def features(self, images: Tensor) -> dict[str, Tensor]:
        """The pyramid's maps of images [B, 3, H, W] that are resized and normalised already."""
        height, width = images.shape[-2:]
        detector: Any = self.detector
        maps: dict[str, Tensor] = detector.backbone(
            PaddedImages(pad_to_whole(images, STRIDES[-1]), [(height, width)] * len(images))
        )
        return maps

    def resized(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns that an image has in evaluation."""
        transform: Any = self.detector.transform
        rows, columns = transform.resized(size)
        return rows, columns

    def _found(self, found: Target) -> Target:
        return {**found, "labels": found["labels"] - self.first_label}


def retinanet(
    body: nn.Module,
    num_classes: int,
    *,
    short_side: int = 800,
    long_side: int = 1333,
    image_mean: Sequence[float] = IMAGENET_DEFAULT_MEAN,
    image_std: Sequence[float] = IMAGENET_DEFAULT_STD,
    width: int = 256,
    norm: bool = False,
    anchor_sizes: Sequence[float] = ANCHOR_SIZES,
    score_threshold: float = 0.05,
    detections_per_image: int = 100,
) -> Detector:
    """RetinaNet on P3 to P7: stages 2 to 4, and two more levels computed from stage 4.

    body: timm model created with ``features_only=True``.
    num_classes: number of classes, without the background.
    short_side, long_side: in evaluation images are resized until one of their sides reaches its limit.
    image_mean, image_std: mean and standard deviation of each channel.
    width: channels of the pyramid and the head.
    norm: use GroupNorm after each convolution of the head. Without it, as in the paper, the initial outputs of a head
        are small, the more so the narrower it is, and training from scratch takes long.
    anchor_sizes: anchor sizes of P3 to P7 in pixels; each level also has anchors 1.26 and 1.59 times as large.
    score_threshold: minimum score of a detection.
    detections_per_image: maximum number of detections in an image.
    """
    _check(num_classes, short_side, long_side, anchor_sizes)
    _check_options(image_mean, image_std, width, score_threshold, detections_per_image)
    if norm and width % CHANNELS_OF_A_GROUP:
        raise UserError(f"width ({width}) must be divisible by {CHANNELS_OF_A_GROUP} for norm")
    maps = StageMaps(body, stages=(1, 2, 3))
    octaves = tuple(tuple(size * 2 ** (third / 3) for third in range(3)) for size in anchor_sizes)
    anchors = StridedAnchors(octaves, strides=(8, 16, 32, 64, 128))
    extra = LastLevelP6P7(maps.channels[-1], width)
    # torchvision would use P5 instead of stage 4 if it has as many channels
    extra.use_P5 = False
    group_norm = partial(nn.GroupNorm, width // CHANNELS_OF_A_GROUP) if norm else None
    detector = RetinaNet(
        Pyramid(maps, width, extra),
        num_classes,
        anchor_generator=anchors,
        head=RetinaNetHead(width, anchors.num_anchors_per_location()[0], num_classes, norm_layer=group_norm),
        score_thresh=score_threshold,
        detections_per_img=detections_per_image,
    )
    detector.transform = ImageBatches(short_side, long_side, image_mean, image_std)
    _widen_outputs(detector.head.classification_head.cls_logits, detector.head.regression_head.bbox_reg)
    return Detector(detector, num_classes)


def retinanet_lite(body: nn.Module, num_classes: int, *, width: int = 128, **options: Any) -> Detector:
    """RetinaNet whose pyramid and head have separable convolutions and GroupNorm, as light as a linear backbone.

    A separable convolution filters each channel by itself and then mixes the channels of each pixel, as in MobileNets
    (https://arxiv.org/abs/1704.04861) and SSDLite.

    The arguments are those of `retinanet`, except ``norm``, which is always used.
    """
    detector = retinanet(body, num_classes, width=width, norm=True, **options)
    lite: Any = detector.detector
    for part in (lite.backbone.fpn.layer_blocks, lite.head):
        _separate(part)
    _widen_outputs(lite.head.classification_head.cls_logits, lite.head.regression_head.bbox_reg)
    return detector


def _separate(part: nn.Module) -> None:
    """Make all 3 x 3 convolutions inside a module separable."""
    for name, module in list(part.named_children()):
        if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
            setattr(part, name, _separable(module))
        else:
            _separate(module)


def _separable(conv: nn.Conv2d) -> nn.Sequential:
    """Return a separable convolution whose initial outputs have the variance of those of ``conv``."""
    depthwise = nn.Conv2d(conv.in_channels, conv.in_channels, 3, padding=1, groups=conv.in_channels, bias=False)
    pointwise = nn.Conv2d(conv.in_channels, conv.out_channels, 1, bias=conv.bias is not None)
    with torch.no_grad():
        # each of nine weights has a ninth of the variance 1; conv sums nine times as many products as pointwise
        depthwise.weight.normal_(std=1 / 3)
        pointwise.weight.copy_(3 * conv.weight[..., :1, :1])
        if pointwise.bias is not None and conv.bias is not None:
            pointwise.bias.copy_(conv.bias)
    return nn.Sequential(depthwise, pointwise)


def mask_rcnn(
    body: nn.Module,
    num_classes: int,
    *,
    short_side: int = 800,
    long_side: int = 1333,
    image_mean: Sequence[float] = IMAGENET_DEFAULT_MEAN,
    image_std: Sequence[float] = IMAGENET_DEFAULT_STD,
    width: int = 256,
    regions_per_image: int = 512,
    anchor_sizes: Sequence[float] = ANCHOR_SIZES,
    score_threshold: float = 0.05,
    detections_per_image: int = 100,
) -> Detector:
    """Mask R-CNN on P2 to P6: stages 1 to 4, and the last level subsampled by 2.

    The arguments are those of `retinanet`, except:

    width: channels of the pyramid and the mask head; the box head has four times as many.
    regions_per_image: maximum number of regions per image on which the heads are trained.
    anchor_sizes: anchor sizes of P2 to P6 in pixels.
    """
    _check(num_classes, short_side, long_side, anchor_sizes)
    _check_options(image_mean, image_std, width, score_threshold, detections_per_image)
    check_integer("regions_per_image", regions_per_image, 1)
    detector = MaskRCNN(
        Pyramid(StageMaps(body), width, LastLevelMaxPool()),
        rpn_anchor_generator=StridedAnchors(tuple((size,) for size in anchor_sizes), strides=(4, 8, 16, 32, 64)),
        box_roi_pool=_region_pooling(BOX_MAP),
        box_head=TwoMLPHead(width * BOX_MAP**2, 4 * width),
        box_predictor=FastRCNNPredictor(4 * width, num_classes + 1),
        mask_roi_pool=_region_pooling(MASK_MAP),
        mask_head=MaskRCNNHeads(width, (width,) * 4, dilation=1),
        mask_predictor=MaskRCNNPredictor(width, width, num_classes + 1),
        box_batch_size_per_image=regions_per_image,
        box_score_thresh=score_threshold,
        box_detections_per_img=detections_per_image,
    )
    detector.transform = ImageBatches(short_side, long_side, image_mean, image_std)
    heads: Any = detector.roi_heads
    _widen_outputs(detector.rpn.head.cls_logits, detector.rpn.head.bbox_pred)
    _widen_outputs(heads.box_predictor.cls_score, heads.box_predictor.bbox_pred, heads.mask_predictor.mask_fcn_logits)
    return Detector(detector, num_classes)


def cascade_mask_rcnn(body: nn.Module, num_classes: int, *, width: int = 256, **options: Any) -> Detector:
    """Cascade Mask R-CNN: Mask R-CNN with three stages of box heads, each of which works on the boxes of the last.

    The arguments are those of `mask_rcnn`.
    """
    detector = mask_rcnn(body, num_classes, width=width, **options)
    box_heads: Any = [box_head(width * BOX_MAP**2, 4 * width, num_classes) for _ in STAGES]
    for _, predictor in box_heads:
        _widen_outputs(predictor.cls_score, predictor.bbox_pred)
    cascaded: Any = detector.detector
    cascaded.roi_heads = CascadeHeads(cascaded.roi_heads, box_heads)
    return detector


class Pyramid(nn.Module):
    """torchvision's feature pyramid on the stages of a backbone: maps by name, [B, out_channels, H, W] each."""

    def __init__(self, maps: StageMaps, width: int, extra: ExtraFPNBlock) -> None:
        super().__init__()
        self.maps = maps
        self.fpn = FeaturePyramidNetwork(maps.channels, width, extra_blocks=extra)
        self.out_channels = width

    def forward(self, images: PaddedImages) -> dict[str, Tensor]:
        stages = self.maps(images.pixels, images.sizes)
        pyramid: dict[str, Tensor] = self.fpn(OrderedDict((str(level), maps) for level, maps in enumerate(stages)))
        return pyramid


class ImageBatches(GeneralizedRCNNTransform):  # type: ignore[misc]
    """Normalises images, resizes them in evaluation, and pads them to a batch; maps detections back to the images."""

    def __init__(self, short_side: int, long_side: int, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(short_side, long_side, list(mean), list(std), size_divisible=STRIDES[-1])
        self.short_side, self.long_side = short_side, long_side

    def forward(
        self, images: list[Tensor], targets: list[Target] | None = None
    ) -> tuple[ImageList, list[Target] | None]:
        batch, targets = super().forward(images, targets)
        # torchvision's detectors pass `tensors` to the backbone, our `Pyramid`, and do not use them otherwise; so the
        # sizes travel as an argument, and no module has to store those of the current batch
        batch.tensors = PaddedImages(batch.tensors, batch.image_sizes)
        return batch, targets

    def resize(self, image: Tensor, target: Target | None = None) -> tuple[Tensor, Target | None]:
        # in training the dataset has already resized the image, to a random scale
        if self.training:
            return image, target
        size = self.resized(image.shape[-2:])
        return torch.cat([resize(channel, size, antialias=True) for channel in self._normalised(image)]), target

    def normalize(self, image: Tensor) -> Tensor:
        # in evaluation `resize` does it
        return self.normalize_whole(image) if self.training else image

    def normalize_whole(self, images: Tensor) -> Tensor:
        """Normalise all channels of images [..., 3, H, W] with values in [0, 1] at once."""
        return super().normalize(images)

    def _normalised(self, image: Tensor) -> Iterator[Tensor]:
        """Yield the channels [1, H, W] one at a time: as floating-point numbers an image has four times its bytes."""
        for channel, mean, std in zip(image.split(1), self.image_mean, self.image_std, strict=True):
            values = channel if channel.is_floating_point() else to_dtype(channel, torch.float32, scale=True)
            yield (values - mean).div_(std)

    def resized(self, size: Sequence[int]) -> list[int]:
        """Rows and columns in evaluation."""
        scale = min(self.short_side / min(size), self.long_side / max(size))
        return [max(round(side * scale), 1) for side in size]

    def postprocess(
        self, result: list[Target], image_shapes: list[tuple[int, int]], original_image_sizes: list[tuple[int, int]]
    ) -> list[dict[str, Any]]:
        """Map boxes and masks to the pixels of the original images; the masks are `ObjectMasks`."""
        if self.training:
            return result
        # probabilities [n, 1, 28, 28], which torchvision would paste all at once
        cut_outs = [found.pop("masks", None) for found in result]
        placed: list[dict[str, Any]] = super().postprocess(result, image_shapes, original_image_sizes)
        for found, masks, size in zip(placed, cut_outs, original_image_sizes, strict=True):
            if masks is not None:
                found["masks"] = ObjectMasks(masks, found["boxes"], size)
        return placed


class StridedAnchors(AnchorGenerator):  # type: ignore[misc]
    """Anchors at the positions of each level, in float32.

    sizes: anchor sizes of each level.
    strides: stride of each level in pixels.
    """

    def __init__(self, sizes: tuple[tuple[float, ...], ...], *, strides: Sequence[int]) -> None:
        super().__init__(sizes, (ASPECT_RATIOS,) * len(sizes))
        self.strides = tuple(strides)

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        self.set_cell_anchors(torch.float32, feature_maps[0].device)
        grids: Any = [maps.shape[-2:] for maps in feature_maps]
        strides: Any = [(stride, stride) for stride in self.strides]
        anchors = torch.cat(self.grid_anchors(grids, strides))
        return [anchors for _ in image_list.image_sizes]


def _region_pooling(size: int) -> MultiScaleRoIAlign:
    pooling = MultiScaleRoIAlign([str(level) for level in range(len(STRIDES))], output_size=size, sampling_ratio=2)
    known: Any = pooling
    known.scales = [1 / stride for stride in STRIDES]
    # levels P2 to P5; regions of 224 pixels are pooled from P4
    known.map_levels = LevelMapper(2, 5)
    return pooling


def _widen_outputs(*layers: nn.Module) -> None:
    for layer in layers:
        layer.register_forward_hook(_widen)


def _widen(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.float()


def check_score(threshold: float) -> None:
    check_range("score_threshold", threshold, 0, 1, open_high=True)


def _check_options(mean: Sequence[float], std: Sequence[float], width: int, score: float, count: int) -> None:
    check_integer("width", width, 1)
    check_integer("detections_per_image", count, 1)
    check_score(score)
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise UserError(f"mean and std must have 3 numbers each, std positive, got {tuple(mean)} and {tuple(std)}")


def _check(num_classes: int, short_side: int, long_side: int, anchor_sizes: Sequence[float]) -> None:
    check_at_least("num_classes", num_classes, 1)
    if not 0 < short_side <= long_side:
        raise UserError(f"short_side ({short_side}) must be positive and at most long_side ({long_side})")
    if len(anchor_sizes) != len(ANCHOR_SIZES) or min(anchor_sizes) <= 0:
        raise UserError(
            f"anchor_sizes must be {len(ANCHOR_SIZES)} positive numbers, one for each level, got {tuple(anchor_sizes)}"
        )
