"""Accuracy against parameters, multiply-adds and speed: Figs. 1a and 3 of the SOFT paper, Fig. 5a of InLine.

There are three kinds of points: numbers as published; softline's own models with the published accuracy, but parameters
and multiply-adds that softline counts; and the user's runs with their own accuracy. Multiply-adds are drawn without the
iterations of Newton's method, which the SOFT paper leaves out; the numbers list both. Runs on other data than
ImageNet-1K have axes of their own.

soft_release_small and softpp_release_small are not among the counted models: the accuracies that the README of the
release gives for them belong to a network of 24 M parameters, and the released code has 38.9 M.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import timm
import torch
from torch import nn

from softline.analysis.published import PUBLISHED, Paper, Published
from softline.analysis.subjects import check_distinct, named_texts
from softline.checks import check_integer, check_option
from softline.engine.checkpoint import BEST, load_checkpoint
from softline.errors import UserError
from softline.measure.cases import check_device
from softline.measure.catalog import describe, list_models
from softline.measure.counting import count_operations
from softline.measure.turns import take_turns
from softline.plotting.colors import PALETTE, comparison_colors, label_of
from softline.plotting.figures import new_axes, tidy
from softline.tasks.loading import load_trained

GROUPS: dict[Paper, str] = {
    "soft": "SOFT and its rivals on ImageNet-1K",
    "inline": "InLine and its rivals on ImageNet-1K",
}
Kind = Literal["published", "counted", "run"]
OTHER_NETWORKS = ("soft_release_small", "softpp_release_small")
"""Models whose published accuracy belongs to another network than the released code builds."""


@dataclass(frozen=True)
class Point:
    """A model in the figure."""

    group: str
    """The axes that it is drawn in: a paper's comparison, or the data of a run."""
    family: str
    name: str
    kind: Kind
    parameters: float
    macs: float | None
    """Multiply-adds of one image."""
    top1: float
    """Accuracy in percent."""
    image_size: int
    source: str
    """Where the accuracy is from."""
    per_second: float | None = None
    """Images per second of inference."""
    device: str | None = None
    """The device of that speed."""
    newton_macs: int | None = None
    """Multiply-adds of Newton's iterations, which are part of macs if softline counted them."""

    @property
    def macs_without_newton(self) -> float | None:
        """Multiply-adds as the SOFT paper counts them."""
        return None if self.macs is None else self.macs - (self.newton_macs or 0)


@dataclass(frozen=True)
class Stopwatch:
    """How the speed of inference is measured."""

    batch: int = 8
    rounds: int = 3
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_integer("batch", self.batch, 1)
        check_integer("rounds", self.rounds, 1)
        check_device(self.device)

    @torch.no_grad()
    def per_second(self, model: nn.Module, channels: int, size: int) -> float:
        """Images per second: the median over the rounds, after one that does not count."""
        images = torch.randn(self.batch, channels, size, size, device=self.device)
        model = model.to(self.device).eval()
        wait = partial(torch.cuda.synchronize, self.device) if images.is_cuda else lambda: None
        (timing,) = take_turns({"": lambda: model(images)}, self.rounds, wait=wait).values()
        return self.batch / timing.median


def published_points(papers: Sequence[str]) -> list[Point]:
    """The models of these papers' comparisons, "soft" or "inline", with the numbers that they print."""
    return [_point(row) for row in _rows_of(papers)]


def catalog_points(
    papers: Sequence[str],
    *,
    pattern: str = "*",
    stopwatch: Stopwatch | None = None,
    hear: Callable[[str], None] = lambda name: None,
) -> list[Point]:
    """Softline's models of these papers, with the published accuracy and counted parameters and multiply-adds.

    Those in OTHER_NETWORKS are left out.

    pattern: shell pattern of their names.
    stopwatch: also measures their speed.
    hear: receives the name of each model before it is counted.
    """
    known = list_models(pattern)
    if set(known) <= set(OTHER_NETWORKS):
        raise UserError(f"the published accuracy of {' and '.join(known)} belongs to another network, got {pattern!r}")
    rows = [row for row in _rows_of(papers) if row.model in known and row.model not in OTHER_NETWORKS]
    if not rows:
        raise UserError(f"no model of these papers with a published accuracy matches {pattern!r}")
    points = []
    for row in rows:
        assert row.model is not None, "the catalogue has names"
        hear(row.model)
        card = describe(row.model)
        point = replace(
            _point(row),
            kind="counted",
            parameters=card.parameters,
            macs=card.macs,
            image_size=card.image_size,
            per_second=None,
            device=None,
            newton_macs=card.newton_macs,
        )
        if stopwatch is not None:
            speed = stopwatch.per_second(timm.create_model(row.model), 3, card.image_size)
            point = replace(point, per_second=speed, device=stopwatch.device)
        points.append(point)
    return points


