"""Attention heat maps: rows of the weights on the image (Figs. 4 and 7 of SOFT, Fig. 4 of InLine).

Attention rollout (Abnar and Zuidema, https://arxiv.org/abs/2005.00928) shows how much the classifier's input depends on
each patch. It assumes that half of every block's output is the block's input, and half what its attention gathers,
averaged over the heads. Since weights may be negative here and rows need not sum to 1, absolute values are taken and
each row is divided by its sum. Between the stages of a pyramid a token's share is spread evenly over its part of the
image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from softline.analysis.subjects import Picture, Subject
from softline.backbones.backbone import Backbone
from softline.backbones.inspection import Layer, LayerInput, find_backbone
from softline.checks import check_index, check_option
from softline.errors import UserError
from softline.layers.grid import GridSize
from softline.ops.inputs import divide
from softline.plotting.colors import COOL, WARM
from softline.plotting.contrast import contrast, unit_scale
from softline.plotting.figures import new_axes

Scaling = Literal["difference", "unit"]
"""How weights become colours: differences from the mean of the row, or from 0 to 1 as in the SOFT paper."""


@dataclass(frozen=True)
class HeatMap:
    """A map of one picture for one model."""

    subject: str
    picture: str
    column: str
    """The layer and head that the map shows, or "rollout"."""
    query: tuple[int, int] | None
    """Row and column of the query in the grid; None for the rollout."""
    grid_size: GridSize
    values: Tensor
    """[height, width]"""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dictionaries."""
        listed = [[float(f"{value:.5g}") for value in row] for row in self.values.tolist()]
        return {**{k: v for k, v in vars(self).items() if k != "values"}, "values": listed}


Maps: TypeAlias = tuple[Tensor, list[HeatMap]]
"""An image as a model sees it, [C, H, W] from 0 to 1, and its maps."""


def heat_maps(
    subject: Subject,
    picture: Picture,
    query: tuple[float, float],
    layers: Sequence[Layer],
    heads: Sequence[int | None],
    *,
    size: int | None = None,
    with_rollout: bool = False,
) -> Maps:
    """Compute a map for each layer and head; also return the picture as the subject sees it.

    query: (x, y), each from 0 (left, top) to 1.
    heads: indices from 0; None takes the mean of all heads.
    """
    image = subject.prepare(picture.image, size)
    seen, _ = subject.look(image[None])
    by_layer = {given.layer: given for given in seen}
    maps = []
    for given in (by_layer[layer] for layer in layers):
        row, column = cell_at(query, given.grid_size)
        for head in heads:
            values = query_map(given, given.token(row, column), head=head)
            name = f"{given.layer.name}, {'mean of heads' if head is None else f'head {head + 1}'}"
            maps.append(HeatMap(subject.name, picture.name, name, (row, column), given.grid_size, values))
    if with_rollout:
        values = rollout(find_backbone(subject.model), seen)[0]
        grid_size = (values.shape[0], values.shape[1])
        maps.append(HeatMap(subject.name, picture.name, "rollout", None, grid_size, values))
    return subject.shown(image), maps


def cell_at(query: tuple[float, float], grid_size: GridSize) -> tuple[int, int]:
    """Row and column of the token at (x, y), each coordinate from 0 to 1."""
    x, y = query
    if not (0 <= x <= 1 and 0 <= y <= 1):
        raise UserError(f"a query is X,Y from 0 (left, top) to 1 (right, bottom), got {x:g},{y:g}")
    height, width = grid_size
    return min(int(y * height), height - 1), min(int(x * width), width - 1)


@torch.no_grad()
def query_map(given: LayerInput, token: int, *, head: int | None = None) -> Tensor:
    """The weights that a token of one image gives to the tokens of the grid: [height, width].

    head: index from 0; None takes the mean of all heads.
    """
    row = given.rows()(torch.tensor([token], device=given.x.device))[0, :, 0]  # [heads, N]
    if head is not None:
        check_index("head", head, len(row))
    return given.on_grid(row.mean(0) if head is None else row[head]).float().cpu()


@torch.no_grad()
def rollout(backbone: Backbone, seen: Sequence[LayerInput]) -> Tensor:
    """How much the classifier's input depends on each token of the first stage: [B, height, width], each map sums to 1.

    seen: the inputs of the attentions of all blocks, in order.
    """
    stages: list[Any] = list(backbone.stages)
    blocks = sum(len(stage.blocks) for stage in stages)
    if len(seen) != blocks:
        raise UserError(
            f"rollout needs the weights of all {blocks} blocks, but {blocks - len(seen)} of them have none to give"
        )
    last = seen[-1]
    share = last.x.new_zeros(len(last.x), last.tokens, dtype=torch.float32)
    # the classifier's token, or the mean of the grid's
    first = last.layer.prefix if backbone.global_pool != "token" else 0
    final = last.tokens if backbone.global_pool != "token" else 1
    share[:, first:final] = 1 / (final - first)
    for position in range(len(seen) - 1, -1, -1):
        given = seen[position]
        share = (share + _through(given, share)) / 2
        before = seen[position - 1] if position else None
        if before is None:
            break
        if before.grid_size != given.grid_size or before.layer.prefix != given.layer.prefix:
            share = spread_to_finer(share, given, before)
    grid = given.on_grid(share)
    return divide(grid, grid.sum((1, 2), keepdim=True)).cpu()


