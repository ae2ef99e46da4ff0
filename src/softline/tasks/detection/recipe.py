"""Recipes: everything that decides a training run, typed and checked, before any data is touched."""

from dataclasses import dataclass, field
from typing import Any, Literal

from softline.checks import check_range
from softline.engine.recipe import Recipe
from softline.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DetectionData:
    source: str
    """Directory in COCO's layout: SPLIT/*.jpg and annotations/instances_SPLIT.json."""
    train_split: str = "train2017"
    val_split: str = "val2017"
    train_annotations: str | None = None
    """The JSON file, if it lies elsewhere."""
    val_annotations: str | None = None
    mean: tuple[float, ...] | None = None
    """Of the channels, in 0 to 1; the model's own by default."""
    std: tuple[float, ...] | None = None
    train_short_sides: tuple[int, ...] = (800,)
    """Training images are resized so that their short side is one of these, by chance."""
    short_side: int = 800
    """Of test images."""
    long_side: int = 1333
    """The most that the long side may have, in training and test."""
    hflip: float = 0.5
    group_aspects: bool = True
    """Batches of wide or of tall images, so that less of them is padding."""
    skip_empty_boxes: bool = False
    """Train without the boxes that have no width or height, and tell which they are."""
    skip_corrupt: bool = False
    """Leave out images and annotations that are described wrongly, and unreadable images, which are looked for
    first."""


@dataclass(frozen=True, kw_only=True)
class DetectorRecipe:
    name: Literal["retinanet", "mask_rcnn"]
    options: dict[str, Any] = field(default_factory=dict)
    """Its keyword arguments: width, anchor_sizes, score_threshold, detections_per_image, and norm (retinanet) or
    regions_per_image (mask_rcnn)."""


@dataclass(frozen=True, kw_only=True)
class DetectionRecipe(Recipe):
    """Boxes, and with mask_rcnn masks; ``model`` is the backbone."""

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
        check_range("data.short_side", self.data.short_side, 1, self.data.long_side)
        if not self.data.train_short_sides:
            raise UserError("data.train_short_sides must name at least one length")
        for side in self.data.train_short_sides:
            check_range("data.train_short_sides", side, 1, self.data.long_side)
