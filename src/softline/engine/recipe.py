"""Recipes: everything that decides a training run, typed and checked before any data is touched.

Here are the keys that every task has; each task adds its own in a subclass of `Recipe`.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from softline.checks import check_number, check_range
from softline.errors import UserError

Precision = Literal["fp32", "bf16", "fp16"]
Strategy = Literal["ddp", "fsdp"]
MOST_EPOCHS = 1e6
# what numpy's and torch's generators take
MOST_SEED = 2**32 - 1
# drop_rate, drop_path_rate, attn_drop, dropout, ...: names of probabilities in timm's models and softline's heads
DROP_RATE = re.compile(r"(^|_)drop(out)?(_\w+)?_rate$|(^|_)drop(out)?$")


@dataclass(frozen=True, kw_only=True)
class ReplaceRecipe:
    """An attention of softline in the place of a model's own; see `softline.replace_attention`."""

    attention: str
    layers: tuple[int | str, ...] | None = None
    """Indices of blocks, or patterns of names; null replaces the attention of all."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the attention."""
    queries: Literal["mean", "query", "key", "random"] = "mean"
    """What one projection for queries and keys inherits."""
    drop_position_bias: bool = False
    """Give up Swin's bias for each pair of positions."""


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    name: str
    """Any model of timm.create_model, softline's included, or what the task has instead."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the model: attention, attention_options, drop_path_rate, ..."""
    replace: ReplaceRecipe | None = None
    """Replace the attention of a vision transformer of timm, which keeps its weights."""
    pretrained: bool = False
    """Start from the published weights."""
    checkpoint: str | None = None
    """Start from the weights in this file; position embeddings and classifier are adapted to this recipe."""
    grad_checkpointing: bool = False
    """Recompute activations in the backward pass, which saves memory and takes longer."""
    freeze_batch_norm: bool = False
    """Keep the backbone's BatchNorm layers as loaded, for batches of few images."""
    sync_batch_norm: bool = False
    """Compute BatchNorm statistics over the images of all processes, each of which needs a GPU."""
    channels_last: bool = False
    compile: bool = False
    """Train through torch.compile."""


@dataclass(frozen=True, kw_only=True)
class OptimizerRecipe:
    name: str = "adamw"
    """Any optimizer of timm."""
    lr: float
    lr_batch: int | None = None
    """Batch size that all learning rates are meant for; they are scaled in proportion to the recipe's batch size."""
    weight_decay: float = 0.05
    """Weight decay of matrices and kernels; biases, norms and what the model exempts have none."""
    decay_positions: bool = False
    """Apply the weight decay to position embeddings too, which models exempt."""
    layer_decay: float | None = None
    """Factor between the learning rates of a layer and of the layer before it."""
    clip_norm: float | None = None
    """Largest norm of the gradient; larger gradients are scaled down."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer: betas, eps, momentum, ..."""

    def check(self) -> None:
        check_range("optimizer.lr", self.lr, 0, open_low=True)
        check_range("optimizer.weight_decay", self.weight_decay, 0)
        if self.clip_norm is not None:
            check_range("optimizer.clip_norm", self.clip_norm, 0, open_low=True)
        if self.lr_batch is not None:
            check_range("optimizer.lr_batch", self.lr_batch, 1)
        if self.layer_decay is not None:
            check_range("optimizer.layer_decay", self.layer_decay, 0, 1, open_low=True)
        for name, value in self.options.items():
            for number in value if isinstance(value, list | tuple) else [value]:
                if isinstance(number, float):
                    check_number(f"optimizer.options.{name}", number, -math.inf)


@dataclass(frozen=True, kw_only=True)
class ScheduleRecipe:
    name: Literal["cosine", "step", "multistep", "poly", "tanh", "linear"] = "cosine"
    """linear rises and then falls in straight lines, as torch's OneCycleLR can."""
    epochs: float
    warmup_epochs: float = 0.0
    """How many of the epochs the learning rate rises from warmup_lr."""
    cooldown_epochs: float = 0.0
    """Further epochs at the final learning rate."""
    per_epoch: bool = False
    """Change the learning rate only between epochs: all steps of an epoch have the rate of its first step."""
    warmup_lr: float = 1e-6
    min_lr: float = 0.0
    decay_rate: float = 0.1
    """Factor by which step and multistep lower the learning rate."""
    power: float = 1.0
    """Exponent of poly."""
    decay_epochs: float = 30.0
    """Epochs between two steps of step."""
    milestones: tuple[float, ...] = ()
    """Epochs at which multistep lowers the learning rate."""

    def check(self) -> None:
        check_range("schedule.epochs", self.epochs, 0, MOST_EPOCHS, open_low=True)
        check_range("schedule.warmup_epochs", self.warmup_epochs, 0, self.epochs)
        check_range("schedule.cooldown_epochs", self.cooldown_epochs, 0, MOST_EPOCHS)
        for name in ("warmup_lr", "min_lr"):
            check_range(f"schedule.{name}", getattr(self, name), 0)
        check_range("schedule.decay_rate", self.decay_rate, 0, 1)
        for name in ("power", "decay_epochs"):
            check_range(f"schedule.{name}", getattr(self, name), 0, MOST_EPOCHS, open_low=True)
        if self.name == "multistep" and not self.milestones:
            raise UserError("schedule multistep needs schedule.milestones, the epochs at which the rate falls")
        for before, milestone in zip((0.0, *self.milestones), self.milestones, strict=False):
            # counted from the last one
            check_range("schedule.milestones", milestone, before, MOST_EPOCHS)


