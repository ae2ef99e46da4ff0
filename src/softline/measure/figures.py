"""Figures of measurements; needs matplotlib (extra ``train``)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from softline.measure.cases import MATH
from softline.measure.growth import growths
from softline.measure.measuring import Row
from softline.plotting.colors import COLORS, comparison_colors, label_of
from softline.plotting.figures import new_axes, tidy, write_figure

MODES = {"infer": "inference", "train": "training step"}


def plot_costs(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Plot time, peak memory and the share of the machine's peak against the number of tokens, a row for each mode.

    The legend shows the fitted exponents; a cross at the top marks a size that failed.
    """
    panels = [panel for panel in COST_PANELS if any(panel.value(row) for row in rows)] or [COST_PANELS[0]]
    modes = list(dict.fromkeys(row.mode for row in rows))
    shape = (len(modes), len(panels))
    colors = _cost_colors(rows)
    with _figure(path, shape, height=3.7, title=title) as axes:
        for (*line, margin), mode in zip(axes, modes, strict=True):
            mine = [row for row in rows if row.mode == mode]
            for axis, panel in zip(line, panels, strict=True):
                _plot_cost(axis, mine, panel, colors)
                axis.set_title(f"{MODES[mode]}: {panel.title}", loc="left", fontsize=11)
            _cost_legend(margin, mine, colors)


def plot_memory(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Plot Fig. 1b of the SOFT paper: peak memory against the number of tokens, on linear and on logarithmic axes."""
    (mode,) = dict.fromkeys(row.mode for row in rows)
    memory = COST_PANELS[1]
    colors = _cost_colors(rows)
    with _figure(path, (1, 2), height=4.6, title=title) as axes:
        *line, margin = axes[0]
        for axis, log in zip(line, (False, True), strict=True):
            _plot_cost(axis, rows, memory, colors, log=log)
            axis.set_title(f"{MODES[mode]}: {memory.title}" + (", log-log" if log else ""), loc="left", fontsize=11)
        _cost_legend(margin, rows, colors)


class Panel(NamedTuple):
    title: str
    value: Callable[[Row], float | None]
    log: bool = True


COST_PANELS = (
    Panel("time [ms]", lambda row: row.milliseconds),
    Panel("peak memory [MiB]", lambda row: None if row.peak_bytes is None else row.peak_bytes / 2**20),
    Panel("share of peak [%]", lambda row: None if row.share is None else 100 * row.share, False),
)


@contextmanager
def _figure(path: Path, shape: tuple[int, int], *, height: float, title: str) -> Iterator[Any]:
    """Provide rows of axes with an empty one for the legend at the end of each; write the file afterwards."""
    lines, columns = shape
    size = (4.3 * columns + 3.7, height * lines + 0.3)
    figure, axes = new_axes(lines, columns + 1, figsize=size, width_ratios=[*[4.3] * columns, 3.7])
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    for line in axes:
        line[-1].set_axis_off()
    yield axes
    write_figure(figure, path)


def _plot_cost(axis: Any, rows: Sequence[Row], panel: Panel, colors: dict[str, str], *, log: bool = True) -> None:
    from matplotlib.ticker import LogLocator

    for name, color in colors.items():
        mine = [row for row in rows if row.case == name]
        points = [(row.tokens, value) for row in mine if (value := panel.value(row))]
        axis.plot([x for x, _ in points], [y for _, y in points], color=color, **_line_style(name))
        failed = [row.tokens for row in mine if row.failure is not None]
        for tokens in failed:
            axis.plot(tokens, 0.98, "x", color=color, transform=axis.get_xaxis_transform(), markersize=8)
    sizes = dict(sorted((row.tokens, row.label.removesuffix(" tokens")) for row in rows))
    if log:
        axis.set_xscale("log")
    if log and panel.log:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.minorticks_off()
    axis.set_xticks(list(sizes), list(sizes.values()), **({"fontsize": 8} if len(sizes) > 5 else {}))
    axis.set_xlabel("tokens" if rows[0].label.endswith("tokens") else "image [pixels]")
    tidy(axis)


def _cost_colors(rows: Sequence[Row]) -> dict[str, str]:
    names = list(dict.fromkeys(row.case for row in rows))
    colors = comparison_colors([name for name in names if name != MATH])
    # it has the colour of softmax, and a dashed line
    return {name: COLORS["softmax"] if name == MATH else colors[name] for name in names}


def _line_style(name: str) -> dict[str, Any]:
    return {"linestyle": "--" if name == MATH else "-", "linewidth": 2, "marker": "o", "markersize": 4.5}


def _cost_legend(axis: Any, rows: Sequence[Row], colors: dict[str, str]) -> None:
    """List the cases in the order of their lines at the largest size, the costliest first."""
    from matplotlib.lines import Line2D

    fits = {growth.case: growth for growth in growths(rows)}
    largest = {row.case: row.milliseconds or row.peak_bytes or 0 for row in sorted(rows, key=lambda row: row.tokens)}
    handles = []
    for name in sorted(largest, key=lambda name: -largest[name]):
        growth = fits.get(name)
        parts = [] if growth is None else [("time", growth.time), ("memory", growth.memory)]
        exponents = ", ".join(f"{what} $N^{{{fit.exponent:.2f}}}$" for what, fit in parts if fit is not None)
        failed = any(row.failure is not None for row in rows if row.case == name)
        # after a long name, the exponents have a line of their own
        gap = ": " if len(name) < 16 else "\n"
        text = label_of(name) + (" (x: failed)" if failed else "") + (f"{gap}{exponents}" if exponents else "")
        handles.append(Line2D([], [], color=colors[name], label=text, **_line_style(name)))
    legend = axis.legend(handles=handles, frameon=False, loc="center left", bbox_to_anchor=(-0.05, 0.5), fontsize=9)
    # it may be wider than its column, as there is free space at its right
    legend.set_in_layout(False)
