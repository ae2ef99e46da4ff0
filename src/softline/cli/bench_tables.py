"""The measurements of ``softline bench`` as text."""

from collections.abc import Sequence
from dataclasses import dataclass

from softline.measure.growth import Fit, Growth, Step
from softline.measure.measuring import Group, Row

MIB = 2**20


@dataclass(frozen=True)
class CostTable:
    """Of groups of rows, one size and mode each; columns are as wide as the longest name of a case needs.

    names: of all cases.
    baseline: the case that speeds are compared with.
    """

    names: Sequence[str]
    baseline: str

    def head(self) -> str:
        ratio = "vs " + self.baseline
        columns = f"{'ms':>10}{'+-':>8}  {ratio:>{self._ratio}}{'GMACs':>10}{'of peak':>9}{'peak MiB':>11}"
        return f"  {'':<{self._name}}{'':<7}{columns}"

    def group(self, group: Group) -> str:
        first = group.rows[0]
        size = first.label if first.label.endswith("tokens") else f"{first.label}, {first.tokens:,} tokens"
        peak = "" if group.peak_gflops is None else f"; the matrix product reaches {group.peak_gflops:.3g} GFLOP/s"
        return "\n".join([f"{size}{peak}", *(self.row(row) for row in group.rows)])

    def row(self, row: Row) -> str:
        name = f"  {row.case:<{self._name}}{row.mode:<7}"
        if row.failure is not None:
            return f"{name}  {row.failure}"
        return (
            f"{name}{number(row.milliseconds, ',.2f'):>10}{number(row.spread, ',.2f'):>8}"
            f"  {number(row.speedup, ',.2f', 'x'):>{self._ratio}}{number(row.macs, ',.3f', unit=1e9):>10}"
            f"{number(row.share, '.0%'):>9}{number(row.peak_bytes, ',.1f', unit=MIB):>11}"
        )

    @property
    def _name(self) -> int:
        return max(len(name) for name in self.names) + 2

    @property
    def _ratio(self) -> int:
        return max(len(self.baseline) + 3, 8)


def number(value: float | None, form: str, suffix: str = "", *, unit: float = 1) -> str:
    """A dash for what was not measured."""
    return "-" if value is None else f"{value / unit:{form}}{suffix}"


def growth_text(growths: Sequence[Growth]) -> str:
    """Fitted exponents, and what each step to the next size multiplies; nothing for a single size."""
    if not growths:
        return ""
    width = max(len(growth.case) for growth in growths) + 2
    steps = [_step_name(step) for step in growths[0].steps]
    lines = [
        "cost grows as tokens^p (1 linear, 2 quadratic), fitted from a sixteenth of the largest size on; time counts",
        "in matrix products of the same rounds. Steps between sizes multiply time / memory by:",
        f"  {'':<{width}}{'':<7}{'time p':>8}{'memory p':>10}" + "".join(f"   {name:>17}" for name in steps),
    ]
    for growth in growths:
        cells = [f"{_step_cell(step):>{max(len(name), 17)}}" for step, name in zip(growth.steps, steps, strict=True)]
        powers = f"{_power(growth.time):>8}{_power(growth.memory):>10}"
        lines.append(f"  {growth.case:<{width}}{growth.mode:<7}{powers}" + "".join(f"   {cell}" for cell in cells))
    return "\n".join(lines)


def _power(fit: Fit | None) -> str:
    return "-" if fit is None else f"{fit.exponent:.2f}"


def _step_name(step: Step) -> str:
    first, last = step.first.removesuffix(" tokens"), step.last.removesuffix(" tokens")
    return f"{first} -> {last} ({step.tokens:.3g}x)"


def _step_cell(step: Step) -> str:
    return f"{number(step.time, '.2f', 'x')} / {number(step.memory, '.2f', 'x')}"


def memory_table(rows: Sequence[Row], growths: Sequence[Growth]) -> str:
    """MiB of each attention at each number of tokens, with slopes and exponents."""
    tokens = sorted({row.tokens for row in rows})
    cells = {(row.case, row.tokens): row for row in rows}
    names = list(dict.fromkeys(row.case for row in rows))
    fits = {growth.case: growth for growth in growths}
    width = max(len(name) for name in names) + 2
    lines = [f"{'peak MiB':<{width}}" + "".join(f"{count:>9,}" for count in tokens) + f"{'MiB/1000':>11}{'p':>7}"]
    for name in names:
        values = "".join(f"{_cell(cells.get((name, count))):>9}" for count in tokens)
        growth = fits.get(name)
        slope = number(None if growth is None else growth.bytes_per_token, ",.1f", unit=MIB / 1000)
        power = "-" if growth is None else _power(growth.memory)
        lines.append(f"{name:<{width}}{values}{slope:>11}{power:>7}")
    failures = [f"{row.case} at {row.label}: {row.failure}" for row in rows if row.failure is not None]
    slopes = {growth.case: growth.bytes_per_token for growth in growths if growth.bytes_per_token is not None}
    if len(slopes) > 1:
        order = sorted(slopes, key=lambda name: slopes[name])
        listed = ", ".join(f"{name} {1000 * slopes[name] / MIB:,.1f}" for name in order[:3])
        lines += ["", f"smallest slopes [MiB per 1,000 tokens]: {listed}"]
    return "\n".join([*lines, *failures])


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return "failed" if row.failure is not None else number(row.peak_bytes, ",.0f", unit=MIB)
