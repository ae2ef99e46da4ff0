"""Time and memory of a model before and after its attention is replaced."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from softline.engine.recipe import ModelRecipe, ReplaceRecipe
from softline.measure.cases import ModelCase, Setting, Workload
from softline.measure.measuring import Row, measure
from softline.measure.memory import ProcessMeter, can_measure
from softline.tasks.networks import put_attention

ORIGINAL, LINEARIZED = "original", "linearized"


@dataclass(frozen=True)
class ReplacedCase(ModelCase):
    """A timm model with an attention of softline, on random square images."""

    replace: ReplaceRecipe | None = None

    def build(self, size: int, setting: Setting) -> Workload:
        workload = super().build(size, setting)
        if self.replace is not None and workload.module is not None:
            put_attention(workload.module, self.replace)
        return workload


def measure_cost(
    model: ModelRecipe,
    sizes: Sequence[int],
    *,
    num_classes: int,
    rounds: int = 3,
    limit: int | None = None,
    hear: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Measure the original and the linearised model in turns: one image, forward pass, on the CPU.

    model: with ``replace``.
    limit: most bytes of memory; what needs more is reported as a failure.
    """
    options = {**{key: value for key, value in model.options.items() if key != "img_size"}, "num_classes": num_classes}
    cases = [ReplacedCase(ORIGINAL, model.name, options), ReplacedCase(LINEARIZED, model.name, options, model.replace)]
    meter = ProcessMeter(limit, torch.get_num_threads()) if can_measure() else None
    groups = measure(cases, sizes, rounds=rounds, meter=meter, hear=hear)
    return [row for group in groups for row in group.rows]
