"""Recipes: everything that decides a training run, typed and checked, before any data is touched."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from softline.checks import check_range
from softline.errors import UserError
from softline.tasks.classification.recipe import ClassificationRecipe
from softline.tasks.detection.recipe import DetectionRecipe
from softline.tasks.segmentation.recipe import SegmentationRecipe
from softline.tasks.sequence.recipe import SequenceRecipe

Precision = Literal["fp32", "bf16", "fp16"]


Strategy = Literal["ddp", "fsdp"]


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
            raise UserError("schedule multistep needs schedule.milestones, the epochs at which the rate falls")
        if self.optimizer.clip_norm is not None:
            check_range("optimizer.clip_norm", self.optimizer.clip_norm, 0, open_low=True)
        if self.optimizer.lr_batch is not None:
            check_range("optimizer.lr_batch", self.optimizer.lr_batch, 1)
        if self.optimizer.layer_decay is not None:
            check_range("optimizer.layer_decay", self.optimizer.layer_decay, 0, 1, open_low=True)
        if self.ema is not None:
            check_range("ema.decay", self.ema.decay, 0, 1)
        if self.strategy == "fsdp" and self.precision == "fp16":
            raise UserError("strategy fsdp has no loss scaling for precision fp16: use bf16")

    @property
    def lr_scale(self) -> float:
        return 1.0 if self.optimizer.lr_batch is None else self.batch_size / self.optimizer.lr_batch

    def replace(self, **changes: Any) -> "Recipe":
        return dataclasses.replace(self, **changes)

    def without_weights(self) -> "Recipe":
        """The same network, to start from no file: a checkpoint has its weights, or none are needed."""
        return self.replace(model=dataclasses.replace(self.model, pretrained=False, checkpoint=None))


RECIPE_TYPES: dict[str, type[Recipe]] = {
    "classification": ClassificationRecipe,
    "detection": DetectionRecipe,
    "segmentation": SegmentationRecipe,
    "sequence": SequenceRecipe,
}