@dataclass(frozen=True, kw_only=True)
class EmaRecipe:
    decay: float
    warmup: bool = False
    """Let the decay rise towards its value, for short runs."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The keys of every task's recipe."""

    free_keys: ClassVar[frozenset[str]] = frozenset(
        (
            *("output", "device", "workers", "accumulate", "strategy"),
            *("model.checkpoint", "model.compile", "model.grad_checkpointing"),
            *("eval_batch_size", "eval_every", "eval_steps", "save_every", "log_every"),
        )
    )
    """Keys that may change when a run is resumed: where things lie, how they are computed, what is logged."""
    size_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that decide, beside batch_size, how large a batch is."""

    task: str
    output: str
    """Directory of checkpoints and logs."""
    model: ModelRecipe
    seed: int = 0
    batch_size: int
    """Samples in one step of the optimizer, over all processes and accumulated batches."""
    accumulate: int = 1
    """Backward passes in one step of the optimizer."""
    eval_batch_size: int | None = None
    """Samples at once in each process; defaults to batch_size / accumulate / processes."""
    workers: int = 0
    """Loading processes for each training process."""
    optimizer: OptimizerRecipe
    schedule: ScheduleRecipe
    ema: EmaRecipe | None = None
    """Average the weights and evaluate the average."""
    precision: Precision = "fp32"
    strategy: Strategy = "ddp"
    """How several processes share the model: a copy each (ddp), or shards of it (fsdp, torch's fully_shard)."""
    device: Literal["auto", "cpu"] = "auto"
    eval_every: int = 1
    """Epochs between evaluations; there is always one after the last epoch."""
    eval_steps: int | None = None
    """Steps between evaluations, instead of the epochs of eval_every."""
    save_every: int | None = None
    """Steps between checkpoints, in addition to the one after each epoch."""
    log_every: int = 20
    """Steps between log lines."""

    def __post_init__(self) -> None:
        check_range("seed", self.seed, 0, MOST_SEED)
        check_range("batch_size", self.batch_size, 1)
        check_range("accumulate", self.accumulate, 1)
        check_range("workers", self.workers, 0)
        check_range("eval_every", self.eval_every, 1)
        check_range("log_every", self.log_every, 1)
        for name in ("eval_batch_size", "eval_steps", "save_every"):
            if (value := getattr(self, name)) is not None:
                check_range(name, value, 1)
        check_drop_rates("model.options", self.model.options)
        self.optimizer.check()
        self.schedule.check()
        # that of a small batch may be zero, that of a large one infinite
        check_range(
            "optimizer.lr * batch_size / optimizer.lr_batch", self.optimizer.lr * self.lr_scale, 0, open_low=True
        )
        if self.ema is not None:
            check_range("ema.decay", self.ema.decay, 0, 1)
        if self.strategy == "fsdp" and self.precision == "fp16":
            raise UserError("strategy fsdp has no loss scaling for precision fp16: use bf16")

    @property
    def lr_scale(self) -> float:
        return 1.0 if self.optimizer.lr_batch is None else self.batch_size / self.optimizer.lr_batch

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)

    def without_weights(self) -> Self:
        """The same recipe with random initial weights, for a network whose weights come from elsewhere."""
        return self.replace(model=dataclasses.replace(self.model, pretrained=False, checkpoint=None))


def check_drop_rates(name: str, options: Mapping[str, Any]) -> None:
    """Check the options of a network that are probabilities, which not every network does itself."""
    for key, value in options.items():
        if DROP_RATE.search(str(key)) and isinstance(value, int | float) and not isinstance(value, bool):
            check_range(f"{name}.{key}", value, 0, 1, open_high=True)


def check_channels(mean: Sequence[float] | None, std: Sequence[float] | None) -> None:
    """Check the statistics of a recipe's images, a number for each channel."""
    for number in mean or ():
        check_range("data.mean", number, 0, 1)
    for number in std or ():
        check_range("data.std", number, 0, open_low=True)
