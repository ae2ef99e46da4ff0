"""How the cost of one attention layer grows with the number of tokens: multiply-adds and peak memory, counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from softline.errors import UserError
from softline.measure.cases import LayerCase, Setting, check_attentions, prepare
from softline.measure.counting import count_macs, peak_bytes
from softline.measure.growth import growth_exponent
from softline.plotting.colors import comparison_colors, label_of
from softline.plotting.figures import log_ticks, new_axes, tidy

PANELS: tuple[tuple[str, str, float], ...] = (
    ("macs", "multiply-adds [millions]", 1e6),
    ("peak_bytes", "peak memory [MiB]", 2**20),
)


@dataclass(frozen=True)
class LayerCost:
    """The cost of a forward pass of one attention layer."""

    attention: str
    tokens: int
    macs: int
    peak_bytes: int
    """Largest number of bytes that tensors take at once, beyond weights and input."""


def layer_costs(
    attentions: Sequence[str],
    sides: Sequence[int],
    *,
    dim: int = 64,
    num_heads: int = 2,
) -> list[LayerCost]:
    """Count the cost of each attention, projections included, on square grids of ``sides`` x ``sides`` tokens."""
    check_attentions(attentions)
    if not attentions or not sides:
        raise UserError("name at least one attention and one grid")
    costs = []
    for name in dict.fromkeys(attentions):
        case = LayerCase(name, dim=dim, num_heads=num_heads, patch_size=1)
        for side in sorted(set(sides)):
            run = prepare(case, side, "infer", Setting()).eager
            run()
            costs.append(LayerCost(name, case.tokens(side), count_macs(run), peak_bytes(run)))
    return costs


def cost_exponents(costs: Sequence[LayerCost]) -> dict[str, dict[str, float | None]]:
    """The exponents p of cost ~ N^p for multiply-adds and memory, by attention."""
    return {
        name: {
            key: _exponent([(one.tokens, getattr(one, key)) for one in costs if one.attention == name])
            for key, _, _ in PANELS
        }
        for name in dict.fromkeys(one.attention for one in costs)
    }


def _exponent(points: Sequence[tuple[int, int]]) -> float | None:
    """The exponent between the two largest sizes: small ones are mostly projections."""
    if len(points) < 2:
        return None
    return growth_exponent(*zip(*sorted(points)[-2:], strict=True))


def plot_layer_costs(costs: Sequence[LayerCost]) -> Any:
    """Draw both costs on logarithmic axes; the legend names the exponents."""
    exponents = cost_exponents(costs)
    colors = comparison_colors(list(exponents))
    figure, axes = new_axes(1, 2, figsize=(13, 4.8))
    for axis, (key, title, unit) in zip(axes[0], PANELS, strict=True):
        largest = {name: max(getattr(one, key) for one in costs if one.attention == name) for name in exponents}
        for name in sorted(exponents, key=lambda name: -largest[name]):
            mine = [one for one in costs if one.attention == name]
            power = exponents[name][key]
            label = label_of(name) + ("" if power is None else f": $N^{{{power:.2f}}}$")
            points = [(one.tokens, getattr(one, key) / unit) for one in mine]
            axis.plot(*zip(*points, strict=True), "o-", color=colors[name], linewidth=2, markersize=4.5, label=label)
        log_ticks(axis, sorted({one.tokens for one in costs}))
        tidy(axis)
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.set_xlabel("tokens N")
        axis.set_title(title, loc="left", fontsize=11)
        axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
