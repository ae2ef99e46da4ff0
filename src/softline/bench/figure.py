"""Figures of measurements; needs matplotlib (extra ``train``)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softline.bench.scaling import ScalingRow, growth_exponent

if TYPE_CHECKING:
    from softline.bench.compare import Comparison, Row

COLORS = {"softmax": "#8c8c8c", "softpp": "#0b6e99", "inline": "#d9622b"}
LABELS = {
    "softmax": "softmax",
    "soft": "SOFT",
    "softpp": "SOFT++",
    "inline": "InLine",
    "linformer": "Linformer",
    "performer": "Performer",
    "nystrom": "Nyströmformer",
}
PALETTE = ("#0b6e99", "#d9622b", "#3c8d5a", "#8d5fb0", "#b8952a", "#c2487a", "#4b4b4b", "#5fb3ce")


def plot_scaling(rows: Sequence[ScalingRow], path: Path) -> None:
    """Time and multiply-adds against the number of tokens, log-log, with fitted exponents."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.9), layout="constrained")
    for axis, title, cost, unit in (
        (axes[0], "time for one layer [ms]", "milliseconds", 1),
        (axes[1], "multiply-adds [G]", "macs", 1e9),
    ):
        for name in dict.fromkeys(row.attention for row in rows):
            mine = [row for row in rows if row.attention == name]
            tokens, costs = [row.tokens for row in mine], [getattr(row, cost) / unit for row in mine]
            label = LABELS.get(name, name)
            if len(mine) > 1:
                # the small sizes are all overhead: the last three tell how it grows
                label += f"  ~ N$^{{{growth_exponent(tokens[-3:], costs[-3:]):.2f}}}$"
            axis.loglog(tokens, costs, "o-", color=COLORS.get(name), label=label, linewidth=2, markersize=5)
        sizes = sorted({(row.tokens, row.image_size) for row in rows})
        axis.set_xticks([t for t, _ in sizes], [f"{s}²" for _, s in sizes])
        axis.minorticks_off()
        axis.set_xlabel("image size [pixels]")
        axis.set_title(title, loc="left", fontsize=11)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=160)
    plt.close(figure)


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
    """A colour for each variant; attentions keep theirs in every figure."""
    free = [color for color in PALETTE if color not in {COLORS.get(name) for name in names}]
    others = [name for name in names if name not in COLORS]
    return {name: COLORS.get(name) or free[others.index(name) % len(free)] for name in names}


def _plot_curves(axis: Any, rows: "Sequence[Row]", colors: dict[str, str]) -> None:
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


def _plot_accuracies(axis: Any, rows: "Sequence[Row]", colors: dict[str, str]) -> None:
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


def _plot_accuracy_by_speed(axis: Any, rows: "Sequence[Row]", colors: dict[str, str]) -> None:
    # named by the colours of the other panels: variants of one cost lie too close for names
    for row in rows:
        if row.mean is not None:
            axis.plot(row.cost.train_per_second, 100 * row.mean, "o", color=colors[row.name], markersize=10, alpha=0.9)
    axis.margins(x=0.12, y=0.12)
    axis.set_xlabel("images per second in training")
    axis.set_title("final top-1 [%] against speed", loc="left", fontsize=11)


def _label(name: str) -> str:
    return LABELS.get(name, name)
