"""The page about a linearised model: how close it is to its original, layer by layer, what it costs, where it looks."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from softline.linearizing.measuring import Scores
from softline.linearizing.work import Linearized
from softline.measure.measuring import Row
from softline.plotting.colors import COLORS, comparison_colors, label_of
from softline.report.figures import COSTS, CostPoint, Line, describe_map, draw_cost, draw_map, draw_panel, image_element
from softline.report.findings import enumerated, milliseconds, negative_weights, percent, verdict, weight_range
from softline.report.html import (
    INLINE_PAPER,
    SCALE,
    SOFT_PAPER,
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
from softline.report.linearization_findings import (
    CostPair,
    cost_pairs,
    distance,
    failures,
    impossible,
    larger_images,
    layer_effects,
    layer_errors,
    likeness,
    main_size,
    progress,
    scores_at,
    sort_layers,
    speed,
    square,
    step_named,
)
from softline.report.linearization_maps import MapExample

ORIGINAL, LINEARIZED = "original", "linearised"
BEFORE, AFTER = "before transfer", "after transfer"
KEPT = "softmax, kept"
PAPERS = {"soft": SOFT_PAPER, "softpp": SOFT_PAPER, "inline": INLINE_PAPER}
STAGES = {"transfer": "transfer", "finetune": "fine-tuning"}
STEPS = {
    "original": ("original", "as it was"),
    "replaced": ("replaced", "new attention, old weights"),
    "transferred": ("transferred", "each layer trained by itself"),
    "mixed": ("mixed", "some layers as they were"),
    "finetuned": ("fine-tuned", "trained as a whole"),
}
OLD = COLORS["softmax"]
UNTRAINED = "#b8952a"
"""The colour of layers with a new attention that has not learned yet."""
UNKNOWN = "\N{EN DASH}"


def render_linearization(result: Linearized, maps: Sequence[MapExample], *, command: str, seconds: float) -> str:
    """Create the page as HTML. It needs matplotlib.

    maps: what `softline.report.linearization_maps.compare_maps` returned.
    command: the command that made the result.
    seconds: time from its start to the report.
    """
    sections = [
        _headline(result, command, seconds),
        _steps(result),
        _errors(result),
        _effects(result),
        _costs(result),
        _maps(result, maps),
        footer([PAPERS[result.attention]] if result.attention in PAPERS else []),
    ]
    return whole_page(_title(result), sections)


# sections


def _headline(result: Linearized, command: str, seconds: float) -> str:
    count = len(result.replaced) + len(result.kept)
    layers = f"{len(result.replaced)} of its {count} layers" if result.kept else f"all of its {count} layers"
    return (
        f"<h1>{escape(_title(result))}</h1>\n"
        f'<p class="lead">A trained classifier got {escape(label_of(result.attention))} attention in place of softmax '
        f"attention in {layers}, and was trained to answer as it did before. This page shows how close it comes to the "
        "original, layer by layer, and what it costs.</p>\n"
        f'<div class="scores">{"".join(_cards(result))}</div>\n{fact_list(_facts(result, command, seconds))}'
    )


def _steps(result: Linearized) -> str:
    labelled = any(scores.top1 is not None for step in result.steps for scores in step.scores)
    metrics = [*(["top-1"] if labelled else []), "agreement", "divergence"]
    sizes = [scores.size for scores in result.steps[0].scores]
    groups = "".join(f'<th class="edge" colspan="{len(metrics)}">{square(size)}</th>' for size in sizes)
    heads = _group("th", metrics) * len(sizes)
    head = f"<tr><th></th>{groups}</tr><tr><th></th>{heads}</tr>"
    rows = []
    for step in result.steps:
        name, meaning = STEPS[step.name]
        cells = "".join(_score_cells(scores, labelled) for scores in step.scores)
        rows.append(f"<tr><td>{name}<small>{meaning}</small></td>{cells}</tr>")
    top1 = "Top-1 is the share of the validation images that get the right class. " if labelled else ""
    return (
        "<section>\n<h2>Step by step</h2>\n"
        f'<div class="steps">{table(head, rows)}</div>\n'
        f"{_paragraph(distance(result), progress(result), larger_images(result), failures(result))}"
        f'<p class="note">{top1}Agreement is the share of the validation images that get the same class as from the '
        "original at the same size. Divergence is the mean Kullback-Leibler divergence of the probabilities from the "
        "original's: 0 if they are the same.</p>\n</section>"
    )


def _errors(result: Linearized) -> str:
    found = {BEFORE: step_named(result, "replaced"), AFTER: step_named(result, "transferred", "mixed")}
    errors = {name: step.errors for name, step in found.items() if step is not None and step.errors}
    if not errors:
        return ""
    colors = {BEFORE: UNTRAINED, AFTER: _new_color(result)}
    layers = sort_layers([*result.replaced, *result.kept])
    lines = [_over_layers(name, layers, values) for name, values in errors.items()]
    panel = draw_panel("errors", "relative error", lines, colors, xlabel="layer", from_zero=True)
    heads = [("layer", ""), ("attention now", ""), *(("error", name) for name in errors)]
    rows = [
        table_row([*_layer_cells(result, layer), *(_number(values.get(layer)) for values in errors.values())])
        for layer in layers
    ]
    return (
        f"<section>\n<h2>Layer by layer</h2>\n{color_key({name: colors[name] for name in errors})}"
        f"{_beside(panel, table(f'<tr>{head_cells(heads)}</tr>', rows))}{_paragraph(layer_errors(result))}"
        '<p class="note">Each new attention is given what the old one is given, on the validation images, and their '
        "outputs are compared: the error is the squared length of the difference, divided by that of the old output. 0 "
        "is a perfect copy; 1 is the error of an attention that returns zeros. The figure counts layers from 0, as the "
        "option <code>layers</code> does.</p>\n</section>"
    )


def _effects(result: Linearized) -> str:
    if not result.effects:
        return ""
    new = label_of(result.attention)
    colors = {new: _new_color(result), KEPT: OLD}
    layers = sort_layers([*result.replaced, *result.kept])
    values = {effect.layer: effect.divergence for effect in result.effects}
    lines = [
        _over_layers(name, layers, {layer: value for layer, value in values.items() if layer in group})
        for name, group in ((new, result.replaced), (KEPT, result.kept))
    ]
    panel = draw_panel("effects", "divergence", lines, colors, xlabel="layer replaced alone", bars=True)
    heads = [("layer replaced alone", ""), ("attention now", ""), ("agreement", ""), ("divergence", "")]
    rows = [
        table_row([*_layer_cells(result, one.layer), percent(one.agreement), _number(one.divergence)])
        for one in result.effects
    ]
    return (
        f"<section>\n<h2>Which layers are hardest to replace</h2>\n{color_key(colors)}"
        f"{_beside(panel, table(f'<tr>{head_cells(heads)}</tr>', rows))}{_paragraph(layer_effects(result))}"
        '<p class="note">The original with the new attention in one layer and its own in all others is compared with '
        "the original, on some of the training images. The layers whose replacement changes the output most keep their "
        "attention, as many as were asked for.</p>\n</section>"
    )


def _costs(result: Linearized) -> str:
    if not result.cost:
        return ""
    pairs, panels = cost_pairs(result), _cost_panels(result)
    figure = color_key(_colors(result)) + panel_figure(panels) if panels else ""
    heads = [("image", "pixels"), ("time", ORIGINAL), ("time", LINEARIZED), ("speed", "times the original's")]
    heads += [("memory", ORIGINAL), ("memory", LINEARIZED), ("memory", "times the original's")]
    rounds = max(len(row.rounds) for row in result.cost)
    timing = (
        f"Times are medians of {rounds} rounds, which the models take in turns; ± is half their interquartile range. "
    )
    kept = "Layers that keep softmax attention still cost quadratically. " if result.kept else ""
    return (
        f"<section>\n<h2>What it costs as images grow</h2>\n{figure}{_paragraph(speed(pairs), impossible(pairs))}"
        f"{table(f'<tr>{head_cells(heads)}</tr>', [table_row(_cost_cells(pair)) for pair in pairs])}"
        f'<p class="note">The whole network, forward pass, one image, {thread_count(result.environment)}; both axes of '
        f"the figures are logarithmic. {kept}{timing if rounds else ''}Memory is the peak beyond weights and image, "
        "measured in a process of its own.</p>\n</section>"
    )


def _maps(result: Linearized, maps: Sequence[MapExample]) -> str:
    title = "<section>\n<h2>Where they look</h2>\n"
    if not maps:
        return (
            f"{title}<p>Attention maps are left out. They need images that can be read in any order, and attention "
            "with one weight for each patch of the image, which reduced keys (as in PVTv2) and windows (as in Swin) do "
            "not give.</p>\n</section>"
        )
    layers = list(maps[0].maps)
    heads = "".join(
        f'<div class="pair head"><div>{escape(layer)}</div><span>{ORIGINAL}</span><span>{LINEARIZED}</span></div>'
        for layer in layers
    )
    rows = "".join(_example(example, f"image-{index}") for index, example in enumerate(maps))
    return (
        f"{title}<p>The framed square is one token, the one in the middle of the image, where most photographs have "
        "their object. The colours show how much it takes from each patch: warm is more than the average, cool is "
        f"less. Each pair shows the same layer in the original and in the linearised model.</p>\n{SCALE}"
        f'<figure class="scroll"><div class="maps pairs" style="--layers: {len(layers)}"><div class="head">image</div>'
        f"{heads}{rows}</div></figure>\n{_paragraph(likeness(maps))}"
        f'<p class="note">{escape(_about_maps(result, maps))}</p>\n</section>'
    )


def _about_maps(result: Linearized, maps: Sequence[MapExample]) -> str:
    linear = {label_of(result.attention): [new for example in maps for _, new in example.maps.values()]}
    windows = result.replaced[0] not in maps[0].maps
    sentences = [
        "Each map is one row of the explicit attention weights, averaged over the heads, without class tokens, and "
        "scaled to its largest difference from its mean.",
        "The numbers below it are its smallest and largest weight: they tell an almost even map from an uneven one.",
        "Layers that attend inside windows are left out." if windows else "",
        negative_weights(linear),
        "The model has learned to return what the original returns, not to have the same weights, and the local "
        "convolutions that SOFT and InLine add to their attention are not part of the weights: maps may differ where "
        "outputs agree.",
    ]
    return " ".join(filter(None, sentences))


# pieces


def _title(result: Linearized) -> str:
    return f"{_last_recipe(result)['model']['name']} with {label_of(result.attention)} attention"


def _last_recipe(result: Linearized) -> dict[str, Any]:
    return list(result.recipes.values())[-1]


def _new_color(result: Linearized) -> str:
    return comparison_colors([result.attention])[result.attention]


def _colors(result: Linearized) -> dict[str, str]:
    return {ORIGINAL: OLD, LINEARIZED: _new_color(result)}


def _cards(result: Linearized) -> list[str]:
    size = main_size(result)
    if size is None:
        return []
    before, after = (scores_at(step, size) for step in (result.steps[0], result.steps[-1]))
    color = _new_color(result)
    agreement = score_card("Agreement", percent(after.agreement), "of the images get the original's class", color)
    if before.top1 is None or after.top1 is None:
        return [agreement]
    top1 = f"top-1 at {square(size)}"
    original = score_card("Original", percent(before.top1), top1, OLD)
    return [original, score_card("Linearised", percent(after.top1), top1, color), agreement]


def _facts(result: Linearized, command: str, seconds: float) -> dict[str, str]:
    recipe = _last_recipe(result)
    options = ", ".join(f"{key}={value}" for key, value in recipe["model"]["replace"]["options"].items())
    kept = f"; softmax kept in {enumerated(sort_layers(result.kept))}" if result.kept else ""
    stages = [f"{STAGES[stage]} for {_epochs(each)}" for stage, each in result.recipes.items()]
    return {
        "Command": f"<code>{escape(command)}</code>",
        "Model": f"<code>{escape(recipe['model']['name'])}</code> from <code>{escape(result.source)}</code>",
        "Attention": escape(label_of(result.attention) + (f" ({options})" if options else "")),
        "Layers": escape(f"{len(result.replaced)} replaced{kept}"),
        "Training": f"{enumerated(stages)}; {result.images:,} images in all, repetitions included",
        "Images": f"<code>{escape(recipe['data']['source'])}</code>, {square(recipe['data']['image_size'])}",
        **machine_facts(result.environment),
        "Saved as": f"<code>{escape(result.checkpoint)}</code>",
        "Took": f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:,.0f} minutes",
    }


def _epochs(recipe: dict[str, Any]) -> str:
    count = recipe["schedule"]["epochs"]
    return "1 epoch" if count == 1 else f"{count:g} epochs"


def _score_cells(scores: Scores, labelled: bool) -> str:
    if scores.agreement is None:
        return f'<td class="edge quiet" colspan="{2 + labelled}">not possible</td>'
    cells = [percent(scores.agreement), _number(scores.divergence)]
    if labelled:
        cells.insert(0, UNKNOWN if scores.top1 is None else percent(scores.top1))
    return _group("td", cells)


def _group(tag: str, cells: Sequence[str]) -> str:
    """Cells of neighbouring columns, set off from those before."""
    first, *others = cells
    return f'<{tag} class="edge">{first}</{tag}>' + "".join(f"<{tag}>{cell}</{tag}>" for cell in others)


def _layer_cells(result: Linearized, layer: str) -> list[str]:
    kept = layer in result.kept
    attention = KEPT if kept else label_of(result.attention)
    return [escape(layer), f"{dot(OLD if kept else _new_color(result))}{escape(attention)}"]


def _over_layers(name: str, layers: Sequence[str], values: Mapping[str, float]) -> Line:
    known = [layer for layer in layers if layer in values]
    return Line(name, [layers.index(layer) for layer in known], [values[layer] for layer in known])


def _beside(panel: str, numbers: str) -> str:
    return f'<figure class="beside"><div class="panels">{panel}</div>{numbers}</figure>\n'


def _cost_panels(result: Linearized) -> list[str]:
    """Draw what was measured."""
    values: dict[str, Callable[[Row], float | None]] = {
        "time": lambda row: row.milliseconds,
        "operations": lambda row: row.macs,
        "memory": lambda row: row.peak_bytes,
    }
    panels = []
    for cost in COSTS:
        points = [
            CostPoint(name, row.tokens, row.size, value)
            for pair in cost_pairs(result)
            for name, row in zip((ORIGINAL, LINEARIZED), pair, strict=True)
            if (value := values[cost](row))
        ]
        panels += [draw_cost(cost, points, _colors(result))] if points else []
    return panels


def _cost_cells(pair: CostPair) -> list[str]:
    before, after = pair
    memory = [None if row.peak_bytes is None else row.peak_bytes / 2**20 for row in pair]
    share = memory[1] / memory[0] if memory[0] and memory[1] else None
    return [
        escape(after.label.replace("x", " x ")),
        _time(before),
        _time(after),
        UNKNOWN if after.speedup is None else f"{after.speedup:.2f}",
        *(UNKNOWN if value is None else f"{value:,.1f} MiB" for value in memory),
        UNKNOWN if share is None else f"{share:.2f}",
    ]


def _time(row: Row) -> str:
    if row.milliseconds is None:
        return "failed" if row.failure else UNKNOWN
    spread = "" if row.spread is None else f" ± {100 * row.spread / row.milliseconds:.0f} %"
    return milliseconds(row.milliseconds) + spread


def _example(example: MapExample, name: str) -> str:
    """
    name: an id for the image, which all maps share.
    """
    named = example.label or Path(example.name).name
    framed = next(iter(example.maps.values()))[0]
    element = image_element(example.image, name=name)
    image = draw_map(element, example.image, None, f"validation image, {named}, the token framed", framed=framed)
    cells = [
        f"<div>{image}<p>{escape(named)}</p>{_verdict(ORIGINAL, example.predictions[0], example.label)}"
        f"{_verdict(LINEARIZED, example.predictions[1], example.label)}</div>"
    ]
    for layer, pair in example.maps.items():
        drawn = []
        for model, heat_map in zip((ORIGINAL, LINEARIZED), pair, strict=True):
            described = describe_map(heat_map, f"{model} model, {layer}, validation image, {named}")
            svg = draw_map(f'<use href="#{name}"/>', example.image, heat_map, described, framed=heat_map)
            drawn.append(f'<div>{svg}<p class="range">{weight_range(heat_map)}</p></div>')
        cells.append(f'<div class="pair">{"".join(drawn)}</div>')
    return "".join(cells)


def _verdict(model: str, prediction: tuple[str, float], label: str | None) -> str:
    text = verdict(*prediction, label)
    for old, new in (("✓ ", "✓\N{NO-BREAK SPACE}"), ("✗ ", "✗\N{NO-BREAK SPACE}"), (" %", "\N{NO-BREAK SPACE}%")):
        text = text.replace(old, new)
    return f'<p class="{"wrong" if label not in (None, prediction[0]) else "right"}">{model}: {escape(text)}</p>'


def _paragraph(*sentences: str) -> str:
    text = " ".join(sentence for sentence in sentences if sentence)
    return f"<p>{escape(text)}</p>\n" if text else ""


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"
