"""``softline compare``: train variants of one model alike and compare them."""

import argparse
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from softline.cli.arguments import Parser, check_alone, integers, names, place
from softline.cli.outputs import check_outputs, held_outputs
from softline.cli.progress import Progress
from softline.cli.table import format_table, number, rate
from softline.errors import UserError
from softline.files import write_json

if TYPE_CHECKING:
    from softline.engine.recipe import Recipe
    from softline.experiments.compare import Comparison, VariantResult
    from softline.experiments.model_cost import CountedCost
    from softline.experiments.presets import Preset

# those of softline.experiments.presets
SCALES = ("miniature", "paper")
IMAGENET_CLASSES = 1000


def add_arguments(parser: Parser) -> None:
    parser.describe(
        """Train variants of one recipe on the same data and budget, with several seeds. The variants are those of a
        PRESET, which repeats a table of the papers in miniature or at its own scale, or different attentions. Every key
        of the recipe can be set on the command line, for all variants. A comparison that is started again keeps its
        finished runs.""",
        usage="softline compare [PRESET] [--scale SCALE] [--attentions NAME,...] [--recipe RECIPE] [--cost]\n"
        "                        [--seeds N,...] [--jobs N] [--output DIR] [--json PATH] [--figure PATH]\n"
        "                        [--KEY VALUE ...]",
        epilog="""\
            examples:
              softline compare attentions --seeds 0,1,2 --jobs 2
              softline compare --attentions softmax,softpp,inline --schedule.epochs 1
              softline compare bottleneck --scale paper --cost
              softline compare bottleneck --scale paper --accumulate 8 --data.source /data/imagenet
            """,
    )
    parser.add_argument("preset", nargs="?", metavar="PRESET", help="name of a preset (default: attentions)")
    parser.add_argument("--list", action="store_true", help="list the presets and exit")
    parser.add_argument(
        "--scale",
        choices=SCALES,
        help="the preset in miniature, on the images of the package, or at the paper's scale, on ImageNet "
        "(default: miniature)",
    )
    parser.add_argument(
        "--cost", action="store_true", help="count parameters, multiply-adds and memory, and train nothing"
    )
    parser.add_argument(
        "--attentions", type=names, metavar="NAME,...", help="compare these attentions instead of a preset's variants"
    )
    parser.add_argument(
        "--recipe", metavar="RECIPE", help="recipe that the variants change (default: the preset's, else quickstart)"
    )
    parser.add_argument("--seeds", type=integers, metavar="N,...", help="random seeds of the runs (default: 0)")
    parser.add_argument("--jobs", type=int, metavar="N", help="number of runs at a time (default: 1)")
    parser.add_argument(
        "--output",
        type=place,
        metavar="DIR",
        help="directory for the runs (default: runs/compare/PRESET, or runs/compare/PRESET-paper)",
    )
    parser.add_argument(
        "--json",
        type=place,
        metavar="PATH",
        help="file for the results (default: comparison.json in the directory)",
    )
    parser.add_argument(
        "--figure",
        type=place,
        metavar="PATH",
        help="file for the figure, .png, .svg or .pdf (default: comparison.png in the directory)",
    )
    parser.take_overrides()
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    if options.list:
        given = [options.preset, options.recipe, options.scale, options.attentions, options.seeds, options.jobs]
        check_alone("--list", [*given, options.output, options.json, options.figure, *options.overrides])
        _list()
        return
    preset, recipe = _choose(options)
    if options.cost:
        _count(options, preset, recipe)
        return
    paper = "-paper" if options.scale == "paper" else ""
    output = options.output or Path("runs") / "compare" / f"{preset.name}{paper}"
    # a missing package should be reported before the training
    import matplotlib  # noqa: F401

    with held_outputs(options.json, figure=options.figure, directory=output):
        _compare(options, preset, recipe, output)


def _list() -> None:
    from softline.experiments.presets import PRESETS

    for preset in PRESETS.values():
        print(f"{preset.name:<17} {preset.title} ({preset.reference})")
        for scale, variants in (("miniature", preset.variants), ("paper", preset.paper)):
            if variants:
                print(f"{'':<17} {scale}: {', '.join(variant.name for variant in variants)}")
        print()


def _compare(options: argparse.Namespace, preset: "Preset", recipe: "Recipe", output: Path) -> None:
    from softline.experiments.compare import compare
    from softline.experiments.figures import plot_comparison

    seeds = [0] if options.seeds is None else options.seeds
    runs = len(preset.variants) * len(seeds)
    print(f"{preset.title}: {runs} runs, to {output}", flush=True)
    with Progress(runs=runs) as progress:
        progress.show("", "measuring the cost of the models")
        comparison = compare(
            recipe,
            preset.variants,
            seeds=seeds,
            output=output,
            jobs=1 if options.jobs is None else options.jobs,
            progress=progress.hear_run,
            title=preset.title,
            reference=preset.reference,
        )
    results, figure = options.json or output / "comparison.json", options.figure or output / "comparison.png"
    write_json(results, comparison.to_dict())
    print(f"\n{comparison_table(comparison)}\n")
    plot_comparison(comparison, figure)
    print(f"results: {results}\nfigure: {figure}")


