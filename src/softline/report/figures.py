"""Pictures of the report: curves as inline SVG in the colours of the page, and heat maps over the images."""

import base64
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from softline.analysis.heatmap import HeatMap
from softline.experiments.compare import Comparison, CurvePoint, metric_label
from softline.measure.scaling import ScalingRow
from softline.plotting.colors import COLORS, COOL, WARM, label_of
from softline.plotting.contrast import contrast
from softline.plotting.figures import plotting
from softline.report.examples import Example

INK = "#010203"
"""A stand-in for the page's text colour, since matplotlib knows no CSS."""


@dataclass(frozen=True)
class Line:
    """A line of a plot; ``name`` decides its colour."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def learning_panels(comparison: Comparison, colors: Mapping[str, str]) -> list[str]:
    """The score on the test images and the training loss after each epoch."""

    def lines(value: Callable[[CurvePoint], float]) -> list[Line]:
        return [
            Line(row.name, [point.epoch for point in run.curve], [value(point) for point in run.curve])
            for row in comparison.rows
            for run in row.runs
        ]

    title = f"{metric_label(comparison.metric)} on the test images [%]"
    scores, losses = lines(lambda point: 100 * point.score), lines(lambda point: point.train_loss)
    return [
        draw_panel("score", title, scores, colors, xlabel="epoch"),
        draw_panel("loss", "training loss", losses, colors, xlabel="epoch"),
    ]


COSTS = {
    "time": ("time [ms]", 1.0),
    "operations": ("multiply-adds [millions]", 1e6),
    "memory": ("peak memory [MiB]", 2.0**20),
}
"""Titles of panels, and the unit of their axis in milliseconds, multiply-adds or bytes."""


class CostPoint(NamedTuple):
    """A cost of one line at one image size."""

    name: str
    tokens: int
    image_size: int
    value: float
    """Milliseconds, multiply-adds or bytes."""


def cost_panels(rows: Sequence[ScalingRow], colors: Mapping[str, str]) -> list[str]:
    """Time, operations and memory of one layer over the image size."""

    def points(value: Callable[[ScalingRow], float]) -> list[CostPoint]:
        return [CostPoint(row.attention, row.tokens, row.image_size, value(row)) for row in rows]

    return [
        draw_cost("time", points(lambda row: row.milliseconds), colors),
        draw_cost("operations", points(lambda row: row.macs), colors),
        draw_cost("memory", points(lambda row: row.peak_bytes), colors),
    ]


def draw_cost(cost: str, points: Sequence[CostPoint], colors: Mapping[str, str]) -> str:
    """Draw one of `COSTS` over the image size, on logarithmic axes."""
    title, unit = COSTS[cost]
    groups = [[point for point in points if point.name == name] for name in dict.fromkeys(p.name for p in points)]
    lines = [Line(group[0].name, [p.tokens for p in group], [p.value / unit for p in group]) for group in groups]
    ticks = {point.tokens: f"{point.image_size}²" for point in points}
    return draw_panel(cost, title, lines, colors, xlabel="image [pixels]", ticks=ticks)


def draw_panel(
    name: str,
    title: str,
    lines: Sequence[Line],
    colors: Mapping[str, str],
    *,
    xlabel: str,
    ticks: dict[int, str] | None = None,
    bars: bool = False,
    from_zero: bool = False,
) -> str:
    """Draw a plot as an ``<svg>`` element.

    colors: colours of the lines by name.
    ticks: labels by their value of x; with them both axes are logarithmic.
    bars: draw a bar for each value instead of lines.
    from_zero: begin the axis of the values at 0.
    """
    pyplot = plotting()
    ink = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    style = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 10, "axes.linewidth": 0.8, **ink}
    with pyplot.rc_context(style):
        figure, axis = pyplot.subplots(figsize=(4.0, 3.0), layout="constrained")
        for line in lines:
            if bars:
                axis.bar(line.x, line.y, color=colors[line.name], zorder=2)
            else:
                axis.plot(line.x, line.y, "o-", color=colors[line.name], linewidth=2, markersize=4.5)
        _set_scales(axis, ticks)
        if from_zero:
            axis.set_ylim(bottom=0)
        axis.set_xlabel(xlabel)
        axis.set_title(title, loc="left", fontsize=11)
        axis.grid(alpha=0.15, color=INK, linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True)
        pyplot.close(figure)
    return inline_svg(buffer.getvalue(), name, alternative_text(title, lines, xlabel, ticks))


def _set_scales(axis: Any, ticks: dict[int, str] | None) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator

    if ticks is None:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        return
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(list(ticks), list(ticks.values()))
    low, high = axis.get_ylim()
    if sum(low <= value <= high for value in axis.get_yticks()) < 2:
        # powers of ten alone would leave the axis without numbers
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:,g}")


def alternative_text(title: str, lines: Sequence[Line], xlabel: str, ticks: dict[int, str] | None) -> str:
    """Describe a plot by its numbers."""
    ticks = ticks or {}
    parts = []
    for line in lines:
        points = ", ".join(f"{y:.3g} at {ticks.get(round(x), f'{x:g}')}" for x, y in zip(line.x, line.y, strict=True))
        parts.append(f"{label_of(line.name)}: {points}")
    return f"{title} against {xlabel}. {'; '.join(parts)}."


def inline_svg(svg: str, name: str, description: str) -> str:
    """Convert an SVG file of matplotlib to an element of a page: unique ids, the page's colours and font."""
    body = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = body.replace("url(#", f"url(#{name}-").replace('xlink:href="#', f'href="#{name}-')
    body = body.replace(INK, "currentColor")
    for attention, color in COLORS.items():
        body = body.replace(color, f"var(--{attention})")
    body = re.sub(r"(font(?:-family)?:[^;\"]*?)'[^;\"]*", r"\1inherit", body)
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None, "matplotlib gives its figures a viewBox"
    body = re.sub(r"\s*\n\s*", "\n", body)
    return f'<svg {box[0]} role="img" aria-label="{escape(description)}">{body}</svg>'


