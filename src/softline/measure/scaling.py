"""The cost of one attention layer on growing images, for the report of the quick start."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from softline.errors import UserError
from softline.measure.cases import Case, LayerCase, Mode, Setting, prepare
from softline.measure.counting import peak_bytes
from softline.measure.measuring import Row, measure
from softline.measure.memory import Memory


@dataclass(frozen=True)
class ScalingRow:
    """Cost of one attention layer at one image size: a forward pass with batch size 1."""

    image_size: int
    tokens: int
    attention: str
    milliseconds: float
    macs: int
    peak_bytes: int
    """Counted bytes of tensors: a layer on a small image takes too little to measure it in a process."""


def measure_scaling(
    attentions: Sequence[str], image_sizes: Sequence[int], *, rounds: int = 3
) -> Iterator[list[ScalingRow]]:
    """Measure each attention layer on square images; yield one list of rows for each image size, smallest first."""
    cases = [LayerCase(name) for name in attentions]
    for group in measure(cases, image_sizes, rounds=rounds, meter=_count_tensors):
        yield [_scaling_row(row) for row in group.rows]


def _count_tensors(case: Case, size: int, mode: Mode, setting: Setting) -> Memory:
    return Memory(peak_bytes(prepare(case, size, mode, setting).eager), None)


def _scaling_row(row: Row) -> ScalingRow:
    if row.milliseconds is None or row.macs is None or row.peak_bytes is None:
        raise UserError(f"{row.case} at {row.label}: {row.failure}")
    return ScalingRow(row.size, row.tokens, row.case, row.milliseconds, row.macs, row.peak_bytes)
