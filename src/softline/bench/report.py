"""A comparison as one HTML file that needs nothing else: table, learning curves, costs, heat maps, what they mean."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from softline.bench.compare import Comparison, Row
from softline.bench.figure import COLORS
from softline.bench.heatmaps import Example, HeatMap
from softline.bench.report_figures import color_of, cost_panels, heat_map_svg, label_of, learning_panels
from softline.bench.scaling import ScalingRow, growth_exponent


@dataclass(frozen=True)
class Report:
    comparison: Comparison
    """The first row is what the others are compared with."""
    scaling: Sequence[ScalingRow]
    examples: Sequence[Example]
    command: str
    seconds: float
    """From the start of the command to the report."""
    reused: Sequence[str] = ()
    """Rows that an earlier command had trained already."""


def render(report: Report) -> str:
    """The page. Needs matplotlib."""
    style = (files("softline") / "bench" / "report.css").read_text()
    title = escape(report.comparison.title)
    sections = [_headline(report), _table(report), _learning(report), _costs(report), _maps(report), _footer()]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title} - softline</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body>\n</html>\n"
    )


# sections


def _headline(report: Report) -> str:
    comparison, recipe = report.comparison, report.comparison.recipe
    cards = "".join(
        f'<div class="score" style="{_hue(row.name, report)}"><span class="name">{escape(label_of(row.name))}</span>'
        f"<b>{percent(row.mean)}</b><span>top-1 on the test images</span></div>"
        for row in comparison.rows
    )
    machine = comparison.environment
    epochs = recipe["schedule"]["epochs"]
    facts = {
        "Command": f"<code>{escape(report.command)}</code>",
        "Model": f"<code>{escape(recipe['model']['name'])}</code>, {_parameters(comparison.rows)} parameters, "
        f"trained from scratch for {epochs:g} epochs, seed {', '.join(map(str, comparison.seeds))}",
        "Images": escape(_data(recipe["data"])),
        "Machine": escape(f"{machine['cpu']}, {machine['cores']} cores"),
        "Versions": escape(f"softline {machine['softline']}, torch {machine['torch']}, Python {machine['python']}"),
        "Took": f"{report.seconds:.0f} seconds in all" + _reused(report.reused),
    }
    listed = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts.items())
    names = [label_of(row.name) for row in comparison.rows]
    return (
        f"<h1>{escape(comparison.title)}</h1>\n"
        '<p class="lead">The same network, trained on the same images in the same way with '
        f"{escape(enumerate_(names))} attention: what each learns, what it costs, and where it looks.</p>\n"
        f'<div class="scores">{cards}</div>\n<dl>{listed}</dl>'
    )


def _table(report: Report) -> str:
    rows = report.comparison.rows
    several = len(report.comparison.seeds) > 1
    heads = [("attention", ""), ("top-1", "test images"), ("parameters", ""), ("multiply-adds", "an image")]
    heads += [("memory", "training, an image"), ("training", "images/s"), ("inference", "images/s")]
    head = "".join(f"<th>{name}{f'<small>{unit}</small>' if unit else ''}</th>" for name, unit in heads)
    body = "".join(f"<tr>{_cells(row, report)}</tr>" for row in rows)
    return (
        '<section>\n<h2>Side by side</h2>\n<div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>\n"
        f'<p class="note">{_uncertainty(report)} {"± is the standard deviation over the seeds. " if several else ""}'
        f"{_diverged(rows)}"
        "Operations are counted, Newton iterations included. Speeds are those of the whole network on random images of "
        f"this size, forward (inference) and forward and backward (training), with "
        f"{report.comparison.environment['threads']} threads, measured while nothing else of this command ran.</p>\n"
        f"{_small_images(report)}</section>"
    )


def _learning(report: Report) -> str:
    panels = "".join(learning_panels(report.comparison))
    return (
        f"<section>\n<h2>How they learn</h2>\n{_key(report)}"
        f'<figure><div class="panels">{panels}</div></figure>\n'
        '<p class="note">After each epoch: accuracy on images that were not trained on, and the mean loss of the '
        "epoch, on randomly cropped and flipped images and smoothed labels. A short training shows that an attention "
        "learns, and how soon; it does not show where it would end.</p>\n</section>"
    )


def _costs(report: Report) -> str:
    if not report.scaling:
        return ""
    return (
        f"<section>\n<h2>What one layer costs as images grow</h2>\n{_key(report)}"
        f'<figure><div class="panels">{"".join(cost_panels(report.scaling))}</div>\n</figure>\n'
        f"<p>{_crossings(report.scaling)}</p>\n"
        '<p class="note">One attention layer of 64 channels and 2 heads on random tokens, one for each patch of 8 x 8 '
        f"pixels; forward pass, one image, {report.comparison.environment['threads']} threads, both axes logarithmic. "
        f"{_exponents(report.scaling)} A whole network also has layers that cost the same for every attention: "
        "it gains less than one layer does.</p>\n</section>"
    )


def _maps(report: Report) -> str:
    if not report.examples:
        return ""
    names = list(report.examples[0].maps)
    heads = "".join(f'<div class="head">{escape(text)}</div>' for text in ["image", *map(label_of, names)])
    cells = "".join(_example(example) for example in report.examples)
    rows, columns = _first_map(report.examples).row.shape
    return (
        "<section>\n<h2>Where they look</h2>\n"
        "<p>The framed square is one token, the brightest patch of the image. The colours tell how much it takes from "
        "every token in the first layer: warm is more than the average, cool is less.</p>\n"
        '<div class="scale"><span>less</span><i></i><span>more than the average</span></div>\n'
        f'<figure><div class="maps" style="--columns: {len(names) + 1}">{heads}{cells}</div></figure>\n'
        f'<p class="note">Each map is one row of the explicit attention weights, of head 1, on the grid of {rows} x '
        f"{columns} tokens, stretched to its own largest difference from its mean; the numbers under it are the "
        "smallest and the largest weight, so that a map that is almost even can be told from one that is not. "
        f"{_negative(report.examples)}The local convolutions that SOFT and InLine add to their attention are not in "
        "the weights. The images are the first of their classes, not chosen by how they look. A heat map shows what "
        "one layer mixes, not why the network decides as it does.</p>\n</section>"
    )


def _footer() -> str:
    return (
        "<footer>SOFT and SOFT++: "
        '<a href="https://arxiv.org/abs/2207.03341">Softmax-free Linear Transformers</a>. InLine: '
        '<a href="https://arxiv.org/abs/2412.06590">Bridging the Divide: Reconsidering Softmax and Linear '
        'Attention</a>. Images: <a href="https://arxiv.org/abs/1708.07747">Fashion-MNIST</a>. '
        "This file needs no network.</footer>"
    )


# what the numbers say


def _uncertainty(report: Report) -> str:
    """How far apart two accuracies must be to mean something."""
    images = report.comparison.recipe["data"]["source"] == "embedded"
    best = max((row.mean for row in report.comparison.rows if row.mean is not None), default=None)
    if not images or best is None:
        return ""
    error = 100 * (best * (1 - best) / 1000) ** 0.5
    return (
        f"On 1,000 test images an accuracy of {100 * best:.0f} % has a standard error of {error:.1f} points: "
        "smaller differences mean nothing here."
    )


def _small_images(report: Report) -> str:
    """What the linear attentions gain at the size that was trained."""
    baseline, *others = report.comparison.rows
    if not others:
        return ""
    size = report.comparison.recipe["data"]["image_size"]
    tokens = f" ({_first_map(report.examples).row.numel()} tokens)" if report.examples else ""
    speeds = [
        f"{label_of(row.name)} trains at {row.cost.train_per_second / baseline.cost.train_per_second:.2f} times"
        for row in others
    ]
    return (
        f"<p>At {size} x {size} pixels{tokens} linear cost has next to nothing to save: {escape(enumerate_(speeds))} "
        f"the speed of {escape(label_of(baseline.name))}. What it is for comes with larger images.</p>\n"
    )


def _crossings(rows: Sequence[ScalingRow]) -> str:
    """From which size on each attention is faster than the first, and by how much at the largest."""
    groups = {name: [row for row in rows if row.attention == name] for name in dict.fromkeys(r.attention for r in rows)}
    (first, baseline), *others = groups.items()
    sentences = []
    for name, group in others:
        gains = [base.milliseconds / row.milliseconds for base, row in zip(baseline, group, strict=True)]
        start = next((index for index in range(len(gains)) if min(gains[index:]) > 1), None)
        if start is None:
            sentences.append(f"{label_of(name)} was faster than {label_of(first)} at none of these sizes.")
            continue
        size, largest = group[start].image_size, group[-1].image_size
        memory = baseline[-1].peak_bytes / max(group[-1].peak_bytes, 1)
        sentences.append(
            f"{label_of(name)} was faster than {label_of(first)} from {size} x {size} pixels "
            f"({group[start].tokens:,} tokens) on; at {largest} x {largest} it took "
            f"{group[-1].milliseconds:.3g} ms instead of {baseline[-1].milliseconds:.3g} ms ({gains[-1]:.3g} times as "
            f"fast), with {memory_ratio(memory)}."
        )
    return escape(" ".join(sentences))


def _exponents(rows: Sequence[ScalingRow]) -> str:
    if len({row.tokens for row in rows}) < 2:
        return ""
    parts = []
    for name in dict.fromkeys(row.attention for row in rows):
        mine = [row for row in rows if row.attention == name]
        power = growth_exponent([row.tokens for row in mine], [row.macs for row in mine])
        parts.append(f"{power:.2f} for {label_of(name)}")
    return escape(f"Operations grow with the number of tokens to the power of {enumerate_(parts)}.")


def _negative(examples: Sequence[Example]) -> str:
    """Which attentions have weights below zero in these maps."""
    names = [
        label_of(name)
        for name in examples[0].maps
        if any(float(example.maps[name].row.min()) < 0 for example in examples)
    ]
    if not names:
        return ""
    return escape(f"Weights below zero, which softmax cannot have, occur here in {enumerate_(names)}. ")


def _data(data: dict[str, Any]) -> str:
    size = f"{data['image_size']} x {data['image_size']} pixels"
    if data["source"] == "embedded":
        return f"6,000 for training and 1,000 for testing of Fashion-MNIST, {size}, part of the package"
    return f"{data['source']}, {size}"


def _reused(names: Sequence[str]) -> str:
    return f"; {escape(enumerate_(list(map(label_of, names))))} had been trained by an earlier command" if names else ""


def _diverged(rows: Sequence[Row]) -> str:
    count = sum(len(row.diverged) for row in rows)
    return f"{count} {'run' if count == 1 else 'runs'} diverged, without a result. " if count else ""


# pieces


def _cells(row: Row, report: Report) -> str:
    spread = "" if row.spread is None else f" ± {100 * row.spread:.1f}"
    cells = [
        f"{_dot(row.name, report)}{escape(label_of(row.name))}",
        percent(row.mean) + spread,
        f"{row.cost.parameters:,}",
        f"{row.cost.macs / 1e6:.2f} M",
        f"{row.cost.peak_bytes / 2**20:.2f} MiB",
        f"{row.cost.train_per_second:,.0f}",
        f"{row.cost.infer_per_second:,.0f}",
    ]
    return "".join(f"<td>{cell}</td>" for cell in cells)


def _example(example: Example) -> str:
    plain = heat_map_svg(example, None, f"test image of class {example.label}, the token framed")
    cells = [f"<div>{plain}<p>{escape(example.label)}</p></div>"]
    for name, heat_map in example.maps.items():
        drawn = heat_map_svg(example, heat_map, _describe(name, example, heat_map))
        low, high = float(heat_map.row.min()), float(heat_map.row.max())
        predicted = example.classes[heat_map.predicted]
        right = predicted == example.label
        verdict = f"{'✓' if right else '✗'} {predicted}, {100 * heat_map.probability:.0f} %"
        cells.append(
            f'<div>{drawn}<p class="{"right" if right else "wrong"}">{escape(verdict)}</p>'
            f'<p class="range">{signed(low)} … {signed(high)}</p></div>'
        )
    return "".join(cells)


def _describe(name: str, example: Example, heat_map: HeatMap) -> str:
    row, column = divmod(int(heat_map.row.argmax()), heat_map.row.shape[1])
    return (
        f"{label_of(name)} on an image of class {example.label}: the token in row {heat_map.query[0] + 1}, column "
        f"{heat_map.query[1] + 1} attends most to row {row + 1}, column {column + 1}"
    )


def _first_map(examples: Sequence[Example]) -> HeatMap:
    return next(iter(examples[0].maps.values()))


def _key(report: Report) -> str:
    names = [row.name for row in report.comparison.rows]
    entries = "".join(f"<span>{_dot(name, report)}{escape(label_of(name))}</span>" for name in names)
    return f'<div class="key">{entries}</div>\n'


def _dot(name: str, report: Report) -> str:
    return f'<span class="dot" style="{_hue(name, report)}"></span>'


def _hue(name: str, report: Report) -> str:
    names = [row.name for row in report.comparison.rows]
    return f"--hue: {f'var(--{name})' if name in COLORS else color_of(name, names)}"


def _parameters(rows: Sequence[Row]) -> str:
    counts = sorted({round(row.cost.parameters / 1000) for row in rows})
    return f"{counts[0]:,} thousand" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,} thousand"


def percent(fraction: float | None) -> str:
    return "diverged" if fraction is None else f"{100 * fraction:.1f} %"


def memory_ratio(ratio: float) -> str:
    return f"1/{ratio:.0f} of the memory" if ratio >= 1.5 else f"{1 / ratio:.1f} times the memory"


def signed(value: float) -> str:
    return f"{value:.3g}".replace("-", "\N{MINUS SIGN}")


def enumerate_(parts: Sequence[str]) -> str:
    """As a sentence does."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
