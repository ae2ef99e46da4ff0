"""How local attention is: Fig. 3 and Table 2 of the InLine paper.

The local mass of a query is the share of its weights on the 3 x 3 tokens around it, itself included: the sum of |w|
there divided by the sum of all |w|. The local sum is the paper's "sum of attention scores": the sum of w there, where
the negative weights of InLine are subtracted. For softmax both are the same. Queries are the tokens of the grid. Chance
is the local mass of even weights, averaged over the same queries; the paper's chance is 9 / N, as if the windows at the
edges had all of their tokens.

Table 2 hides keys from every query: the tokens of a window around it, or the same number of tokens of the grid at
random. The remaining weights are normalised as the attention normalises its own: InLine by subtraction, attentions that
divide a row by its sum by division, the others not at all.

Layers that attend inside windows or strips are left out: most of what they see is near.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from softline.analysis.subjects import Picture, Subject, source_pictures
from softline.attention.hooks import AttentionCall, replace_weights
from softline.attention.multihead import MultiHeadAttention
from softline.backbones.inspection import Layer, LayerInput
from softline.data.images import ImageSource
from softline.errors import UserError
from softline.layers.grid import GridSize
from softline.ops.inputs import divide
from softline.plotting.colors import comparison_colors
from softline.plotting.figures import new_axes, tidy

DIVIDED = ("softmax", "linear", "performer", "reformer", "focused")
"""Attentions whose rows sum to 1 because they are divided by their sum."""
SIDE = 3
WEIGHTS_BYTES = 2**28
"""Memory for the explicit weights of a layer whose keys are hidden; it decides the batch size."""
MOST_WEIGHTS_BYTES = 2**31
"""Largest size of these weights for a single image."""


@dataclass(frozen=True)
class LayerMass:
    """The local mass of a layer, averaged over queries, heads and images."""

    layer: str
    operator: str
    grid_size: GridSize
    mass: float
    chance: float
    sum: float
    """The local sum, in which negative weights count as such."""
    whole_window: float
    """The tokens of a whole window divided by all tokens: 9 / N, the chance that the paper draws."""


def local_masses(
    subject: Subject, pictures: Sequence[Picture], *, size: int | None = None, side: int = SIDE
) -> list[LayerMass]:
    """Measure every layer that sees a grid larger than the window of ``side`` x ``side`` tokens."""
    found: dict[int, list[Tensor]] = {}
    given: dict[int, LayerInput] = {}
    for picture in pictures:
        seen, _ = subject.look(subject.prepare(picture.image, size)[None])
        for place, one in enumerate(seen):
            if one.sees_all and is_larger(one.grid_size, side):
                share, total = _local_weights(one, side)
                found.setdefault(place, []).append(torch.stack([share.mean(), total.mean()]))
                given[place] = one
    if not found:
        raise UserError(
            f"{subject.name} has no layer that sees a grid of more than {side} x {side} tokens; try larger images"
        )
    masses = []
    for place, one in given.items():
        mass, summed = torch.stack(found[place]).mean(0).tolist()
        layer, even = one.layer, chance(one, side=side)
        masses.append(LayerMass(layer.name, layer.operator, one.grid_size, mass, even, summed, side**2 / one.tokens))
    return masses


def is_larger(grid_size: GridSize, side: int) -> bool:
    """Whether no window of ``side`` x ``side`` tokens covers the grid."""
    return max(grid_size) > side


def local_mass(given: LayerInput, *, side: int = SIDE) -> Tensor:
    """The share of the weights on the window around the query, averaged over the queries of the grid: [B, heads]."""
    return _local_weights(given, side)[0]


def local_sum(given: LayerInput, *, side: int = SIDE) -> Tensor:
    """The sum of the weights on the window around the query, averaged over the queries of the grid: [B, heads]."""
    return _local_weights(given, side)[1]


@torch.no_grad()
def _local_weights(given: LayerInput, side: int) -> tuple[Tensor, Tensor]:
    """`local_mass` and `local_sum`."""
    prefix, shares, sums = given.layer.prefix, [], []
    near = _neighbours(given.grid_size, side, given.x.device)
    for tokens, rows in given.row_blocks():
        on_grid = tokens >= prefix
        weights = rows[:, :, on_grid].float()
        inside = weights[..., prefix:].mul(near(tokens[on_grid] - prefix))
        sums.append(inside.sum(-1))
        # blocks are large, and both are copies
        shares.append(divide(inside.abs_().sum(-1), weights.abs_().sum(-1)))
        del rows, weights, inside
    return torch.cat(shares, -1).mean(-1), torch.cat(sums, -1).mean(-1)


def chance(given: LayerInput, *, side: int = SIDE) -> float:
    """The local mass of even weights."""
    # the number of tokens in a window is its rows times its columns
    rows, columns = (_mean_width(length, side) for length in given.grid_size)
    return rows * columns / given.tokens


def _mean_width(length: int, side: int) -> float:
    """The mean width of the windows around the tokens of an axis, which are cut off at its ends."""
    half = side // 2
    return sum(min(place + half, length - 1) - max(place - half, 0) + 1 for place in range(length)) / length


def _neighbours(grid_size: GridSize, side: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function from tokens [R] to the tokens of the grid in the windows around them: bool [R, height * width]."""
    if side < 1 or side % 2 == 0:
        raise UserError(f"the side of a window must be odd, got {side}")
    rows, columns = (torch.arange(length, device=device) for length in grid_size)

    def near(tokens: Tensor) -> Tensor:
        row, column = tokens[:, None] // grid_size[1], tokens[:, None] % grid_size[1]
        in_rows, in_columns = (row - rows).abs() <= side // 2, (column - columns).abs() <= side // 2
        return (in_rows[:, :, None] & in_columns[:, None, :]).flatten(1)

    return near


