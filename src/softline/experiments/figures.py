"""Figures of measurements; needs matplotlib (extra ``train``)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softline.experiments.compare import Comparison
    from softline.experiments.compare import Row as VariantRow
from softline.plotting.colors import comparison_colors, label_of


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


def _plot_curves(axis: Any, rows: "Sequence[VariantRow]", colors: dict[str, str]) -> None:
    for row in rows:
        # seeds are evaluated after the same epochs; one that diverged has fewer
        epochs = sorted({point.epoch for run in row.runs for point in run.curve})
        scores = [[100 * p.top1 for run in row.runs for p in run.curve if p.epoch == epoch] for epoch in epochs]
        middle = [sum(values) / len(values) for values in scores]
        axis.plot(epochs, middle, "o-", color=colors[row.name], linewidth=2, markersize=4, label=label_of(row.name))
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
    axis.set_yticks(range(len(rows)), [label_of(row.name) for row in rows])
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