def _count(options: argparse.Namespace, preset: "Preset", recipe: "Recipe") -> None:
    """Count what the variants cost, and print it beside what the paper prints."""
    for name in ("seeds", "jobs", "output", "figure"):
        if getattr(options, name) is not None:
            raise UserError(f"--cost trains nothing: --{name} has no effect, leave it out")
    check_outputs(options.json)

    from dataclasses import asdict

    from softline.engine.reading import to_dict
    from softline.experiments.compare import count_costs

    # the classes of ImageNet-1K are known without it
    classes = IMAGENET_CLASSES if options.scale == "paper" and options.recipe is None else None
    count = len(preset.variants)
    with Progress() as progress:
        costs = count_costs(
            recipe,
            preset.variants,
            classes=classes,
            progress=lambda name, done: progress.show("", f"[{done + 1}/{count}] {name}", done=done, total=count),
        )
    reference = f" ({preset.reference})" if preset.reference else ""
    print(f"{preset.title}{reference}\n\n{cost_table(preset, costs)}")
    if options.json is not None:
        rows = [
            {"name": variant.name, "changes": variant.changes}
            | {"cost": asdict(costs[variant.name]), "printed": variant.printed._asdict()}
            for variant in preset.variants
        ]
        described = {"title": preset.title, "reference": preset.reference, "note": preset.note}
        write_json(options.json, {**described, "recipe": to_dict(recipe), "rows": rows})
        print(f"results: {options.json}")


def _choose(options: argparse.Namespace) -> "tuple[Preset, Recipe]":
    """Return what is compared, and the recipe that the variants change."""
    from softline.engine.reading import load_recipe
    from softline.experiments.presets import Preset, attention_variants, load_preset

    if options.attentions is None:
        name = "attentions" if options.preset is None else options.preset
        return load_preset(name, options.recipe, options.overrides, scale=options.scale or "miniature")
    if options.preset is not None:
        raise UserError(f"name a preset or --attentions, not both: got {options.preset} and --attentions")
    if options.scale is not None:
        raise UserError(
            f"--scale {options.scale} has no effect: --attentions names no preset; choose a --recipe instead"
        )
    recipe = options.recipe or Preset.base
    variants = tuple(attention_variants(options.attentions))
    preset = Preset("-".join(options.attentions), f"Attentions in the recipe {recipe}", "", variants)
    return preset, load_recipe(recipe, options.overrides)


def cost_table(preset: "Preset", costs: "Mapping[str, CountedCost]") -> str:
    """Format counted costs, with a line for each variant and columns for what the paper prints."""
    printed = [variant.printed for variant in preset.variants]
    columns = {"variant": [variant.name for variant in preset.variants]}
    counted = [costs[variant.name] for variant in preset.variants]
    columns["params M"] = [f"{cost.parameters / 1e6:.2f}" for cost in counted]
    columns["params M*"] = [number(row.millions, "g") for row in printed]
    columns["GMACs"] = [f"{cost.macs / 1e9:.3f}" for cost in counted]
    if any(cost.newton_macs for cost in counted):
        columns["no Newton"] = [f"{(cost.macs - cost.newton_macs) / 1e9:.3f}" for cost in counted]
    columns["GMACs*"] = [number(row.gmacs, ".1f") for row in printed]
    columns["MiB/image"] = [f"{cost.image_bytes / 2**20:,.1f}" for cost in counted]
    columns["top-1 %*"] = [number(row.top1, ".1f") for row in printed]
    # a column without numbers says nothing
    shown = {name: cells for name, cells in columns.items() if set(cells) != {"-"}}
    lines = [format_table(list(shown), list(zip(*shown.values(), strict=True)))]
    lines.append("GMACs: of the forward pass; MiB/image: memory of each further image in a training step, in float32")
    if "no Newton" in shown:
        lines.append("no Newton: GMACs without Newton's iterations, which the SOFT paper leaves out")
    if any(name.endswith("*") for name in shown):
        lines.append("* as printed, not measured here")
    return "\n".join([*lines, *textwrap.wrap(preset.note, 100)])


def comparison_table(comparison: "Comparison") -> str:
    """Format a comparison, with a line for each variant."""
    from softline.experiments.compare import metric_label

    score = f"{metric_label(comparison.metric)} %"
    header = ["variant", score, "params M", "MMACs", f"KiB/{comparison.unit.removesuffix('s')}*", "train/s", "infer/s"]
    printed = [row.printed_top1 for row in comparison.rows]
    rows = [_cells(row) for row in comparison.rows]
    notes = ["* peak memory of a training step, beyond the weights"]
    if any(top1 is not None for top1 in printed):
        header.append("paper %")
        rows = [[*cells, number(top1, ".1f")] for cells, top1 in zip(rows, printed, strict=True)]
        notes.append("paper: top-1 as printed")
    machine = comparison.environment
    threads = f"{machine['threads']} torch thread{'s' if machine['threads'] != 1 else ''}"
    seeds = len(comparison.seeds)
    spread = f"mean ± standard deviation of {seeds} seeds; " if seeds > 1 else "one seed; "
    return "\n".join(
        [
            format_table(header, rows),
            f"{spread}{comparison.unit} per second on {machine['cpu']}, {threads}",
            *notes,
        ]
    )


def _cells(row: "VariantResult") -> list[str]:
    cost = row.cost
    return [
        row.name,
        _score(row),
        f"{cost.parameters / 1e6:.2f}",
        f"{cost.macs / 1e6:,.1f}",
        f"{cost.peak_bytes / 2**10:,.0f}",
        rate(cost.train_per_second),
        rate(cost.infer_per_second),
    ]


def _score(row: "VariantResult") -> str:
    if row.mean is None:
        return f"diverged at step {', '.join(str(run.step) for run in row.diverged)}"
    text = f"{100 * row.mean:.2f}" + ("" if row.spread is None else f" ± {100 * row.spread:.2f}")
    return f"{text} ({len(row.diverged)} diverged)" if row.diverged else text