# Table 2


@dataclass(frozen=True)
class MaskedAccuracy:
    """Accuracy with some keys hidden in some layers."""

    keys: str
    """The keys that are hidden."""
    top1: float
    """Accuracy from 0 to 1."""
    layers: list[str]
    """The layers where they are hidden: those whose grid is larger than the window."""


def masked_accuracies(
    subject: Subject,
    source: ImageSource,
    *,
    count: int = 500,
    sides: Sequence[int] = (3, 5, 7),
    seed: int = 0,
    size: int | None = None,
) -> list[MaskedAccuracy]:
    """Measure the accuracy on ``count`` images, first unchanged, then with local or random keys hidden."""
    if not subject.classes:
        raise UserError(f"{subject.name} is not a trained classifier: there is no accuracy to measure")
    images, labels = _labelled(subject, source, count, size)
    seen = [one for one in subject.look(images[:1])[0] if isinstance(one.layer.attention, MultiHeadAttention)]
    if not seen:
        raise UserError(f"{subject.name} attends inside windows: keys cannot be hidden there")
    batch_size = _batch_size(subject, seen, min(sides))
    results = [MaskedAccuracy("none", _top1(subject, images, labels, batch_size), [])]
    for side in sides:
        layers = [one.layer for one in seen if is_larger(one.grid_size, side)]
        for kind in ("local", "random") if layers else ():
            name = f"{kind} {side}x{side}" if kind == "local" else f"random, as many as {side}x{side}"
            with hidden_keys(layers, side=side, seed=seed if kind == "random" else None):
                top1 = _top1(subject, images, labels, batch_size)
                results.append(MaskedAccuracy(name, top1, [layer.name for layer in layers]))
    return results


@contextmanager
def hidden_keys(layers: Sequence[Layer], *, side: int, seed: int | None = None) -> Iterator[None]:
    """Hide the keys of the window around every query in these layers.

    seed: hide the same number of random keys of the grid instead; they differ between layers, not between images.
    """
    with ExitStack() as stack:
        for place, layer in enumerate(layers):
            change = partial(_without_keys, layer=layer, side=side, seed=None if seed is None else seed + place)
            stack.enter_context(replace_weights(layer.attention, change))
        yield


