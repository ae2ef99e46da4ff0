"""Whether different queries get different weights: Figs. 1 and 2 of the InLine paper.

The criterion of Fig. 2 is not published. Here two queries p and q of the same image, layer and head are confused if
they are far apart, ||p - q||_2 > query_distance * mean ||q||_2 over that head's queries, and their weights are alike,
max |w(p) - w(q)| < weight_distance / N for N tokens; 1 / N is the mean weight of a row that sums to 1. Unordered pairs
are counted and summed over heads and layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from softline import ops
from softline.analysis.subjects import Picture, Subject
from softline.attention.multihead import MultiHeadAttention
from softline.backbones.inspection import Layer, LayerInput
from softline.checks import check_integer, check_number
from softline.errors import UserError
from softline.ops.inputs import hide
from softline.plotting.colors import comparison_colors, label_of
from softline.plotting.figures import plotting, tidy

QUERY_DISTANCE, WEIGHT_DISTANCE = 0.5, 0.01
MOST_QUERIES = 196
"""Number of queries compared in a layer with more tokens, spread evenly over them."""


# the toy example


class Toy(NamedTuple):
    """One panel of the toy example: queries, keys and the feature map phi."""

    title: str
    queries: Tensor
    keys: Tensor
    matrix: Tensor
    """phi(x) = ReLU(matrix x + shift)."""
    shift: Tensor

    def weights(self) -> dict[str, Tensor]:
        """The weights of four queries to four keys [4, 4] with three attentions."""
        q, k = self.queries[None, None], self.keys[None, None]
        phi_q, phi_k = self._phi(q), self._phi(k)
        found = {
            "softmax": ops.softmax_weights(q, k),
            "linear": ops.linear_weights(phi_q, phi_k, feature_map="identity"),
            "inline": ops.inline_weights(phi_q, phi_k),
        }
        return {name: weights[0, 0] for name, weights in found.items()}

    def _phi(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.matrix.mT + self.shift)


_KEYS = torch.tensor([[0.608, 1.847], [1.012, 1.014], [1.948, 0.646], [1.812, 0.313]], dtype=torch.float64)
_LENGTHS = torch.tensor([0.396, 0.678, 0.944, 1.106], dtype=torch.float64)
_ON_A_LINE = torch.tensor([[0.057, 0.704], [0.322, 0.985], [0.710, 1.405], [1.250, 1.987]], dtype=torch.float64)
TOYS = (
    Toy(
        "φ = ReLU, queries of one direction",
        _LENGTHS[:, None] * torch.tensor([1, 1.796], dtype=torch.float64),
        _KEYS,
        torch.eye(2, dtype=torch.float64),
        torch.zeros(2, dtype=torch.float64),
    ),
    Toy(
        "φ = ReLU(Ax + b), queries on a line",
        _ON_A_LINE,
        _KEYS,
        torch.tensor([[0.542, 0.376], [-0.155, 0.793]], dtype=torch.float64),
        torch.tensor([0.732, 0.203], dtype=torch.float64),
    ),
)


# confusions of a model


@dataclass(frozen=True)
class Confusions:
    """How often a model confuses queries."""

    per_image: list[int]
    pairs: int
    """Number of pairs compared in each image."""
    far: int
    """Number of pairs, in all images together, whose queries are far apart."""
    by_layer: dict[str, float] = field(default_factory=dict)
    """Mean number of confused pairs in each layer."""
    left_out: list[str] = field(default_factory=list)
    """Layers that are not counted because their queries are not known."""

    @property
    def mean(self) -> float:
        return sum(self.per_image) / len(self.per_image)

    @property
    def share(self) -> float:
        """Confused pairs as a fraction of those whose queries are far apart."""
        return sum(self.per_image) / self.far if self.far else 0.0


def count_confusions(
    subject: Subject,
    pictures: Sequence[Picture],
    *,
    size: int | None = None,
    query_distance: float = QUERY_DISTANCE,
    weight_distance: float = WEIGHT_DISTANCE,
    most_queries: int = MOST_QUERIES,
) -> Confusions:
    """Count the confused pairs of queries in each picture, over all layers and heads."""
    check_number("query_distance", query_distance, 0)
    check_number("weight_distance", weight_distance, 0)
    check_integer("most_queries", most_queries, 2)
    layers = [replace(layer, attention=layer.inner) for layer in subject.layers if _has_queries(layer)]
    if not layers:
        raise UserError(f"{subject.name} has no attention whose queries are known")
    per_image, pairs, far, by_layer = [], 0, 0, dict.fromkeys([layer.name for layer in layers], 0.0)
    for picture in pictures:
        seen, _ = subject.look(subject.prepare(picture.image, size)[None], layers)
        counts = [_count(given, query_distance, weight_distance, most_queries) for given in seen]
        per_image.append(sum(count.confused for count in counts))
        pairs = sum(count.pairs for count in counts)
        far += sum(count.far for count in counts)
        for layer, count in zip(layers, counts, strict=True):
            by_layer[layer.name] += count.confused / len(pictures)
    left_out = [f"{layer.name} ({layer.operator})" for layer in subject.layers if not _has_queries(layer)]
    return Confusions(per_image, pairs, far, by_layer, left_out)


def _has_queries(layer: Layer) -> bool:
    return isinstance(layer.inner, MultiHeadAttention)


class _Counts(NamedTuple):
    confused: int
    far: int
    pairs: int


@torch.no_grad()
def _count(given: LayerInput, query_distance: float, weight_distance: float, most_queries: int) -> _Counts:
    n = given.tokens
    tokens = torch.linspace(0, n - 1, min(n, most_queries), device=given.x.device).round().long()
    rows = given.rows()(tokens).float()  # [B, heads, R, N]
    q = given.call.operands()["q"].float()
    if q.shape[1] != rows.shape[1]:
        # Hydra's heads are the channels: there the query is the whole token
        q = q.transpose(1, 2).flatten(2)[:, None].expand(-1, rows.shape[1], -1, -1)
    # the padding of windows is neither query nor key
    real = given.x.new_ones(given.x.shape[:2], dtype=torch.bool) if given.key_mask is None else given.key_mask
    counts = real.sum(-1).clamp(min=1)[:, None, None, None]
    lengths = hide(q, real).norm(dim=-1).sum(-1)[..., None, None] / counts
    far = torch.cdist(q[:, :, tokens], q[:, :, tokens]) > query_distance * lengths
    alike = torch.cdist(rows, rows, p=torch.inf) < weight_distance / counts
    chosen = real[:, tokens]
    pair = (chosen[:, :, None] & chosen[:, None, :]).triu(1)[:, None].expand_as(far)
    return _Counts(int((far & alike & pair).sum()), int((far & pair).sum()), int(pair.sum()))


# the figure


def plot_injectivity(confusions: dict[str, Confusions], criterion: str) -> Any:
    """Draw the two toy panels and, for models, the distribution of confusions over images."""
    height = 5.0 if confusions else 4.4
    figure = plotting().figure(figsize=(13.2 if confusions else 8, height), layout="constrained")
    parts: list[Any] = list(figure.subfigures(1, 2, width_ratios=(1.45, 1))) if confusions else [figure]
    grid = parts[0].subplots(len(TOYS), 3)
    for line, toy in zip(grid, TOYS, strict=True):
        for axis, (name, weights) in zip(line, toy.weights().items(), strict=True):
            _draw_toy(axis, name, weights)
        line[0].set_ylabel(toy.title.replace(", ", ",\n"), fontsize=9)
    if confusions:
        _draw_confusions(parts[1].subplots(), confusions, criterion)
    return figure


def _draw_toy(axis: Any, name: str, weights: Tensor) -> None:
    axis.imshow(weights.numpy(), cmap="Blues", vmin=0, vmax=0.7)
    for row, line in enumerate(weights.tolist()):
        for column, value in enumerate(line):
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=9)
    axis.set_xticks(range(4), [f"$k_{i}$" for i in range(1, 5)])
    axis.set_yticks(range(4), [f"$q_{i}$" for i in range(1, 5)])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set_title(label_of(name), fontsize=10)


def _draw_confusions(axis: Any, confusions: dict[str, Confusions], criterion: str) -> None:
    colors = comparison_colors(list(confusions))
    for name, one in confusions.items():
        ordered = sorted(one.per_image)
        share = [100 * (place + 1) / len(ordered) for place in range(len(ordered))]
        label = f"{name}: mean {one.mean:,.1f}"
        axis.step([ordered[0], *ordered], [0, *share], where="post", color=colors[name], linewidth=2.2, label=label)
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xlim(left=-0.1)
    axis.set_ylim(0, 102)
    axis.set_xlabel("confused pairs of queries in an image, at most")
    axis.set_ylabel("share of images [%]")
    axis.set_title(criterion, loc="left", fontsize=9)
    tidy(axis)
    axis.legend(frameon=False, fontsize=9, loc="center", bbox_to_anchor=(0.45, 0.5))
