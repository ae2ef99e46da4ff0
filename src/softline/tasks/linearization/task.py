"""Losses and metrics of both stages."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection

from softline.engine.task import Loss
from softline.replacing.replace import replaced_attention, transformer_blocks
from softline.tasks.classification.task import Classification
from softline.tasks.linearization.recipe import DistillationRecipe


def relative_error(new: Tensor, old: Tensor) -> Tensor:
    """||new - old||² / ||old||² of each sample: [B, ...] -> [B]."""
    new, old = new.float().flatten(1), old.float().flatten(1)
    return (new - old).square().sum(1) / old.square().sum(1).clamp(min=torch.finfo(torch.float32).tiny)


def divergence(new: Tensor, old: Tensor, temperature: float = 1.0) -> Tensor:
    """Kullback-Leibler divergence of probabilities, old from new, for each sample: logits [B, classes] -> [B]."""
    new, old = (F.log_softmax(logits.float() / temperature, dim=1) for logits in (new, old))
    return temperature**2 * F.kl_div(new, old, reduction="none", log_target=True).sum(1)


class Explained(Metric):
    """1 - the mean over layers and images of the relative error."""

    total: Tensor
    count: Tensor

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(layers, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, errors: Tensor) -> None:
        """Count the errors [layers, B] of a batch."""
        self.total += errors.double().sum(1)
        self.count += errors.shape[1]

    def compute(self) -> Tensor:
        return 1 - (self.total / self.count).mean()

    def errors(self) -> Tensor:
        """Return the mean error of each layer over the images of all processes; all must call it."""
        with self.sync_context():
            return self.total / self.count


@dataclass(eq=False)
class Linearization(Classification):
    """What both stages have in common: the teacher, which is not trained, and labels that may be missing."""

    _: KW_ONLY
    teacher: nn.Module
    labelled: bool = True

    def __post_init__(self) -> None:
        self.teacher.requires_grad_(False).eval()

    def images(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the images of a training batch, mixed if the recipe says so, and their labels."""
        images, labels = batch
        if self.mixup is not None:
            images, labels = self.mixed(images, labels)
        return images.contiguous(memory_format=self.layout), labels

    def follow(self, images: Tensor) -> Tensor:
        """Return the teacher's logits."""
        # it is not part of the model that the engine moves
        self.teacher.to(images.device)
        with torch.no_grad():
            logits: Tensor = self.teacher(images)
        return logits.float()


class Transfer(Linearization):
    """Each new attention learns to return what the old one does.

    The network computes what the teacher does: the output of each new attention is compared with that of the old one,
    which then takes its place. So no attention sees the errors of those before it, and all are trained at once without
    a gradient passing from one to another.
    """

    monitor = "explained"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.errors: dict[str, Tensor] = {}
        """Relative error [B] of each new attention in the last batch."""
        self.new = replaced_attention(self.model)
        self.model.requires_grad_(False)
        for name, module in self.new.items():
            module.requires_grad_(True)
            module.register_forward_hook(
                _Correction(self.errors, name, self.teacher.get_submodule(name)), with_kwargs=True
            )

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        images, _ = self.images(batch)
        errors = {name: error.mean() for name, error in self._compare(model, images).items()}
        value = torch.stack(list(errors.values())).mean()
        return Loss(value, {f"errors/{name}": error.detach() for name, error in errors.items()})

    def metrics(self) -> MetricCollection:
        return MetricCollection({"explained": Explained(len(self.new))})

    def update(self, metrics: MetricCollection, model: nn.Module, batch: list[Tensor], valid: int) -> None:
        images, _ = batch
        errors = self._compare(model, images.contiguous(memory_format=self.layout))
        metrics["explained"].update(torch.stack([errors[name][:valid] for name in self.new]))

    def details(self, metrics: MetricCollection) -> dict[str, Any]:
        explained = metrics["explained"]
        assert isinstance(explained, Explained), "it is the one above"
        return {"errors": dict(zip(self.new, explained.errors().tolist(), strict=True))}

    def _compare(self, model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        self.teacher.to(images.device)
        self.errors.clear()
        # nothing but the new attention is in training, such as a dropout of blocks
        training = model.training
        model.eval()
        for module in self.new.values():
            module.train(training)
        model(images)
        model.train(training)
        return dict(self.errors)


class _Correction:
    """A forward hook that compares a new attention with the old one, whose output it returns instead."""

    def __init__(self, errors: dict[str, Tensor], name: str, old: nn.Module) -> None:
        self.errors, self.name, self.old = errors, name, old

    def __call__(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], new: Tensor) -> Any:
        with torch.no_grad():
            old = self.old(*args, **kwargs)
        self.errors[self.name] = relative_error(new, old)
        return old

    def __deepcopy__(self, memo: Any) -> Self:
        # an average of the weights is compared with the same teacher
        return self


@dataclass(eq=False)
class FineTuning(Linearization):
    """The whole network learns from the teacher's logits, from what its blocks return, and from labels."""

    _: KW_ONLY
    terms: DistillationRecipe = field(default_factory=DistillationRecipe)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.monitor = "top1" if self.labelled else "agreement"
        self.blocks: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        """What the blocks of the model and of the teacher have returned for the last batch."""
        if self.terms.features:
            for network, outputs in zip((self.model, self.teacher), self.blocks, strict=True):
                for name, block in transformer_blocks(network).items():
                    block.register_forward_hook(_Recorder(outputs, name))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        images, labels = self.images(batch)
        logits, theirs = model(images).float(), self.follow(images)
        parts: dict[str, Tensor] = {}
        if self.terms.labels:
            smoothing = 0.0 if self.mixup is not None else self.smoothing
            parts["labels"] = F.cross_entropy(logits, labels, label_smoothing=smoothing)
        if self.terms.logits:
            parts["logits"] = divergence(logits, theirs, self.terms.temperature).mean()
        if self.terms.features:
            mine, others = self.blocks
            parts["features"] = torch.stack([relative_error(mine[name], others[name]).mean() for name in mine]).mean()
        value = sum((getattr(self.terms, name) * part for name, part in parts.items()), logits.new_zeros(()))
        agreement = (logits.argmax(1) == theirs.argmax(1)).float().mean()
        return Loss(value, {**{name: part.detach() for name, part in parts.items()}, "agreement": agreement})

    def metrics(self) -> MetricCollection:
        own = MetricCollection({"agreement": MeanMetric(), "divergence_loss": MeanMetric()}, compute_groups=False)
        if self.labelled:
            own.add_metrics(dict(super().metrics().items()))
        return own

    def update(self, metrics: MetricCollection, model: nn.Module, batch: list[Tensor], valid: int) -> None:
        images, labels = batch[0].contiguous(memory_format=self.layout), batch[1]
        logits, theirs = model(images).float()[:valid], self.follow(images)[:valid]
        if valid:
            metrics["agreement"].update((logits.argmax(1) == theirs.argmax(1)).float())
            metrics["divergence_loss"].update(divergence(logits, theirs))
            if self.labelled:
                self.count(metrics, logits, labels[:valid])


class _Recorder:
    """A forward hook that keeps what a block returns."""

    def __init__(self, outputs: dict[str, Tensor], name: str) -> None:
        self.outputs, self.name = outputs, name

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.outputs[self.name] = output

    def __deepcopy__(self, memo: Any) -> Self:
        return self
