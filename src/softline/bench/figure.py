"""Figures of measurements; needs matplotlib (extra ``train``)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from softline.bench.cases import MATH
from softline.bench.growth import growths
from softline.bench.measure import Row

if TYPE_CHECKING:
    from softline.bench.compare import Comparison
    from softline.bench.compare import Row as VariantRow

COLORS = {"softmax": "#8c8c8c", "softpp": "#0b6e99", "inline": "#d9622b"}
LABELS = {
    "softmax": "softmax",
    MATH: "softmax (math)",
    "gaussian": "Gaussian",
    "linear": "linear",
    "reformer": "Reformer",
    "efficient": "Efficient",
    "hydra": "Hydra",
    "focused": "FLatten",
    "soft": "SOFT",
    "softpp": "SOFT++",
    "inline": "InLine",
    "linformer": "Linformer",
    "performer": "Performer",
    "nystrom": "Nyströmformer",
}
PALETTE = (
    *("#0b6e99", "#d9622b", "#3c8d5a", "#8d5fb0", "#b8952a", "#c2487a", "#4b4b4b", "#5fb3ce"),
    *("#8fae3c", "#8b5a3c", "#3f51a3", "#e39ac0", "#1fa88f", "#d0b090"),
)
MODES = {"infer": "inference", "train": "training step"}


def plot_costs(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Time, peak memory and share of the machine's peak against the number of tokens, a line of panels for each mode.

    The legend has the fitted exponents; a cross at the top is a size that failed.
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
    """Fig. 1b of the SOFT paper: peak memory against the number of tokens, on linear and on logarithmic axes."""
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
    """Axes to draw on, lines of panels with an empty one for the legend at the end; the file is written at last."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lines, columns = shape
    figure, axes = plt.subplots(
        lines,
        columns + 1,
        figsize=(4.3 * columns + 3.7, height * lines + 0.3),
        width_ratios=[*[4.3] * columns, 3.7],
        layout="constrained",
        squeeze=False,
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    for line in axes:
        line[-1].set_axis_off()
    yield axes
    figure.savefig(path, dpi=160)
    plt.close(figure)


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
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _cost_colors(rows: Sequence[Row]) -> dict[str, str]:
    names = list(dict.fromkeys(row.case for row in rows))
    colors = comparison_colors([name for name in names if name != MATH])
    # told from softmax by its dashes
    return {name: COLORS["softmax"] if name == MATH else colors[name] for name in names}


def _line_style(name: str) -> dict[str, Any]:
    return {"linestyle": "--" if name == MATH else "-", "linewidth": 2, "marker": "o", "markersize": 4.5}


def _cost_legend(axis: Any, rows: Sequence[Row], colors: dict[str, str]) -> None:
    """The costliest at the largest size first, as the lines lie."""
    from matplotlib.lines import Line2D

    fits = {growth.case: growth for growth in growths(rows)}
    largest = {row.case: row.milliseconds or row.peak_bytes or 0 for row in sorted(rows, key=lambda row: row.tokens)}
    handles = []
    for name in sorted(largest, key=lambda name: -largest[name]):
        growth = fits.get(name)
        parts = [] if growth is None else [("time", growth.time), ("memory", growth.memory)]
        exponents = ", ".join(f"{what} $N^{{{fit.exponent:.2f}}}$" for what, fit in parts if fit is not None)
        failed = any(row.failure is not None for row in rows if row.case == name)
        # the exponents of a long name go to a line of their own
        gap = ": " if len(name) < 16 else "\n"
        text = _label(name) + (" (x: failed)" if failed else "") + (f"{gap}{exponents}" if exponents else "")
        handles.append(Line2D([], [], color=colors[name], label=text, **_line_style(name)))
    legend = axis.legend(handles=handles, frameon=False, loc="center left", bbox_to_anchor=(-0.05, 0.5), fontsize=9)
    # longer than the layout expects, with free space at its right
    legend.set_in_layout(False)


def plot_comparison(comparison: "Comparison", path: Path) -> None:
    """Learning curves with bands over the seeds, final accuracies, and accuracy against speed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [row.name for row in comparison.rows]
    colors = comparison_colors(names)
    height = max(3.9, 1.4 + 0.3 * len(names))
    figure, axes = plt.subplots(1, 3, figsize=(13.5, height), layout="constrained", width_ratios=(1.25, 1, 1))
    _plot_curves(axes[0], comparison.rows, colors)
    _plot_accuracies(axes[1], comparison.rows, colors)
    _plot_accuracy_by_speed(axes[2], comparison.rows, colors)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.set_axisbelow(True)
    seeds = "1 seed" if len(comparison.seeds) == 1 else f"{len(comparison.seeds)} seeds"
    reference = f"{comparison.reference} in miniature, " if comparison.reference else ""
    figure.suptitle(f"{comparison.title} ({reference}{seeds})", x=0.01, ha="left", fontsize=12)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def comparison_colors(names: Sequence[str]) -> dict[str, str]:
    """A colour for each variant; softmax, SOFT++ and InLine keep theirs in every figure, and no other has it."""
    free = [color for color in PALETTE if color not in COLORS.values()]
    others = [name for name in names if name not in COLORS]
    return {name: COLORS.get(name) or free[others.index(name) % len(free)] for name in names}


def _plot_curves(axis: Any, rows: "Sequence[VariantRow]", colors: dict[str, str]) -> None:
    for row in rows:
        # seeds are evaluated after the same epochs; one that diverged has fewer
        epochs = sorted({point.epoch for run in row.runs for point in run.curve})
        scores = [[100 * p.top1 for run in row.runs for p in run.curve if p.epoch == epoch] for epoch in epochs]
        middle = [sum(values) / len(values) for values in scores]
        axis.plot(epochs, middle, "o-", color=colors[row.name], linewidth=2, markersize=4, label=_label(row.name))
        if len(row.runs) > 1:
            low, high = [min(values) for values in scores], [max(values) for values in scores]
            axis.fill_between(epochs, low, high, color=colors[row.name], alpha=0.18, linewidth=0)
    if axis.get_xlim()[1] > 1:
        axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("epoch")
    axis.set_title("validation top-1 [%]", loc="left", fontsize=11)
    axis.legend(frameon=False, loc="lower right", fontsize=9)


def _plot_accuracies(axis: Any, rows: "Sequence[VariantRow]", colors: dict[str, str]) -> None:
    for place, row in enumerate(rows):
        color = colors[row.name]
        if row.mean is None:
            axis.text(0.03, place, "diverged", transform=axis.get_yaxis_transform(), va="center", color="#a33333")
            continue
        scores = [100 * score for score in row.top1 if score is not None]
        spread = 100 * row.spread if row.spread is not None else None
        axis.plot(scores, [place] * len(scores), "o", color=color, alpha=0.4, markersize=5, markeredgewidth=0)
        axis.errorbar(100 * row.mean, place, xerr=spread, fmt="D", color=color, capsize=4, markersize=7, linewidth=2)
        text = f"{100 * row.mean:.1f}" + ("" if spread is None else f" ± {spread:.1f}")
        lost = f" ({len(row.diverged)} diverged)" if row.diverged else ""
        axis.annotate(
            text + lost, (100 * row.mean, place), xytext=(0, 8), textcoords="offset points", ha="center", fontsize=9
        )
    axis.set_yticks(range(len(rows)), [_label(row.name) for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.7)
    axis.margins(x=0.15)
    axis.set_title("final top-1 [%]" + (", mean ± deviation" if len(rows[0].runs) > 1 else ""), loc="left", fontsize=11)


def _plot_accuracy_by_speed(axis: Any, rows: "Sequence[VariantRow]", colors: dict[str, str]) -> None:
    # named by the colours of the other panels: variants of one cost lie too close for names
    for row in rows:
        if row.mean is not None:
            axis.plot(row.cost.train_per_second, 100 * row.mean, "o", color=colors[row.name], markersize=10, alpha=0.9)
    axis.margins(x=0.12, y=0.12)
    axis.set_xlabel("images per second in training")
    axis.set_title("final top-1 [%] against speed", loc="left", fontsize=11)


def _label(name: str) -> str:
    return LABELS.get(name, name)
