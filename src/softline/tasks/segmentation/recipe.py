"""Recipes: everything that decides a training run, typed and checked, before any data is touched."""

from dataclasses import dataclass, field
from typing import Any, Literal

from softline.checks import check_range
from softline.engine.recipe import Recipe
from softline.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SemanticData:
    source: str
    layout: Literal["ade20k", "cityscapes", "folder"]
    """How the directory is laid out; folder: SPLIT/* with SPLITannot/*.png, or images/SPLIT with masks/SPLIT."""
    train_split: str = "train"
    val_split: str = "val"
    classes: list[str] | int | None = None
    """Names, or how many there are; only of layout folder."""
    ignore_index: int | None = None
    """The value in the masks that means no class; only of layout folder."""
    mean: tuple[float, ...] | None = None
    """Of the channels, in 0 to 1; the model's own by default."""
    std: tuple[float, ...] | None = None
    crop: tuple[int, int]
    """Rows and columns of training images."""
    base_size: tuple[int, int] | None = None
    """Short and long side into which training images are fitted first; None keeps their own."""
    scale: tuple[float, float] = (0.5, 2.0)
    """By which training images are resized before the crop."""
    largest_share: float = 0.75
    """Of a crop's pixels that one class may have, if a few tries find such a crop."""
    hflip: float = 0.5
    distort: bool = True
    """Brightness, contrast, saturation and hue by chance."""
    short_side: int | None = None
    """Test images are resized to it, and predictions back; None leaves them as they are."""
    long_side: int | None = None
    """The most that the long side of a test image becomes by that."""
    inference: Literal["whole", "slide"] = "whole"
    """Test images at once, or in windows of the crop's size that overlap by a third."""
    skip_corrupt: bool = False
    """Look for unreadable images and masks first and leave them out."""


@dataclass(frozen=True, kw_only=True)
class SegmenterRecipe:
    name: Literal["upernet", "semantic_fpn"]
    options: dict[str, Any] = field(default_factory=dict)
    """Its keyword arguments: channels, dropout, and auxiliary (upernet) or head_channels (semantic_fpn)."""


@dataclass(frozen=True, kw_only=True)
class SegmentationRecipe(Recipe):
    """A class for each pixel; ``model`` is the backbone."""

    data: SemanticData
    head: SegmenterRecipe

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("data.hflip", self.data.hflip, 0, 1)
        check_range("data.largest_share", self.data.largest_share, 0, 1, open_low=True)
        for side in self.data.crop:
            check_range("data.crop", side, 1)
        low, high = self.data.scale
        if not 0 < low <= high:
            raise UserError(f"data.scale must be two factors 0 < low <= high, got {self.data.scale}")
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
