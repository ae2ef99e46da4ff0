"""The recipe keys of linearization."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from softline.checks import check_range
from softline.errors import UserError
from softline.tasks.classification.recipe import ClassificationRecipe

Stage = Literal["transfer", "finetune"]


@dataclass(frozen=True, kw_only=True)
class DistillationRecipe:
    """What fine-tuning minimises: a sum of these terms, each times its weight."""

    labels: float = 0.0
    """Weight of the cross-entropy with the labels."""
    logits: float = 1.0
    """Weight of the Kullback-Leibler divergence from the teacher's probabilities."""
    features: float = 1.0
    """Weight of the relative error of what the blocks return."""
    temperature: float = 1.0
    """By which the logits of both are divided; the divergence is multiplied by its square."""


@dataclass(frozen=True, kw_only=True)
class LinearizationRecipe(ClassificationRecipe):
    """A classifier with another attention learns from the classifier that it was."""

    free_keys: ClassVar[frozenset[str]] = ClassificationRecipe.free_keys | {"teacher"}

    teacher: str
    """The classifier as it was: a checkpoint, a directory that timm saved, or the name of a published model."""
    teacher_digest: str | None = None
    """SHA-256 of the teacher's weights, if they have to be the same wherever its file lies; see `weights_digest`."""
    stage: Stage
    """transfer: each new attention learns to return what the old one does, given what the old one is given; everything
    else is frozen. finetune: the whole network learns from the teacher."""
    loss: DistillationRecipe = field(default_factory=DistillationRecipe)
    """Of finetune."""
    adapters: int | None = None
    """Rank of the changes (LoRA) that finetune makes to the projections of the new attention, whose other new parts it
    trains as they are; everything else is frozen. null trains all weights."""
    labelled: bool = True
    """Whether images lie in class folders. Otherwise data.source is a directory DIR/<split>/*.jpg, and only the
    agreement with the teacher can be measured."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.replace is None:
            raise UserError("model.replace.attention must name the new attention")
        terms = ("labels", "logits", "features")
        for name in terms:
            check_range(f"loss.{name}", getattr(self.loss, name), 0)
        if not any(getattr(self.loss, name) for name in terms):
            raise UserError("loss.labels, loss.logits or loss.features must be above 0: there is nothing to learn")
        check_range("loss.temperature", self.loss.temperature, 0, open_low=True)
        if self.loss.labels and not self.labelled:
            raise UserError(f"loss.labels must be 0 for images without labels, got {self.loss.labels:g}")
        if self.adapters is not None:
            check_range("adapters", self.adapters, 1)
            if self.stage == "transfer":
                raise UserError("adapters are for stage finetune: transfer trains the new attention as it is")
            if self.strategy == "fsdp":
                raise UserError("adapters cannot be trained with strategy fsdp: use ddp")
