"""The recipe keys of segmentation."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from softline.checks import check_integer, check_pair, check_range
from softline.engine.recipe import Recipe, check_channels, check_drop_rates
from softline.errors import UserError

# masks are images of 8 or 16 bits
MOST_LABEL = 2**16 - 1


@dataclass(frozen=True, kw_only=True)
class SemanticData:
    source: str
    layout: Literal["ade20k", "cityscapes", "folder"]
    """Layout of the directory; folder is SPLIT/* with SPLITannot/*.png, or images/SPLIT with masks/SPLIT."""
    train_split: str = "train"
    val_split: str = "val"
    classes: list[str] | int | None = None
    """Names of the classes, or their number; only for layout folder."""
    ignore_index: int | None = None
    """Value in the masks that means no class; only for layout folder."""
    mean: tuple[float, ...] | None = None
    """Mean of each channel in 0 to 1; defaults to the model's."""
    std: tuple[float, ...] | None = None
    crop: tuple[int, int]
    """Rows and columns of training images."""
    base_size: tuple[int, int] | None = None
    """Short and long side that training images are first resized to fit; None keeps their size."""
    scale: tuple[float, float] = (0.5, 2.0)
    """Range of the random factor by which training images are resized before they are cropped."""
    largest_share: float = 0.75
    """Largest share of a crop that one class should cover; a few crops are tried."""
    hflip: float = 0.5
    distort: bool = True
    """Change brightness, contrast, saturation and hue at random."""
    short_side: int | None = None
    """Short side that test images are resized to, and predictions back; None keeps their size."""
    long_side: int | None = None
    """Longest long side of a resized test image."""
    inference: Literal["whole", "slide"] = "whole"
    """Run the model on whole test images, or on windows of the crop's size that overlap by a third."""
    skip_corrupt: bool = False
    """Search for unreadable images and masks before training and leave them out."""


@dataclass(frozen=True, kw_only=True)
class SegmenterRecipe:
    name: Literal["upernet", "semantic_fpn", "segformer"]
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the head: channels, dropout, and auxiliary (upernet) or head_channels (semantic_fpn)."""


@dataclass(frozen=True, kw_only=True)
class SegmentationRecipe(Recipe):
    """A class for each pixel; ``model`` is the backbone."""

    free_keys: ClassVar[frozenset[str]] = Recipe.free_keys | {"data.source", "data.skip_corrupt"}
    size_keys: ClassVar[tuple[str, ...]] = ("data.crop",)

    data: SemanticData
    head: SegmenterRecipe

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("data.hflip", self.data.hflip, 0, 1)
        check_range("data.largest_share", self.data.largest_share, 0, 1, open_low=True)
        for side in self.data.crop:
            check_range("data.crop", side, 1)
        check_pair("data.scale", self.data.scale, 0)
        check_channels(self.data.mean, self.data.std)
        check_drop_rates("head.options", self.head.options)
        if isinstance(self.data.classes, int):
            check_integer("data.classes", self.data.classes, 1)
        if self.data.ignore_index is not None:
            check_range("data.ignore_index", self.data.ignore_index, 0, MOST_LABEL)
        if self.data.short_side is not None:
            check_range("data.short_side", self.data.short_side, 1)
        if self.data.long_side is not None:
            check_range("data.long_side", self.data.long_side, self.data.short_side or 1)
        if self.data.base_size is not None:
            check_range("data.base_size (short side)", self.data.base_size[0], 1)
            check_range("data.base_size (long side)", self.data.base_size[1], self.data.base_size[0])
        for name in ("mean", "std"):
            if (colours := getattr(self.data, name)) is not None and len(colours) != 3:
                raise UserError(f"data.{name} must be 3 numbers, one for each colour, got {list(colours)}")
        if self.data.layout == "folder" and self.data.classes is None:
            raise UserError("data.layout folder needs data.classes: their names, or how many there are")