def run_points(texts: Sequence[str], *, stopwatch: Stopwatch | None = None) -> list[Point]:
    """Classifiers trained by `softline train`, with the accuracy of their best checkpoints.

    texts: directories of runs, or ``NAME=DIR``; runs without a name are called by the parts of their paths that differ.
    """
    points = [_run(name, Path(text), stopwatch) for name, text in named_texts(texts, "runs", "DIR")]
    check_distinct([point.name for point in points], "runs", "DIR")
    return points


def among_published(points: Sequence[Point], papers: Sequence[str]) -> list[Point]:
    """Put runs on ImageNet-1K into the axes of these papers' comparisons."""
    return [replace(point, group=GROUPS[paper]) for paper in _papers(papers) for point in points]


def _papers(names: Sequence[str]) -> list[Paper]:
    for name in names:
        check_option("paper", name, get_args(Paper))
    return [paper for paper in get_args(Paper) if paper in names]


def _rows_of(papers: Sequence[str]) -> list[Published]:
    chosen = _papers(papers)
    return [row for row in PUBLISHED if row.paper in chosen]


def _point(row: Published) -> Point:
    return Point(
        *(GROUPS[row.paper], row.family, row.name, "published", row.parameters, row.macs, row.top1, row.image_size),
        *(row.source, row.per_second, row.device),
    )


def _run(name: str | None, directory: Path, stopwatch: Stopwatch | None) -> Point:
    path = directory / BEST
    if not path.is_file():
        raise UserError(f"runs are directories of `softline train` with a {BEST}; {directory} has none")
    content = load_checkpoint(path)
    if "top1" not in content["best"]:
        raise UserError(f"runs must be classifiers: {directory} has {', '.join(content['best'])}, but no top1")
    trained = load_trained(str(path))
    view = trained.view()
    model, size, channels = view.model, int(view.settings["image_size"]), len(view.settings["mean"])
    operations = count_operations(model, torch.zeros(1, channels, size, size))
    assert view.data is not None, "a trained classifier knows its data"
    title = name or trained.name
    return Point(
        group=f"runs on {view.data[0]}",
        family=title,
        name=title,
        kind="run",
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        macs=operations.macs,
        top1=100 * content["best"]["top1"],
        image_size=size,
        source=str(path),
        per_second=None if stopwatch is None else stopwatch.per_second(model, channels, size),
        device=None if stopwatch is None else stopwatch.device,
        newton_macs=operations.newton,
    )


# the figure


class AccuracyPanel(NamedTuple):
    title: str
    value: Callable[[Point], float | None]


def plot_accuracy(points: Sequence[Point], *, speed: bool = False) -> Any:
    """Draw a row of panels for each group: accuracy against parameters, multiply-adds and, if asked for, speed."""
    groups = list(dict.fromkeys(point.group for point in points))
    panels = [
        AccuracyPanel("parameters [millions]", lambda point: point.parameters / 1e6),
        AccuracyPanel("multiply-adds without Newton's iterations [billions]", _gmacs),
    ]
    if speed:
        panels.append(AccuracyPanel("images per second, as published", lambda point: _speed(point, measured=False)))
        panels.append(AccuracyPanel("images per second, measured", lambda point: _speed(point, measured=True)))
    panels = [panel for panel in panels if any(panel.value(point) for point in points)]
    widths = [*[5.4] * len(panels), 2.0]
    figure, axes = new_axes(len(groups), len(widths), figsize=(sum(widths), 5.0 * len(groups)), width_ratios=widths)
    for line, group in zip(axes, groups, strict=True):
        mine = [point for point in points if point.group == group]
        styles = _styles(mine)
        for axis, panel in zip(line[:-1], panels, strict=True):
            _plot_panel(axis, mine, panel, styles)
        line[0].set_ylabel("top-1 [%]")
        line[0].set_title(group, loc="left", fontsize=11)
        _legend(line[-1], mine, styles)
    return figure


