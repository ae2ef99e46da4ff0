"""The recipe keys of detection."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from softline.checks import check_range
from softline.engine.recipe import Recipe, check_channels, check_drop_rates
from softline.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DetectionData:
    source: str
    """Directory in COCO's layout: SPLIT/*.jpg and annotations/instances_SPLIT.json."""
    train_split: str = "train2017"
    val_split: str = "val2017"
    train_annotations: str | None = None
    """JSON file of the annotations; defaults to the place in COCO's layout."""
    val_annotations: str | None = None
    mean: tuple[float, ...] | None = None
    """Mean of each channel in 0 to 1; defaults to the model's."""
    std: tuple[float, ...] | None = None
    train_short_sides: tuple[int, ...] = (800,)
    """Lengths from which the short side of a training image is drawn at random."""
    short_side: int = 800
    """Short side of test images."""
    long_side: int = 1333
    """Longest long side, in training and test."""
    hflip: float = 0.5
    group_aspects: bool = True
    """Put only wide or only tall images into a batch, which needs less padding."""
    skip_empty_boxes: bool = False
    """Leave boxes without width or height out of the training, and report them."""
    skip_corrupt: bool = False
    """Leave out images and annotations that are described wrongly, and unreadable images, which are searched for
    before training."""


@dataclass(frozen=True, kw_only=True)
class DetectorRecipe:
    name: Literal["retinanet", "retinanet_lite", "mask_rcnn", "cascade_mask_rcnn"]
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the head: width, anchor_sizes, score_threshold, detections_per_image, and norm (retinanet)
    or regions_per_image (the others)."""


@dataclass(frozen=True, kw_only=True)
class DetectionRecipe(Recipe):
    """Boxes, and masks except with retinanet and retinanet_lite; ``model`` is the backbone."""

    free_keys: ClassVar[frozenset[str]] = Recipe.free_keys | {
        "data.source",
        "data.skip_corrupt",
        "data.skip_empty_boxes",
        "data.train_annotations",
        "data.val_annotations",
    }

    size_keys: ClassVar[tuple[str, ...]] = ("data.train_short_sides",)

    data: DetectionData
    head: DetectorRecipe

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.channels_last:
            raise UserError("model.channels_last is for classification and segmentation only")
        if self.strategy == "fsdp":
            raise UserError(
                "strategy fsdp is not for detection: how often a backbone runs depends on the images of a process, and "
                "shards must run in step; use ddp"
            )
        check_range("data.hflip", self.data.hflip, 0, 1)
        check_channels(self.data.mean, self.data.std)
        check_drop_rates("head.options", self.head.options)
        check_range("data.long_side", self.data.long_side, 1)
        check_range("data.short_side", self.data.short_side, 1, self.data.long_side)
        if not self.data.train_short_sides:
            raise UserError("data.train_short_sides must name at least one length")
        for side in self.data.train_short_sides:
            check_range("data.train_short_sides", side, 1, self.data.long_side)
