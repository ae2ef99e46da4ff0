"""The report's pictures: curves as inline SVG that follows the page's colours, heat maps on the images."""

import base64
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from softline.experiments.compare import Comparison
from softline.measure.scaling import ScalingRow
from softline.plotting.colors import COLORS, COOL, WARM, label_of
from softline.report.examples import Example, HeatMap

# matplotlib knows no CSS: this stands for the page's colour of text
INK = "#010203"


# of attentions that have no colour of their own
OTHER_COLORS = ("#6a51a3", "#2e8b57", "#b8860b", "#a83279", "#4f6d7a")


@dataclass(frozen=True)
class Line:
    name: str
    x: Sequence[float]
    y: Sequence[float]


def color_of(name: str, names: Sequence[str]) -> str:
    others = [other for other in names if other not in COLORS]
    return COLORS[name] if name in COLORS else OTHER_COLORS[others.index(name) % len(OTHER_COLORS)]


def learning_panels(comparison: Comparison) -> list[str]:
    """Top-1 on the test images and training loss, after each epoch."""

    def lines(value: Callable[[Any], float]) -> list[Line]:
        return [
            Line(row.name, [point.epoch for point in run.curve], [value(point) for point in run.curve])
            for row in comparison.rows
            for run in row.runs
        ]

    top1, loss = lines(lambda point: 100 * point.top1), lines(lambda point: point.train_loss)
    return [
        draw_panel("top1", "top-1 on the test images [%]", top1, xlabel="epoch"),
        draw_panel("loss", "training loss", loss, xlabel="epoch"),
    ]


def cost_panels(rows: Sequence[ScalingRow]) -> list[str]:
    """Time, operations and memory of one layer over the image size, on logarithmic axes."""
    sizes = {row.tokens: f"{row.image_size}²" for row in rows}

    def lines(value: Callable[[ScalingRow], float]) -> list[Line]:
        groups = [[row for row in rows if row.attention == name] for name in dict.fromkeys(r.attention for r in rows)]
        return [Line(group[0].attention, [r.tokens for r in group], [value(r) for r in group]) for group in groups]

    options: dict[str, Any] = {"xlabel": "image [pixels]", "ticks": sizes}
    return [
        draw_panel("time", "time [ms]", lines(lambda row: row.milliseconds), **options),
        draw_panel("operations", "multiply-adds [millions]", lines(lambda row: row.macs / 1e6), **options),
        draw_panel("memory", "peak memory [MiB]", lines(lambda row: row.peak_bytes / 2**20), **options),
    ]


def draw_panel(
    name: str, title: str, lines: Sequence[Line], *, xlabel: str, ticks: dict[int, str] | None = None
) -> str:
    """One plot as an ``<svg>`` element; with ``ticks`` of x both axes are logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": INK,
    }
    style |= {"axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.linewidth": 0.8}
    names = list(dict.fromkeys(line.name for line in lines))
    with matplotlib.rc_context(style):
        figure, axis = plt.subplots(figsize=(4.0, 3.0), layout="constrained")
        for line in lines:
            axis.plot(line.x, line.y, "o-", color=color_of(line.name, names), linewidth=2, markersize=4.5)
        if ticks is None:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        else:
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_xticks(list(ticks), list(ticks.values()))
            axis.minorticks_off()
            axis.yaxis.set_major_formatter("{x:,g}")
        axis.set_xlabel(xlabel)
        axis.set_title(title, loc="left", fontsize=11)
        axis.grid(alpha=0.15, color=INK, linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True)
        plt.close(figure)
    return inline_svg(buffer.getvalue(), name, alternative_text(title, lines, xlabel, ticks))


def alternative_text(title: str, lines: Sequence[Line], xlabel: str, ticks: dict[int, str] | None) -> str:
    """The numbers that the plot shows."""
    ticks = ticks or {}
    parts = []
    for line in lines:
        points = ", ".join(f"{y:.3g} at {ticks.get(round(x), f'{x:g}')}" for x, y in zip(line.x, line.y, strict=True))
        parts.append(f"{label_of(line.name)}: {points}")
    return f"{title} against {xlabel}. {'; '.join(parts)}."


def inline_svg(svg: str, name: str, description: str) -> str:
    """What matplotlib wrote, as an element of a page: no prologue, ids of its own, the page's colours and font."""
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
    """The image with the query's token framed, under the map: more attention than the row's mean warm, less cool."""
    height, width = example.image.shape[-2:]
    overlay = "" if heat_map is None else _image_tag(contrast_png(heat_map.contrast()), width, height)
    frame = ""
    if maps := ([heat_map] if heat_map is not None else list(example.maps.values())[:1]):
        (rows, columns), (row, column) = maps[0].row.shape, maps[0].query
        cell_width, cell_height = width / columns, height / rows
        place = f'x="{column * cell_width:g}" y="{row * cell_height:g}" width="{cell_width:g}" height="{cell_height:g}"'
        frame = f'<rect class="query-edge" {place}/><rect class="query" {place}/>'
    return (
        f'<svg class="map" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(description)}">'
        f"{_image_tag(image_png(example.image), width, height)}{overlay}{frame}</svg>"
    )


def image_png(image: Tensor) -> bytes:
    """[C, H, W] in 0 to 1, grey or colour."""
    levels = (image * 255).round().to(torch.uint8)
    array = levels[0].numpy() if len(levels) == 1 else levels.permute(1, 2, 0).numpy()
    return _png(Image.fromarray(array))


def contrast_png(contrast: Tensor) -> bytes:
    """[H, W] in -1 to 1: the sign is the colour, the size its opacity."""
    warm = (contrast > 0)[..., None]
    color = torch.where(warm, torch.tensor(WARM), torch.tensor(COOL))  # [H, W, 3]
    opacity = (contrast.abs() * 210).round()[..., None]
    return _png(Image.fromarray(torch.cat([color, opacity], -1).to(torch.uint8).numpy()))


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def _image_tag(png: bytes, width: int, height: int) -> str:
    data = base64.b64encode(png).decode()
    return f'<image href="data:image/png;base64,{data}" width="{width}" height="{height}" preserveAspectRatio="none"/>'