def _gmacs(point: Point) -> float | None:
    macs = point.macs_without_newton
    return None if macs is None else macs / 1e9


def _speed(point: Point, *, measured: bool) -> float | None:
    return point.per_second if (point.kind != "published") == measured else None


OWN = {"SOFT": "#8d5fb0", "SOFT++": "#0b6e99", "InLine-DeiT": "#d9622b", "InLine-PVT": "#b8952a"}
OWN |= {"InLine-Swin": "#c2487a", "InLine-CSwin": "#8b2f1b"}
MARKERS = "osv^<>phXdP*"
SHAPES: dict[Kind, dict[str, Any]] = {
    "published": {},
    "counted": {"marker": "D", "markersize": 8, "markerfacecolor": "none", "linestyle": "none", "markeredgewidth": 1.5},
    "run": {"marker": "*", "markersize": 15, "linestyle": "none", "markeredgecolor": "white"},
}


def _styles(points: Sequence[Point]) -> dict[str, dict[str, Any]]:
    """Line styles by family: thick lines for the papers' own models, thin ones for the others."""
    families = dict.fromkeys(point.family for point in points)
    runs = comparison_colors([point.family for point in points if point.kind == "run"])
    others = itertools.count()
    free = [color for color in PALETTE if color not in OWN.values()]
    styles = {}
    for family in families:
        own = runs.get(family) or OWN.get(family.removesuffix(", released"))
        place = 0 if own else next(others)
        styles[family] = {
            "color": own or free[place % len(free)],
            "marker": "o" if own else MARKERS[place % len(MARKERS)],
            "markersize": 6 if own else 5,
            "linewidth": 2.2 if own else 1,
            "linestyle": "--" if family.endswith(", released") else "-",
            "alpha": 1 if own else 0.75,
            "zorder": 3 if own else 2,
        }
    return styles


def _plot_panel(axis: Any, points: Sequence[Point], panel: AccuracyPanel, styles: dict[str, dict[str, Any]]) -> None:
    from matplotlib.ticker import LogLocator

    values = [value for point in points if (value := panel.value(point)) is not None]
    if not values:
        axis.set_axis_off()
        return
    for (family, kind), style in _series(points, styles).items():
        mine = [point for point in points if (point.family, point.kind) == (family, kind)]
        places = [(value, point.top1) for point in mine if (value := panel.value(point)) is not None]
        if places:
            axis.plot(*zip(*places, strict=True), **style)
    # a logarithmic axis would have hardly a tick within a small range
    if max(values) > 3 * min(values):
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.minorticks_off()
    axis.xaxis.set_major_formatter("{x:,g}")
    axis.set_xlabel(panel.title)
    tidy(axis)


def _series(points: Sequence[Point], styles: dict[str, dict[str, Any]]) -> dict[tuple[str, Kind], dict[str, Any]]:
    """The style of each family and kind of points."""
    return {(point.family, point.kind): {**styles[point.family], **SHAPES[point.kind]} for point in points}


def _legend(axis: Any, points: Sequence[Point], styles: dict[str, dict[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    axis.set_axis_off()
    runs = {point.family for point in points if point.kind == "run"}
    ordered = sorted(styles.items(), key=lambda item: -item[1]["linewidth"])
    shapes = {family: {**style, **SHAPES["run" if family in runs else "published"]} for family, style in ordered}
    handles = [Line2D([], [], label=label_of(family), **style) for family, style in shapes.items()]
    if any(point.kind == "counted" for point in points):
        handles.append(Line2D([], [], color="black", label="size and cost\ncounted by softline", **SHAPES["counted"]))
    axis.legend(handles=handles, frameon=False, loc="center left", bbox_to_anchor=(-0.1, 0.5), fontsize=8)