def _without_keys(weights: Tensor, call: AttentionCall, *, layer: Layer, side: int, seed: int | None) -> Tensor:
    hidden = _hidden(call.grid_size, layer.prefix, side, seed, weights.device)
    return leave_out(weights, hidden, layer.operator)


def _hidden(grid_size: GridSize, prefix: int, side: int, seed: int | None, device: torch.device) -> Tensor:
    """True where a query of the grid may not see a key of it: [N, N]."""
    count = grid_size[0] * grid_size[1]
    hidden = _neighbours(grid_size, side, device)(torch.arange(count, device=device))
    if seed is not None:
        # the lowest of random numbers, as many as the window has tokens
        numbers = torch.rand(count, count, generator=torch.Generator().manual_seed(seed))
        turn = numbers.to(device).argsort(-1).argsort(-1)
        hidden = turn < hidden.sum(-1, keepdim=True)
    return nn.functional.pad(hidden, (prefix, 0, prefix, 0), value=False)


def leave_out(weights: Tensor, hidden: Tensor, operator: str) -> Tensor:
    """Weights [B, heads, N, N] without those ``hidden`` [N, N], normalised as the attention normalises."""
    kept = weights.masked_fill(hidden, 0)
    if operator in DIVIDED:
        return divide(kept, kept.sum(-1, keepdim=True))
    if operator == "inline":
        number = (~hidden).sum(-1, keepdim=True)
        return (kept - (kept.sum(-1, keepdim=True) - 1) / number).masked_fill(hidden, 0)
    return kept


def _labelled(subject: Subject, source: ImageSource, count: int, size: int | None) -> tuple[Tensor, Tensor]:
    if source.classes and source.classes != subject.classes:
        raise UserError(f"the images' classes are not those that {subject.name} was trained for, in their order")
    pictures = source_pictures(source, count)
    images = torch.stack([subject.prepare(picture.image, size) for picture in pictures])
    return images, torch.tensor([picture.label for picture in pictures])


