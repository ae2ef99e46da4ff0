"""The figure of a comparison; needs matplotlib (extra ``train``)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from softline.experiments.compare import Comparison, VariantResult, metric_label
from softline.plotting.colors import comparison_colors, label_of
from softline.plotting.figures import new_axes, tidy, write_figure


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Draw learning curves with bands over the seeds, final scores, and scores against speed."""
    names = [row.name for row in comparison.rows]
    colors = comparison_colors(names)
    height = max(3.9, 1.4 + 0.3 * len(names))
    figure, axes = new_axes(1, 3, figsize=(13.5, height), width_ratios=(1.25, 1, 1))
    metric = metric_label(comparison.metric)
    curves, scores, speeds = axes[0]
    _plot_curves(curves, comparison.rows, colors)
    curves.set_title(f"validation {metric} [%]", loc="left", fontsize=11)
    _plot_scores(scores, comparison.rows, colors)
    spread = ", mean ± deviation" if len(comparison.seeds) > 1 else ""
    scores.set_title(f"final {metric} [%]{spread}", loc="left", fontsize=11)
    _plot_score_by_speed(speeds, comparison.rows, colors)
    speeds.set_xlabel(f"{comparison.unit} per second in training")
    speeds.set_title(f"final {metric} [%] against speed", loc="left", fontsize=11)
    for axis in axes[0]:
        tidy(axis)
    seeds = "1 seed" if len(comparison.seeds) == 1 else f"{len(comparison.seeds)} seeds"
    reference = f"{comparison.reference}, " if comparison.reference else ""
    figure.suptitle(f"{comparison.title} ({reference}{seeds})", x=0.01, ha="left", fontsize=12)
    write_figure(figure, path)


def _plot_curves(axis: Any, rows: Sequence[VariantResult], colors: dict[str, str]) -> None:
    for row in rows:
        # seeds are evaluated after the same epochs; one that diverged has fewer
        epochs = sorted({point.epoch for run in row.runs for point in run.curve})
        scores = [[100 * p.score for run in row.runs for p in run.curve if p.epoch == epoch] for epoch in epochs]
        middle = [sum(values) / len(values) for values in scores]
        axis.plot(epochs, middle, "o-", color=colors[row.name], linewidth=2, markersize=4, label=label_of(row.name))
        if len(row.runs) > 1:
            low, high = [min(values) for values in scores], [max(values) for values in scores]
            axis.fill_between(epochs, low, high, color=colors[row.name], alpha=0.18, linewidth=0)
    if axis.get_xlim()[1] > 1:
        axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("epoch")
    axis.legend(frameon=False, loc="lower right", fontsize=9)


def _plot_scores(axis: Any, rows: Sequence[VariantResult], colors: dict[str, str]) -> None:
    for place, row in enumerate(rows):
        color = colors[row.name]
        if row.mean is None:
            axis.text(0.03, place, "diverged", transform=axis.get_yaxis_transform(), va="center", color="#a33333")
            continue
        scores = [100 * score for score in row.scores if score is not None]
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


def _plot_score_by_speed(axis: Any, rows: Sequence[VariantResult], colors: dict[str, str]) -> None:
    # no names: variants of equal cost lie too close together, and the other panels name the colours
    for row in rows:
        if row.mean is not None:
            axis.plot(row.cost.train_per_second, 100 * row.mean, "o", color=colors[row.name], markersize=10, alpha=0.9)
    axis.margins(x=0.12, y=0.12)
