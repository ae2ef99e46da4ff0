"""The page: a comparison as one HTML file with a table, learning curves, costs, heat maps and what they mean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from softline.analysis.heatmap import HeatMap
from softline.experiments.compare import Comparison, VariantResult, metric_label
from softline.measure.scaling import ScalingRow
from softline.plotting.colors import comparison_colors, label_of
from softline.report.examples import Example
from softline.report.figures import cost_panels, describe_map, heat_map_svg, learning_panels
from softline.report.findings import (
    crossings,
    enumerated,
    exponents,
    faint_weights,
    maps_by_name,
    negative_weights,
    percent,
    small_images,
    switched_off,
    uncertainty,
    verdict,
    weight_range,
)
from softline.report.html import (
    INLINE_PAPER,
    SCALE,
    SOFT_PAPER,
    Reference,
    color_key,
    dot,
    fact_list,
    footer,
    head_cells,
    machine_facts,
    panel_figure,
    score_card,
    table,
    table_row,
    thread_count,
    whole_page,
)

IMAGES = Reference("Images", "Fashion-MNIST", "https://arxiv.org/abs/1708.07747")


@dataclass(frozen=True)
class Report:
    """Everything that the page shows."""

    comparison: Comparison
    """Classifiers; the first row is the one that the others are compared with."""
    scaling: Sequence[ScalingRow]
    examples: Sequence[Example]
    command: str
    seconds: float
    """Time from the start of the command to the report."""
    without_attention: Mapping[str, float] = field(default_factory=dict)
    """Scores, from 0 to 1, of the trained models with their attention switched off, by row."""
    reused: Sequence[str] = ()
    """Rows that an earlier command had already trained."""

    @property
    def colors(self) -> dict[str, str]:
        """One colour for each attention, the same in all sections."""
        names = [*(row.name for row in self.comparison.rows), *(row.attention for row in self.scaling)]
        return comparison_colors(list(dict.fromkeys(names)))


def render(report: Report) -> str:
    """Create the page as HTML. It needs matplotlib."""
    sections = [_headline(report), _table(report), _learning(report), _costs(report), _maps(report)]
    return whole_page(report.comparison.title, [*sections, footer([SOFT_PAPER, INLINE_PAPER, IMAGES])])


# sections


def _headline(report: Report) -> str:
    comparison, recipe = report.comparison, report.comparison.recipe
    score = f"{metric_label(comparison.metric)} on the test images"
    cards = "".join(
        score_card(label_of(row.name), percent(row.mean), score, report.colors[row.name]) for row in comparison.rows
    )
    epochs = recipe["schedule"]["epochs"]
    facts = {
        "Command": f"<code>{escape(report.command)}</code>",
        "Model": f"<code>{escape(recipe['model']['name'])}</code>, {_parameters(comparison.rows)} parameters, "
        f"trained from scratch for {epochs:g} epochs, seed {', '.join(map(str, comparison.seeds))}",
        "Images": escape(_data(recipe["data"])),
        **machine_facts(comparison.environment),
        "Took": f"{report.seconds:.0f} seconds in all" + _reused(report.reused),
    }
    names = [label_of(row.name) for row in comparison.rows]
    return (
        f"<h1>{escape(comparison.title)}</h1>\n"
        '<p class="lead">The same network, trained on the same images in the same way with '
        f"{escape(enumerated(names))} attention: what each variant learns, what it costs, and where it looks.</p>\n"
        f'<div class="scores">{cards}</div>\n{fact_list(facts)}'
    )


def _table(report: Report) -> str:
    rows = report.comparison.rows
    several = len(report.comparison.seeds) > 1
    score = escape(metric_label(report.comparison.metric))
    heads = [("attention", ""), (score, "test images")]
    heads += [(score, "attention off")] if report.without_attention else []
    heads += [("parameters", ""), ("multiply-adds", "per image")]
    heads += [("memory", "training, per image"), ("training", "images/s"), ("inference", "images/s")]
    return (
        "<section>\n<h2>Side by side</h2>\n"
        f"{table(f'<tr>{head_cells(heads)}</tr>', [table_row(_cells(row, report)) for row in rows])}"
        f'<p class="note">{_uncertainty(report)} {"± is the standard deviation over the seeds. " if several else ""}'
        f"{_diverged(rows)}"
        "Operations are counted, including Newton iterations. Speeds are those of the whole network, forward "
        f"(inference) or forward and backward (training), on {thread_count(report.comparison.environment)}, measured "
        "while no other part of this command ran.</p>\n"
        f"<p>{escape(switched_off(rows, report.without_attention))}</p>\n"
        f"<p>{escape(_small_images(report))}</p>\n</section>"
    )


def _learning(report: Report) -> str:
    return (
        f"<section>\n<h2>How they learn</h2>\n{_key(report)}"
        f"{panel_figure(learning_panels(report.comparison, report.colors))}"
        '<p class="note">Accuracy on images that were not used for training, and mean training loss, after each epoch. '
        "The loss is that of randomly cropped and flipped images with smoothed labels. A short training shows that an "
        "attention learns, and how fast; it does not show where a long one would end.</p>\n</section>"
    )


def _costs(report: Report) -> str:
    if not report.scaling:
        return ""
    return (
        f"<section>\n<h2>What one layer costs as images grow</h2>\n{_key(report)}"
        f"{panel_figure(cost_panels(report.scaling, report.colors))}"
        f"<p>{escape(crossings(report.scaling))}</p>\n"
        '<p class="note">One attention layer with 64 channels and 2 heads on random tokens, one for each 8 x 8 patch '
        f"of pixels; forward pass, one image, {thread_count(report.comparison.environment)}, both axes logarithmic. "
        f"{escape(exponents(report.scaling))} A whole network gains less than one layer, because its other layers cost "
        "the same with every attention.</p>\n</section>"
    )


def _maps(report: Report) -> str:
    if not report.examples:
        return ""
    names = list(report.examples[0].maps)
    heads = "".join(f'<div class="head">{escape(text)}</div>' for text in ["image", *map(label_of, names)])
    cells = "".join(_example(example) for example in report.examples)
    rows, columns = _first_map(report.examples).grid_size
    return (
        "<section>\n<h2>Where they look</h2>\n"
        "<p>The framed square is one token, the brightest patch of the image. The colours show how much it takes from "
        "each token in the first layer: warm is more than the average, cool is less.</p>\n"
        f'{SCALE}<figure><div class="maps" style="--columns: {len(names) + 1}">{heads}{cells}</div></figure>\n'
        f"<p>{escape(faint_weights(report.examples))}</p>\n"
        f'<p class="note">Each map is one row of the explicit attention weights in head 1, on the grid of {rows} x '
        f"{columns} tokens, scaled to its largest difference from its mean. The numbers below a map are its smallest "
        "and its largest weight: they tell an almost even map from an uneven one. "
        f"{escape(negative_weights(maps_by_name(report.examples)))} The local convolutions that SOFT and InLine add to "
        "their attention are not part of the weights. The images are the first of their classes, not selected by their "
        "maps. A heat map shows what one layer mixes, not why the network decides as it does.</p>\n</section>"
    )


# pieces


def _uncertainty(report: Report) -> str:
    # the number of other images is not known without opening them
    embedded = report.comparison.recipe["data"]["source"] == "embedded"
    return uncertainty(report.comparison.rows, 1000) if embedded else ""


def _small_images(report: Report) -> str:
    tokens = _first_map(report.examples).values.numel() if report.examples else None
    return small_images(report.comparison.rows, report.comparison.recipe["data"]["image_size"], tokens)


def _data(data: dict[str, Any]) -> str:
    size = f"{data['image_size']} x {data['image_size']} pixels"
    if data["source"] == "embedded":
        return f"Fashion-MNIST, {size}: the 6,000 training and 1,000 test images that come with the package"
    return f"{data['source']}, {size}"


def _reused(names: Sequence[str]) -> str:
    return f"; {escape(enumerated(list(map(label_of, names))))} had been trained by an earlier command" if names else ""


def _diverged(rows: Sequence[VariantResult]) -> str:
    count = sum(len(row.diverged) for row in rows)
    return f"{count} {'run' if count == 1 else 'runs'} diverged without a result. " if count else ""


def _cells(row: VariantResult, report: Report) -> list[str]:
    spread = "" if row.spread is None else f" ± {100 * row.spread:.1f}"
    return [
        f"{dot(report.colors[row.name])}{escape(label_of(row.name))}",
        percent(row.mean) + spread,
        *([percent(report.without_attention.get(row.name))] if report.without_attention else []),
        f"{row.cost.parameters:,}",
        f"{row.cost.macs / 1e6:.2f} M",
        f"{row.cost.peak_bytes / 2**20:.2f} MiB",
        f"{row.cost.train_per_second:,.0f}",
        f"{row.cost.infer_per_second:,.0f}",
    ]


def _example(example: Example) -> str:
    plain = heat_map_svg(example, None, f"test image of class {example.label}, the token framed")
    cells = [f"<div>{plain}<p>{escape(example.label)}</p></div>"]
    for name, heat_map in example.maps.items():
        described = describe_map(heat_map, f"{label_of(name)} on an image of class {example.label}")
        drawn = heat_map_svg(example, heat_map, described)
        predicted, probability = example.predictions[name]
        outcome = "right" if predicted == example.label else "wrong"
        told = verdict(predicted, probability, example.label)
        cells.append(
            f'<div>{drawn}<p class="{outcome}">{escape(told)}</p><p class="range">{weight_range(heat_map)}</p></div>'
        )
    return "".join(cells)


def _first_map(examples: Sequence[Example]) -> HeatMap:
    return next(iter(examples[0].maps.values()))


def _key(report: Report) -> str:
    return color_key({label_of(row.name): report.colors[row.name] for row in report.comparison.rows})


def _parameters(rows: Sequence[VariantResult]) -> str:
    counts = sorted({round(row.cost.parameters / 1000) for row in rows})
    return f"{counts[0]:,} thousand" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,} thousand"
