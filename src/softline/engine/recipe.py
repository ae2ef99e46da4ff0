"""Recipes: everything that decides a training run, typed and checked, before any data is touched."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

Precision = Literal["fp32", "bf16", "fp16"]
Strategy = Literal["ddp", "fsdp"]
CropMode = Literal["center", "squash", "border"]


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    name: str
    """Any model of timm.create_model, softline's included; lra_encoder for sequences."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its keyword arguments: attention, attention_options, drop_path_rate, ..."""
    pretrained: bool = False
    """Start from the published weights."""
    checkpoint: str | None = None
    """Start from the weights of this checkpoint; positions and classifier are fitted to this recipe's."""
    grad_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    freeze_batch_norm: bool = False
    """Keep the backbone's BatchNorm as it was loaded, for batches of few images."""
    sync_batch_norm: bool = False
    """Let the BatchNorm of several processes, each with a GPU, see all their images; one process has them anyway."""
    channels_last: bool = False
    compile: bool = False
    """Train through torch.compile."""


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
class OptimizerRecipe:
    name: str = "adamw"
    """Any optimizer of timm."""
    lr: float
    lr_batch: int | None = None
    """All learning rates hold for this batch size and are scaled in proportion to the recipe's."""
    weight_decay: float = 0.05
    """Of matrices and kernels; biases, norms and what the model names have none."""
    layer_decay: float | None = None
    """Factor of the learning rate from one layer to the one before it."""
    clip_norm: float | None = None
    """Gradients are scaled down to at most this norm."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer: betas, eps, momentum, ..."""


@dataclass(frozen=True, kw_only=True)
class ScheduleRecipe:
    name: Literal["cosine", "step", "multistep", "poly", "tanh", "linear"] = "cosine"
    """linear: straight up in the warm-up and straight down afterwards, as torch's OneCycleLR can."""
    epochs: float
    warmup_epochs: float = 0.0
    """The first of the epochs: the learning rate rises from warmup_lr."""
    cooldown_epochs: float = 0.0
    """Further epochs at the final learning rate."""
    warmup_lr: float = 1e-6
    min_lr: float = 0.0
    decay_rate: float = 0.1
    """Of step and multistep."""
    power: float = 1.0
    """Of poly."""
    decay_epochs: float = 30.0
    """Of step."""
    milestones: tuple[float, ...] = ()
    """Epochs of multistep."""


@dataclass(frozen=True, kw_only=True)
class EmaRecipe:
    decay: float
    warmup: bool = False
    """Let the decay rise towards its value, for short runs."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What every task's recipe has."""

    task: str
    output: str
    """Directory of checkpoints and logs."""
    model: ModelRecipe
    seed: int = 0
    batch_size: int
    """Samples in one step of the optimizer, over all processes and accumulation."""
    accumulate: int = 1
    """Backward passes in one step."""
    eval_batch_size: int | None = None
    """In each process; by default batch_size / accumulate / processes."""
    workers: int = 0
    """Loading processes for each training process."""
    optimizer: OptimizerRecipe
    schedule: ScheduleRecipe
    ema: EmaRecipe | None = None
    """Average the weights; the average is what is evaluated."""
    precision: Precision = "fp32"
    strategy: Strategy = "ddp"
    """How several processes share the model: a copy each (ddp) or shards of it (fsdp, torch's fully_shard)."""
    device: Literal["auto", "cpu"] = "auto"
    eval_every: int = 1
    """Epochs between evaluations; the last one always is."""
    eval_steps: int | None = None
    """Steps between evaluations, instead of eval_every's epochs."""
    save_every: int | None = None
    """Steps between checkpoints, beside the one after each epoch."""
    log_every: int = 20
    """Steps between log lines."""

    def __post_init__(self) -> None:
        check_range("batch_size", self.batch_size, 1)
        check_range("accumulate", self.accumulate, 1)
        check_range("workers", self.workers, 0)
        check_range("eval_every", self.eval_every, 1)
        check_range("log_every", self.log_every, 1)
        for name in ("eval_batch_size", "eval_steps", "save_every"):
            if (value := getattr(self, name)) is not None:
                check_range(name, value, 1)
        check_range("optimizer.lr", self.optimizer.lr, 0, open_low=True)
        check_range("optimizer.weight_decay", self.optimizer.weight_decay, 0)
        check_range("schedule.epochs", self.schedule.epochs, 0, open_low=True)
        check_range("schedule.warmup_epochs", self.schedule.warmup_epochs, 0, self.schedule.epochs)
        check_range("schedule.cooldown_epochs", self.schedule.cooldown_epochs, 0)
        check_range("schedule.decay_epochs", self.schedule.decay_epochs, 0, open_low=True)
        if self.schedule.name == "multistep" and not self.schedule.milestones:
            raise ValueError("schedule multistep needs schedule.milestones, the epochs at which the rate falls")
        if self.optimizer.clip_norm is not None:
            check_range("optimizer.clip_norm", self.optimizer.clip_norm, 0, open_low=True)
        if self.optimizer.lr_batch is not None:
            check_range("optimizer.lr_batch", self.optimizer.lr_batch, 1)
        if self.optimizer.layer_decay is not None:
            check_range("optimizer.layer_decay", self.optimizer.layer_decay, 0, 1, open_low=True)
        if self.ema is not None:
            check_range("ema.decay", self.ema.decay, 0, 1)
        if self.strategy == "fsdp" and self.precision == "fp16":
            raise ValueError("strategy fsdp has no loss scaling for precision fp16: use bf16")

    @property
    def lr_scale(self) -> float:
        return 1.0 if self.optimizer.lr_batch is None else self.batch_size / self.optimizer.lr_batch

    def replace(self, **changes: Any) -> "Recipe":
        return dataclasses.replace(self, **changes)

    def without_weights(self) -> "Recipe":
        """The same network, to start from no file: a checkpoint has its weights, or none are needed."""
        return self.replace(model=dataclasses.replace(self.model, pretrained=False, checkpoint=None))


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
            raise ValueError(f"augment.scale must be two areas 0 < low <= high <= 1, got {self.augment.scale}")
        if (self.augment.mixup or self.augment.cutmix) and self.batch_size // self.accumulate % 2:
            raise ValueError(
                "mixup and cutmix pair the images of a batch: batch_size / accumulate must be even, "
                f"got {self.batch_size} / {self.accumulate}"
            )


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
            raise ValueError("model.channels_last is for classification and segmentation only")
        if self.strategy == "fsdp":
            raise ValueError(
                "strategy fsdp is not for detection: how often a backbone runs depends on the images of a process, and "
                "shards must run in step; use ddp"
            )
        check_range("data.hflip", self.data.hflip, 0, 1)
        check_range("data.short_side", self.data.short_side, 1, self.data.long_side)
        if not self.data.train_short_sides:
            raise ValueError("data.train_short_sides must name at least one length")
        for side in self.data.train_short_sides:
            check_range("data.train_short_sides", side, 1, self.data.long_side)


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
            raise ValueError(f"data.scale must be two factors 0 < low <= high, got {self.data.scale}")
        if self.data.short_side is not None:
            check_range("data.short_side", self.data.short_side, 1)
        if self.data.long_side is not None:
            check_range("data.long_side", self.data.long_side, self.data.short_side or 1)
        if self.data.base_size is not None:
            check_range("data.base_size (short side)", self.data.base_size[0], 1)
            check_range("data.base_size (long side)", self.data.base_size[1], self.data.base_size[0])
        for name in ("mean", "std"):
            if (colours := getattr(self.data, name)) is not None and len(colours) != 3:
                raise ValueError(f"data.{name} must be 3 numbers, one for each colour, got {list(colours)}")
        if self.data.layout == "folder" and self.data.classes is None:
            raise ValueError("data.layout folder needs data.classes: their names, or how many there are")


