"""Recipes: everything that decides a training run, typed and checked, before any data is touched."""

from dataclasses import dataclass, field
from typing import Literal

from softline.checks import check_range
from softline.engine.recipe import Recipe
from softline.errors import UserError

CropMode = Literal["center", "squash", "border"]


@dataclass(frozen=True, kw_only=True)
class ImageData:
    source: str
    """embedded, fashion-mnist, a directory DIR/<split>/<class>/*.jpg, a .tar file, or a name that timm.data reads
    (torch/..., hfds/..., hfids/..., wds/..., tfds/...)."""
    root: str | None = None
    """Where a timm.data name keeps its files."""
    train_split: str = "train"
    val_split: str = "val"
    image_size: int | None = None
    """Side of the square training and test images; the model's own by default."""
    mean: tuple[float, ...] | None = None
    """Of the channels, in 0 to 1; the model's own by default."""
    std: tuple[float, ...] | None = None
    interpolation: Literal["bicubic", "bilinear", "nearest", "lanczos"] | None = None
    """The model's own by default."""
    crop_pct: float | None = None
    """Test images are resized to image_size / crop_pct, then cropped; the model's own by default."""
    crop_mode: CropMode | None = None
    """How test images are resized: the shorter side (center), both sides (squash), the longer side (border); the
    model's own by default."""
    skip_corrupt: bool = False
    """Look for unreadable images first and leave them out."""


@dataclass(frozen=True, kw_only=True)
class Augment:
    scale: tuple[float, float] = (0.08, 1.0)
    """Area of the random crop."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Aspect ratio of the random crop."""
    hflip: float = 0.5
    color_jitter: float = 0.0
    """Not used together with auto_augment, as in timm."""
    auto_augment: str | None = None
    """timm's notation, such as rand-m9-mstd0.5-inc1."""
    random_interpolation: bool = False
    """Bilinear or bicubic by chance in training, instead of data.interpolation."""
    erase_prob: float = 0.0
    erase_mode: Literal["const", "rand", "pixel"] = "pixel"
    erase_count: int = 1
    mixup: float = 0.0
    """Alpha of mixup; 0 is off."""
    cutmix: float = 0.0
    """Alpha of cutmix; 0 is off."""
    mixup_prob: float = 1.0
    """Probability that a batch is mixed at all."""
    switch_prob: float = 0.5
    """Probability of cutmix where both are on."""
    smoothing: float = 0.0
    """Of the labels."""


@dataclass(frozen=True, kw_only=True)
class ClassificationRecipe(Recipe):
    data: ImageData
    augment: Augment = field(default_factory=Augment)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data.image_size is not None:
            check_range("data.image_size", self.data.image_size, 1)
        if self.data.crop_pct is not None:
            check_range("data.crop_pct", self.data.crop_pct, 0, 1, open_low=True)
        for name in ("hflip", "erase_prob", "mixup_prob", "switch_prob"):
            check_range(f"augment.{name}", getattr(self.augment, name), 0, 1)
        for name in ("color_jitter", "mixup", "cutmix"):
            check_range(f"augment.{name}", getattr(self.augment, name), 0)
        check_range("augment.smoothing", self.augment.smoothing, 0, 1, open_high=True)
        low, high = self.augment.scale
        if not 0 < low <= high <= 1:
            raise UserError(f"augment.scale must be two areas 0 < low <= high <= 1, got {self.augment.scale}")
        if (self.augment.mixup or self.augment.cutmix) and self.batch_size // self.accumulate % 2:
            raise UserError(
                "mixup and cutmix pair the images of a batch: batch_size / accumulate must be even, "
                f"got {self.batch_size} / {self.accumulate}"
            )
