"""Figures of measurements; needs matplotlib (extra ``train``)."""

from collections.abc import Sequence
from pathlib import Path

from softline.bench.scaling import ScalingRow, growth_exponent

COLORS = {"softmax": "#8c8c8c", "softpp": "#0b6e99", "inline": "#d9622b"}
LABELS = {"softmax": "softmax", "softpp": "SOFT++", "inline": "InLine"}


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
