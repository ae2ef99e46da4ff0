"""The growth of cost with the number of tokens."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from softline.errors import UserError
from softline.measure.cases import Mode
from softline.measure.measuring import Row

# below this fraction of the largest size, cost is mostly overhead, which does not grow
FITTED_PART = 1 / 16


@dataclass(frozen=True)
class Fit:
    """A fit of cost ~ tokens^exponent between two numbers of tokens."""

    exponent: float
    first: int
    last: int


@dataclass(frozen=True)
class Step:
    """Factors between the costs at one size and at the next; None where one of them is unknown."""

    first: str
    last: str
    tokens: float
    time: float | None
    memory: float | None


@dataclass(frozen=True)
class Growth:
    """Growth of one case in one mode; None where fewer than two numbers of tokens were measured."""

    case: str
    mode: Mode
    time: Fit | None
    memory: Fit | None
    bytes_per_token: float | None
    """Slope of the peak memory, fitted by least squares over all sizes."""
    steps: tuple[Step, ...]


def growths(rows: Sequence[Row]) -> list[Growth]:
    """Fit the growth of every case and mode that was measured at more than one size."""
    keys = dict.fromkeys((row.case, row.mode) for row in rows)
    groups = {(case, mode): [row for row in rows if (row.case, row.mode) == (case, mode)] for case, mode in keys}
    return [_growth(case, mode, group) for (case, mode), group in groups.items() if len(group) > 1]


def _growth(case: str, mode: Mode, rows: Sequence[Row]) -> Growth:
    rows = sorted(rows, key=lambda row: row.tokens)
    measured = [(row.tokens, row.peak_bytes) for row in rows if row.peak_bytes is not None]
    time = _time_of(rows)
    return Growth(
        case,
        mode,
        time=_fit(rows, time),
        memory=_fit(rows, lambda row: row.peak_bytes),
        bytes_per_token=slope(*zip(*measured, strict=True)) if len(dict(measured)) > 1 else None,
        steps=tuple(_step(first, last, time) for first, last in pairwise(rows)),
    )


def _time_of(rows: Sequence[Row]) -> Callable[[Row], float | None]:
    """Return what gives a row's time: relative to the matrix product if all rows have that, else absolute."""
    timed = [row for row in rows if row.milliseconds is not None]
    if all(row.relative_time is not None for row in timed):
        return lambda row: row.relative_time
    return lambda row: row.milliseconds


def _fit(rows: Sequence[Row], cost: Callable[[Row], float | None]) -> Fit | None:
    """Fit over the sizes of at least 1/16 of the largest one measured, or over the two largest."""
    points = [(row.tokens, value) for row in rows if (value := cost(row))]
    large = [point for point in points if point[0] >= FITTED_PART * points[-1][0]]
    tokens, costs = zip(*(large if len(large) > 1 else points[-2:]), strict=True) if points else ((), ())
    if len(set(tokens)) < 2:
        return None
    return Fit(growth_exponent(tokens, costs), tokens[0], tokens[-1])


def _step(first: Row, last: Row, time: Callable[[Row], float | None]) -> Step:
    def ratio(before: float | None, after: float | None) -> float | None:
        return after / before if before and after else None

    return Step(
        first.label,
        last.label,
        last.tokens / first.tokens,
        ratio(time(first), time(last)),
        ratio(first.peak_bytes, last.peak_bytes),
    )


def growth_exponent(tokens: Sequence[int], costs: Sequence[float]) -> float:
    """Fit the p of cost ~ tokens^p by least squares on both logarithms: 1 is linear, 2 quadratic."""
    if len(set(tokens)) < 2:
        raise UserError(f"an exponent needs at least 2 different sizes, got {len(set(tokens))}")
    return slope([math.log(t) for t in tokens], [math.log(c) for c in costs])


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the least-squares line through the points; at least two x must differ."""
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - x_mean) ** 2 for a in x)