def _batch_size(subject: Subject, seen: Sequence[LayerInput], side: int) -> int:
    """How many images fit into memory with all N x N weights of a layer."""
    bytes_each = [4 * _heads(one) * one.tokens**2 for one in seen if is_larger(one.grid_size, side)]
    largest = max(bytes_each, default=1)
    if largest > MOST_WEIGHTS_BYTES:
        raise UserError(
            f"hiding keys needs all N x N weights of a layer, {largest / 2**30:,.1f} GiB for one image of "
            f"{subject.name} at this size; the limit is {MOST_WEIGHTS_BYTES / 2**30:.0f} GiB"
        )
    return max(min(WEIGHTS_BYTES // largest, 100), 1)


@torch.no_grad()
def _heads(given: LayerInput) -> int:
    return given.rows()(torch.zeros(1, dtype=torch.long, device=given.x.device)).shape[1]


@torch.no_grad()
def _top1(subject: Subject, images: Tensor, labels: Tensor, batch_size: int) -> float:
    right = sum(
        int((subject.model(batch).argmax(-1) == truth).sum())
        for batch, truth in zip(images.split(batch_size), labels.split(batch_size), strict=True)
    )
    return right / len(labels)


# the figure


def plot_locality(
    masses: dict[str, list[LayerMass]], accuracies: dict[str, list[MaskedAccuracy]], *, sums: bool = False
) -> Any:
    """Draw the local mass of each layer relative to chance and, if measured, the accuracy with keys hidden.

    sums: whether to add the local sums with the chance of 9 / N, as in the paper.
    """
    colors = comparison_colors(list(masses))
    most = max(len(found) for found in masses.values())
    width = max(6.0, 0.75 * most)
    widths = [width, *[width] * sums, *[5.5] * bool(accuracies)]
    figure, axes = new_axes(1, len(widths), width_ratios=widths, figsize=(sum(widths), 4.2))
    labels = _layer_labels(masses)
    _plot_masses(axes[0][0], masses, labels, colors)
    if sums:
        _plot_sums(axes[0][1], masses, labels, colors)
    if accuracies:
        _plot_accuracies(axes[0][-1], accuracies, colors)
    return figure


def _plot_masses(axis: Any, masses: dict[str, list[LayerMass]], labels: Sequence[str], colors: dict[str, str]) -> None:
    for name, found in masses.items():
        shares = [one.mass / one.chance for one in found]
        axis.plot(range(len(found)), shares, "o-", color=colors[name], linewidth=2, label=name)
    axis.axhline(1, linestyle=":", color="black", linewidth=1.5, label="chance")
    axis.set_ylim(0, 1.1 * max(1.0, axis.get_ylim()[1]))
    axis.set_ylabel("times chance")
    _finish_layers(axis, labels, "weights on the 3 x 3 tokens around the query")


def _plot_sums(axis: Any, masses: dict[str, list[LayerMass]], labels: Sequence[str], colors: dict[str, str]) -> None:
    for name, found in masses.items():
        axis.plot(range(len(found)), [one.sum for one in found], "o-", color=colors[name], linewidth=2, label=name)
    # models with the same grids have one line for all of them
    levels = dict.fromkeys(tuple(one.whole_window for one in found) for found in masses.values())
    for place, level in enumerate(levels):
        label = {"label": "9 / N"} if place == 0 else {}
        axis.plot(range(len(level)), level, ":", color="black", linewidth=1.5, **label)
    # the margin below positive sums may be negative
    lowest = min(one.sum for found in masses.values() for one in found)
    low, high = axis.get_ylim()
    axis.set_ylim(low if lowest < 0 else 0, 1.1 * high)
    _finish_layers(axis, labels, "sum of the weights there, negative ones included")


def _finish_layers(axis: Any, labels: Sequence[str], title: str) -> None:
    axis.set_xticks(range(len(labels)), labels, fontsize=8 if len(labels) <= 6 else 7)
    axis.set_title(title, loc="left", fontsize=11)
    axis.legend(frameon=False, fontsize=9)
    tidy(axis)


def _layer_labels(masses: dict[str, list[LayerMass]]) -> list[str]:
    """Names and grids of the layers if all models have the same, else their numbers."""
    lists = [[f"{one.layer}, {one.grid_size[0]}x{one.grid_size[1]}" for one in found] for found in masses.values()]
    if all(labels == lists[0] for labels in lists):
        return [label.replace(", ", "\n") for label in lists[0]]
    return [f"layer {place + 1}" for place in range(max(map(len, lists)))]


def key_names(accuracies: dict[str, list[MaskedAccuracy]]) -> list[str]:
    """The keys that were hidden in any of the models: larger grids have more to hide."""
    return list(
        dict.fromkeys(one.keys for found in sorted(accuracies.values(), key=len, reverse=True) for one in found)
    )


def _plot_accuracies(axis: Any, accuracies: dict[str, list[MaskedAccuracy]], colors: dict[str, str]) -> None:
    keys = key_names(accuracies)
    width = 0.8 / len(accuracies)
    for place, (name, found) in enumerate(accuracies.items()):
        where = [keys.index(one.keys) - 0.4 + (place + 0.5) * width for one in found]
        bars = axis.bar(where, [100 * one.top1 for one in found], width * 0.92, color=colors[name], label=name)
        axis.bar_label(bars, fmt="%.0f", fontsize=8)
    axis.set_xticks(range(len(keys)), [key.replace(", ", ",\n") for key in keys], fontsize=8)
    axis.set_title("top-1 [%] with keys hidden from every query", loc="left", fontsize=11)
    tidy(axis)
