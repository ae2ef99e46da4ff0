"""The recipe keys of classification."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from softline.checks import check_integer, check_pair, check_range
from softline.engine.recipe import Recipe, check_channels
from softline.errors import UserError


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
    """Side of the square training and test images; defaults to the model's."""
    mean: tuple[float, ...] | None = None
    """Mean of each channel in 0 to 1; defaults to the model's."""
    std: tuple[float, ...] | None = None
    interpolation: Literal["bicubic", "bilinear", "nearest", "lanczos"] | None = None
    """Interpolation of resized images; defaults to the model's."""
    crop_pct: float | None = None
    """Test images are resized to image_size / crop_pct and then cropped; defaults to the model's."""
    crop_mode: Literal["center", "squash", "border"] | None = None
    """What is resized in test images: the shorter side (center), both sides (squash) or the longer side (border);
    defaults to the model's."""
    skip_corrupt: bool = False
    """Search for unreadable images before training and leave them out."""


@dataclass(frozen=True, kw_only=True)
class Augment:
    scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest area of the random crop."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest aspect ratio of the random crop."""
    hflip: float = 0.5
    color_jitter: float = 0.0
    """Not used together with auto_augment, as in timm."""
    auto_augment: str | None = None
    """A policy in timm's notation, such as rand-m9-mstd0.5-inc1."""
    random_interpolation: bool = False
    """Choose bilinear or bicubic at random in training, instead of data.interpolation."""
    erase_prob: float = 0.0
    erase_mode: Literal["const", "rand", "pixel"] = "pixel"
    erase_count: int = 1
    mixup: float = 0.0
    """Alpha of mixup; 0 turns it off."""
    cutmix: float = 0.0
    """Alpha of cutmix; 0 turns it off."""
    mixup_prob: float = 1.0
    """Probability that a batch is mixed at all."""
    switch_prob: float = 0.5
    """Probability of cutmix where mixup is on too."""
    smoothing: float = 0.0
    """Label smoothing factor."""


@dataclass(frozen=True, kw_only=True)
class ClassificationRecipe(Recipe):
    """One label for each image."""

    free_keys: ClassVar[frozenset[str]] = Recipe.free_keys | {"data.source", "data.root", "data.skip_corrupt"}
    size_keys: ClassVar[tuple[str, ...]] = ("data.image_size",)

    data: ImageData
    augment: Augment = field(default_factory=Augment)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data.image_size is not None:
            check_range("data.image_size", self.data.image_size, 1)
        check_channels(self.data.mean, self.data.std)
        if self.data.crop_pct is not None:
            check_range("data.crop_pct", self.data.crop_pct, 0, 1, open_low=True)
        for name in ("hflip", "erase_prob", "mixup_prob", "switch_prob"):
            check_range(f"augment.{name}", getattr(self.augment, name), 0, 1)
        for name in ("color_jitter", "mixup", "cutmix"):
            check_range(f"augment.{name}", getattr(self.augment, name), 0)
        check_range("augment.smoothing", self.augment.smoothing, 0, 1, open_high=True)
        check_pair("augment.scale", self.augment.scale, 0, 1)
        check_pair("augment.ratio", self.augment.ratio, 0)
        check_integer("augment.erase_count", self.augment.erase_count, 1)
        if (self.augment.mixup or self.augment.cutmix) and self.batch_size // self.accumulate % 2:
            raise UserError(
                "mixup and cutmix pair the images of a batch: batch_size / accumulate must be even, "
                f"got {self.batch_size} / {self.accumulate}"
            )