def _through(given: LayerInput, share: Tensor) -> Tensor:
    """From the shares of the tokens after attention to those of the tokens before it: [B, N] -> [B, N]."""
    gathered = torch.zeros_like(share)
    for tokens, rows in given.row_blocks():
        sizes = rows.float().mean(1).abs()  # [B, R, N]
        sizes = divide(sizes, sizes.sum(-1, keepdim=True))
        gathered += (share[:, tokens, None].mT @ sizes)[:, 0]
    return gathered


def spread_to_finer(share: Tensor, given: LayerInput, before: LayerInput) -> Tensor:
    """From the shares of a stage's tokens to those of the previous stage's, on the same part of the image.

    Class tokens begin with their stage: their share is dropped.
    """
    rows, columns = (_overlaps(*sizes).to(share) for sizes in zip(given.grid_size, before.grid_size, strict=True))
    finer = rows.mT @ given.on_grid(share) @ columns
    return F.pad(finer.flatten(1), (before.layer.prefix, 0))


def _overlaps(coarse: int, fine: int) -> Tensor:
    """How much of each of ``coarse`` equal parts of a line lies on each of ``fine``: [coarse, fine], rows sum to 1."""
    left, right = (torch.arange(start, coarse + start)[:, None] / coarse for start in (0, 1))
    begin, end = (torch.arange(start, fine + start) / fine for start in (0, 1))
    return coarse * (right.minimum(end) - left.maximum(begin)).clamp(min=0)


# the figure


def plot_heat_maps(rows: Sequence[Maps], *, scaling: Scaling = "difference") -> Any:
    """Draw a row of panels for each image and model: the image with the query marked, then one panel for each map."""
    columns = list(dict.fromkeys(one.column for _, maps in rows for one in maps))
    lines = [_Line(maps[0].subject, image, {one.column: (image, one) for one in maps}) for image, maps in rows]
    return _plot_lines(lines, {column: column.replace(", ", "\n", 2) for column in columns}, scaling)


def plot_models_beside(groups: Sequence[Sequence[Maps]], *, scaling: Scaling = "difference") -> Any:
    """Draw a column of panels for each model, as Fig. 4 of the SOFT paper does, and a row for each layer and head.

    groups: for each picture and query, the image and the maps of every model.
    """
    lines = []
    for group in groups:
        for column in dict.fromkeys(one.column for _, maps in group for one in maps):
            panels = {one.subject: (image, one) for image, maps in group for one in maps if one.column == column}
            lines.append(_Line(column.replace(", ", "\n", 2), group[0][0], panels))
    return _plot_lines(lines, {maps[0].subject: maps[0].subject for _, maps in groups[0]}, scaling)


@dataclass(frozen=True)
class _Line:
    """A row of the figure: its name, the image at its left, and its panels by the column that they are in."""

    name: str
    image: Tensor
    panels: dict[str, tuple[Tensor, HeatMap]]


def _plot_lines(lines: Sequence[_Line], titles: dict[str, str], scaling: Scaling) -> Any:
    check_option("scaling", scaling, get_args(Scaling))
    figure, axes = new_axes(len(lines), len(titles) + 1, figsize=(1.9 * (len(titles) + 1), 1.95 * len(lines) + 0.4))
    for row, line in zip(axes, lines, strict=True):
        for axis in row:
            axis.set_axis_off()
        _draw(row[0], line.image, None, scaling)
        row[0].text(-0.04, 0.5, line.name, rotation=90, ha="right", va="center", transform=row[0].transAxes)
        for axis, column in zip(row[1:], titles, strict=True):
            if column in line.panels:
                _draw(axis, *line.panels[column], scaling)
        _mark(row[0], line.image, next((one for _, one in line.panels.values() if one.query is not None), None))
    for axis, title in zip(axes[0], ["image and query", *titles.values()], strict=True):
        axis.set_title(title.replace(":", ":\n"), fontsize=9)
    return figure


def _draw(axis: Any, image: Tensor, one: HeatMap | None, scaling: Scaling) -> None:
    height, width = image.shape[-2:]
    extent = (0, width, height, 0)
    # grey and lighter under a map, so that its colours show on dark images
    shown = image.mean(0) * 0.7 + 0.3 if one is not None else image.permute(1, 2, 0).squeeze(-1)
    axis.imshow(shown.numpy(), cmap="gray", vmin=0, vmax=1, extent=extent)
    if one is None:
        return
    if scaling == "unit":
        options = {"cmap": "turbo", "vmin": 0, "vmax": 1, "alpha": 0.6}
    else:
        options = {"cmap": _contrast_colors(), "vmin": -1, "vmax": 1, "alpha": 0.85}
    scaled = unit_scale(one.values) if scaling == "unit" else contrast(one.values)
    axis.imshow(scaled.numpy(), extent=extent, **options)
    _mark(axis, image, one)


def _contrast_colors() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    cool, warm = (tuple(level / 255 for level in color) for color in (COOL, WARM))
    return LinearSegmentedColormap.from_list("contrast", [cool, (*cool, 0.0), (*warm, 0.0), warm])


def _mark(axis: Any, image: Tensor, one: HeatMap | None) -> None:
    """Draw a frame around the query's patch."""
    from matplotlib.patches import Rectangle

    if one is None or one.query is None:
        return
    height, width = image.shape[-2] / one.grid_size[0], image.shape[-1] / one.grid_size[1]
    corner = (one.query[1] * width, one.query[0] * height)
    for color, line in (("black", 2.2), ("white", 1.0)):
        axis.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=color, linewidth=line))
