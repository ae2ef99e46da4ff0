"""The measurements of ``softline bench`` as text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from softline.cli.table import Table, format_table, number

if TYPE_CHECKING:
    from softline.measure.growth import Fit, Growth, Step
    from softline.measure.measuring import Group, Row

MIB = 2**20


class CostTable:
    """A table of costs that is printed group by group, each with all cases at one size in one mode.

    names: names of all cases, which decide the width of their column.
    baseline: the case that speeds are compared with.
    """

    def __init__(self, names: Sequence[str], baseline: str) -> None:
        header = ["", "", "ms", "+-", f"vs {baseline}", "GMACs", "of peak", "peak MiB"]
        self.table = Table(header, widths=[max(map(len, names)), 5, 9, 6, 8, 8, 7, 9], left=2)

    def head(self) -> str:
        return f"  {self.table.head}"

    def group(self, group: "Group") -> str:
        first = group.rows[0]
        size = first.label if first.label.endswith("tokens") else f"{first.label}, {first.tokens:,} tokens"
        peak = "" if group.peak_gflops is None else f"; the matrix product reaches {group.peak_gflops:.3g} GFLOP/s"
        return "\n".join([f"{size}{peak}", *(f"  {self._row(row)}" for row in group.rows)])

    def _row(self, row: "Row") -> str:
        if row.failure is not None:
            return f"{self.table.line([row.case, row.mode])}  {row.failure}"
        return self.table.line(
            [
                row.case,
                row.mode,
                number(row.milliseconds, ",.2f"),
                number(row.spread, ",.2f"),
                number(row.speedup, ",.2f", "x"),
                number(row.macs, ",.3f", unit=1e9),
                number(row.share, ".0%"),
                number(row.peak_bytes, ",.1f", unit=MIB),
            ]
        )


def growth_text(growths: "Sequence[Growth]") -> str:
    """Format the fitted exponents and the factors between sizes; nothing for a single size."""
    if not growths:
        return ""
    header = ["", "", "time p", "memory p", *(_step_name(step) for step in growths[0].steps)]
    rows = [
        [growth.case, growth.mode, _power(growth.time), _power(growth.memory), *map(_step_cell, growth.steps)]
        for growth in growths
    ]
    return "\n".join(
        [
            "cost grows as tokens^p (1 linear, 2 quadratic), fitted from a sixteenth of the largest size on; time is",
            "measured in matrix products of the same rounds. The last columns are factors of time / memory:",
            format_table(header, rows, left=2),
        ]
    )


def _power(fit: "Fit | None") -> str:
    return number(None if fit is None else fit.exponent, ".2f")


def _step_name(step: "Step") -> str:
    first, last = step.first.removesuffix(" tokens"), step.last.removesuffix(" tokens")
    return f"{first} -> {last} ({step.tokens:.3g}x)"


def _step_cell(step: "Step") -> str:
    return f"{number(step.time, '.2f', 'x')} / {number(step.memory, '.2f', 'x')}"


def memory_table(rows: "Sequence[Row]", growths: "Sequence[Growth]") -> str:
    """Format the MiB of each attention at each number of tokens, with slopes and exponents."""
    tokens = sorted({row.tokens for row in rows})
    cells = {(row.case, row.tokens): row for row in rows}
    fits = {growth.case: growth for growth in growths}
    lines = []
    for name in dict.fromkeys(row.case for row in rows):
        growth = fits.get(name)
        slope = number(None if growth is None else growth.bytes_per_token, ",.1f", unit=MIB / 1000)
        power = _power(None if growth is None else growth.memory)
        lines.append([name, *(_memory_cell(cells.get((name, count))) for count in tokens), slope, power])
    header = ["peak MiB", *(f"{count:,}" for count in tokens), "MiB/1000", "p"]
    parts = [format_table(header, lines)]
    slopes = {growth.case: growth.bytes_per_token for growth in growths if growth.bytes_per_token is not None}
    if len(slopes) > 1:
        order = sorted(slopes, key=lambda name: slopes[name])
        listed = ", ".join(f"{name} {1000 * slopes[name] / MIB:,.1f}" for name in order[:3])
        parts += ["", f"smallest slopes [MiB per 1,000 tokens]: {listed}"]
    failures = [f"{row.case} at {row.label}: {row.failure}" for row in rows if row.failure is not None]
    return "\n".join([*parts, *failures])


def _memory_cell(row: "Row | None") -> str:
    if row is None:
        return ""
    return "failed" if row.failure is not None else number(row.peak_bytes, ",.0f", unit=MIB)
