"""The result of models that give each sample one of their classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from PIL import Image
from torch import Tensor

from softline.checks import check_integer
from softline.engine.task import numbered
from softline.engine.trained import Result
from softline.errors import UserError
from softline.tasks.drawing import beside, draw_bars, enlarge

# smallest size of text in pixels; beside large images it grows with them
TEXT_SIZE = 14


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Probabilities(Result):
    """The probability of each class."""

    class_names: tuple[str, ...]
    """Names by label."""
    by_label: Tensor
    """Probabilities by label [K], float32; their sum is 1."""
    shown: int = 5
    """How many classes the text, the dictionary and the picture have, the most probable ones."""
    image: Image.Image | None = None
    """The image that was classified, if it was one."""
    name: str | None = None

    @cached_property
    def _order(self) -> list[int]:
        return self.by_label.argsort(descending=True, stable=True).tolist()

    @property
    def classes(self) -> list[str]:
        """Names of all classes, the most probable first."""
        return [self.class_names[label] for label in self._order]

    @property
    def probabilities(self) -> list[float]:
        """Probabilities in the order of `classes`."""
        return self.by_label[self._order].tolist()

    @property
    def label(self) -> str:
        """Name of the most probable class."""
        return self.class_names[self._order[0]]

    @property
    def probability(self) -> float:
        """Probability of the most probable class."""
        return float(self.by_label[self._order[0]])

    def top(self, k: int = 5) -> list[tuple[str, float]]:
        """Return name and probability of the ``k`` most probable classes, or of all if there are fewer."""
        check_integer("k", k, 1)
        return list(zip(self.classes[:k], self.probabilities[:k], strict=True))

    def __str__(self) -> str:
        rows = [(name.replace("\n", "\\n"), value) for name, value in self.top(self.shown)]
        return "\n".join(f"  {100 * value:5.1f} %  {name}" for name, value in rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the name and the most probable classes with their probabilities."""
        names, values = self.classes[: self.shown], self.probabilities[: self.shown]
        return {"name": self.name, "classes": names, "probabilities": values}

    def draw(self) -> Image.Image:
        """Draw bars of the most probable classes, beside the image if there is one; small images are enlarged."""
        rows = self.top(self.shown)
        if self.image is None:
            return draw_bars(rows, TEXT_SIZE)
        bars = draw_bars(rows, max(min(self.image.height // 28, self.image.width // 16), TEXT_SIZE))
        return beside(enlarge(self.image.convert("RGB"), bars.height), bars)


def class_probabilities(logits: Tensor) -> Tensor:
    """Return the probabilities [B, K] of logits [B, K], on the CPU in float32."""
    found = logits.float().cpu()
    if not found.isfinite().all():
        raise UserError("the model's logits are not finite numbers")
    return found.softmax(1)


def names_by_label(classes: Sequence[str], count: int) -> tuple[str, ...]:
    """Return the names of the classes, or their numbers if they have no names."""
    return tuple(classes) or numbered(count)