@dataclass(frozen=True, kw_only=True)
class ListOpsRecipe:
    """Expressions to generate; see `softline.data.listops.ListOpsSettings`."""

    samples: tuple[int, int, int] = (96_000, 2_000, 2_000)
    """To train on, validate and test."""
    min_length: int = 500
    """Expressions have more tokens than this,"""
    max_length: int = 2000
    """and fewer than this."""
    seed: int = 0
    workers: int = 1
    """Processes that generate."""

    def check(self, name: str) -> None:
        for count in self.samples:
            check_range(f"{name}.samples", count, 1)
        check_range(f"{name}.min_length", self.min_length, 0)
        check_range(f"{name}.max_length", self.max_length, self.min_length + 2)
        check_range(f"{name}.seed", self.seed, 0)
        check_range(f"{name}.workers", self.workers, 1)


@dataclass(frozen=True, kw_only=True)
class SequenceData:
    name: Literal["listops", "text", "retrieval", "image", "pathfinder"]
    """The task of the Long Range Arena."""
    source: str
    """Directory with its files, such as lra_release."""
    generate: ListOpsRecipe | None = None
    """Of listops: expressions are made and kept in source, instead of read from the benchmark's files."""
    train_split: Literal["train", "val", "test"] = "train"
    val_split: Literal["train", "val", "test"] = "val"
    max_length: int | None = None
    """Of text and retrieval: bytes to which texts are cut; the benchmark's 4000 by default."""
    group_lengths: bool = False
    """Batches of sequences that are alike in length, so that less of them is padding; the benchmark's are not."""


@dataclass(frozen=True, kw_only=True)
class SequenceRecipe(Recipe):
    """One label for a sequence; ``model`` is lra_encoder."""

    data: SequenceData

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.name != "lra_encoder":
            raise ValueError(f"model.name must be lra_encoder for sequences, got {self.model.name}")
        for name in ("pretrained", "grad_checkpointing", "freeze_batch_norm", "sync_batch_norm", "channels_last"):
            if getattr(self.model, name):
                raise ValueError(f"model.{name} is for images, not for sequences")
        if self.data.generate is not None:
            if self.data.name != "listops":
                raise ValueError(f"data.generate is for listops; {self.data.name} is read from files")
            self.data.generate.check("data.generate")
        if self.data.max_length is not None:
            check_range("data.max_length", self.data.max_length, 1)
            if self.data.name not in ("text", "retrieval"):
                raise ValueError(f"data.max_length is for text and retrieval; {self.data.name} is never cut")


RECIPE_TYPES: dict[str, type[Recipe]] = {
    "classification": ClassificationRecipe,
    "detection": DetectionRecipe,
    "segmentation": SegmentationRecipe,
    "sequence": SequenceRecipe,
}


def check_range(
    name: str,
    value: float,
    low: float,
    high: float | None = None,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raise unless ``low <= value <= high``; an open bound is itself excluded. NaN is never in range."""
    above = value > low if open_low else value >= low
    below = high is None or (value < high if open_high else value <= high)
    if not (above and below):
        rule = f"{'above' if open_low else 'at least'} {low:g}"
        if high is not None:
            rule += f" and {'below' if open_high else 'at most'} {high:g}"
        raise ValueError(f"{name} must be {rule}, got {value}")