def heat_map_svg(example: Example, heat_map: HeatMap | None, description: str) -> str:
    """Draw the image with a frame around the query's token and, if given, a heat map over it."""
    framed = heat_map or next(iter(example.maps.values()), None)
    return draw_map(image_element(example.image), example.image, heat_map, description, framed=framed)


def image_element(image: Tensor, *, name: str = "") -> str:
    """Return an image [C, H, W] as an element of an SVG.

    name: an id, by which other pictures of the page can use it as well.
    """
    return _image_tag(image_png(image), *image.shape[-2:], name=name)


def draw_map(element: str, image: Tensor, heat_map: HeatMap | None, description: str, *, framed: HeatMap | None) -> str:
    """Draw an image [C, H, W] with a heat map over it, if given.

    element: the image as `image_element` returned it, or an SVG element that uses it.
    framed: the map whose query's token has a frame.
    """
    height, width = image.shape[-2:]
    overlay = "" if heat_map is None else _image_tag(contrast_png(contrast(heat_map.values)), height, width)
    frame = ""
    if framed is not None and framed.query is not None:
        (rows, columns), (row, column) = framed.grid_size, framed.query
        cell_width, cell_height = width / columns, height / rows
        place = f'x="{column * cell_width:g}" y="{row * cell_height:g}" width="{cell_width:g}" height="{cell_height:g}"'
        frame = f'<rect class="query-edge" {place}/><rect class="query" {place}/>'
    return (
        f'<svg class="map" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(description)}">'
        f"{element}{overlay}{frame}</svg>"
    )


def describe_map(heat_map: HeatMap, subject: str) -> str:
    """Describe a heat map in words.

    subject: the model and the image.
    """
    assert heat_map.query is not None, "reports show queries"
    row, column = divmod(int(heat_map.values.argmax()), heat_map.grid_size[1])
    return (
        f"{subject}: the token in row {heat_map.query[0] + 1}, column {heat_map.query[1] + 1} attends most to row "
        f"{row + 1}, column {column + 1}"
    )


def image_png(image: Tensor) -> bytes:
    """Encode a grey or colour image [C, H, W] with values from 0 to 1."""
    levels = (image * 255).round().to(torch.uint8)
    array = levels[0].numpy() if len(levels) == 1 else levels.permute(1, 2, 0).numpy()
    return _png(Image.fromarray(array))


def contrast_png(contrast: Tensor) -> bytes:
    """Encode contrasts [H, W] from -1 to 1: the sign decides the colour, the absolute value its opacity."""
    warm = (contrast > 0)[..., None]
    color = torch.where(warm, torch.tensor(WARM), torch.tensor(COOL))  # [H, W, 3]
    opacity = (contrast.abs() * 210).round()[..., None]
    return _png(Image.fromarray(torch.cat([color, opacity], -1).to(torch.uint8).numpy()))


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def _image_tag(png: bytes, height: int, width: int, *, name: str = "") -> str:
    data = base64.b64encode(png).decode()
    known = f'id="{name}" ' if name else ""
    place = f'width="{width}" height="{height}" preserveAspectRatio="none"'
    return f'<image {known}href="data:image/png;base64,{data}" {place}/>'
