"""The page about a linearised model: how close it is to its original, layer by layer, what it costs, where it looks."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from softline.linearizing.linearize import Linearized, Step
from softline.linearizing.measuring import Scores
from softline.measure.measuring import Row
from softline.plotting.colors import COLORS, comparison_colors, label_of
from softline.report.figures import CostPoint, Line, describe_map, draw_cost, draw_map, draw_panel
from softline.report.findings import enumerated, milliseconds, negative_weights, percent, weight_range
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
    layers_in_order,
    likeness,
    main_size,
    progress,
    scores_at,
    speed,
    square,
    step_named,
    training_size,
)
from softline.report.linearization_maps import MapExample

ORIGINAL, LINEARIZED = "original", "linearised"
BEFORE, AFTER = "before transfer", "after transfer"
PAPERS = {"soft": SOFT_PAPER, "softpp": SOFT_PAPER, "inline": INLINE_PAPER}
OLD = COLORS["softmax"]
UNTRAINED = "#b8952a"
"""The colour of layers that have a new attention and have not learned yet."""

STEPS = {
    "original": ("original", "as it was"),
    "replaced": ("replaced", "new attention, old weights"),
    "transferred": ("transferred", "each new layer trained by itself"),
    "mixed": ("mixed", "some layers as they were"),
    "finetuned": ("fine-tuned", "all layers trained together"),
}


def render_linearization(result: Linearized, maps: Sequence[MapExample], *, command: str, seconds: float) -> str:
    """Create the page as HTML. It needs matplotlib.

    maps: what `softline.report.linearization_maps.compare_maps` returned.
    command: the command that made the result.
    seconds: time from its start to the report.
    """
    sections = [
        _headline(result, command, seconds),
        _steps(result),
        _layers(result),
        _costs(result),
        _maps(maps, result),
        footer([PAPERS[result.attention]] if result.attention in PAPERS else []),
    ]
    return whole_page(_title(result), sections)


# sections


def _headline(result: Linearized, command: str, seconds: float) -> str:
    kept = f" The other {len(result.kept)} keep theirs." if result.kept else ""
    return (
        f"<h1>{escape(_title(result))}</h1>\n"
        f'<p class="lead">{escape(_replacement(result))} and the model was trained to do what it did before.{kept} '
        "This page shows how close it comes to the original, and what it costs.</p>\n"
        f'<div class="scores">{"".join(_cards(result))}</div>\n{fact_list(_facts(result, command, seconds))}'
    )


def _steps(result: Linearized) -> str:
    labelled = _labelled(result)
    sizes = [scores.size for scores in result.steps[0].scores]
    columns = ["top-1", "agreement", "divergence"][0 if labelled else 1 :]
    groups = "".join(f'<th class="group" colspan="{len(columns)}">{square(size)}</th>' for size in sizes)
    ...
