"""``softline compare``: train variants of one model alike and compare them."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from softline.cli.arguments import Parser, check_parent, integers, names
from softline.cli.progress import Progress
from softline.cli.table import format_table, rate
from softline.errors import UserError
from softline.files import make_directory, write_json

if TYPE_CHECKING:
    from softline.engine.recipe import Recipe
    from softline.experiments.compare import Comparison, VariantResult
    from softline.experiments.presets import Preset


def add_arguments(parser: Parser) -> None:
    parser.describe(
        """Train variants of one recipe on the same data and budget, with several seeds. The variants are those of a
        PRESET, which repeats a table of the papers at a small scale, or different attentions. Every key of the recipe
        can be set on the command line, for all variants. A comparison that is started again keeps its finished
        runs.""",
        usage="softline compare [PRESET] [--attentions NAME,...] [--recipe RECIPE] [--seeds N,...] [--jobs N]\n"
        "                        [--output DIR] [--json PATH] [--figure PATH] [--KEY VALUE ...]",
        epilog="""\
            examples:
              softline compare attentions --seeds 0,1,2 --jobs 2
              softline compare --attentions softmax,softpp,inline --schedule.epochs 1
              softline compare inline-kernels --recipe inline_swin_tiny --accumulate 8 --data.source /data/imagenet
            """,
    )
    parser.add_argument("preset", nargs="?", metavar="PRESET", help="name of a preset (default: attentions)")
    parser.add_argument("--list", action="store_true", help="list the presets and exit")
    parser.add_argument(
        "--attentions", type=names, metavar="NAME,...", help="compare these attentions instead of a preset's variants"
    )
    parser.add_argument(
        "--recipe", metavar="RECIPE", help="recipe that the variants change (default: the preset's, else quickstart)"
    )
    parser.add_argument(
        "--seeds", type=integers, default=[0], metavar="N,...", help="random seeds of the runs (default: 0)"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="number of runs at a time (default: 1)")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="directory for the runs (default: runs/compare/PRESET)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="file for the results (default: comparison.json in the directory)"
    )
    parser.add_argument(
        "--figure",
        type=Path,
        metavar="PATH",
        help="file for the figure, .png or .svg (default: comparison.png in the directory)",
    )
    parser.take_overrides()
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from softline.experiments.presets import PRESETS

    if options.list:
        for preset in PRESETS.values():
            print(f"{preset.name:<16} {preset.title} ({preset.reference})")
            print(f"{'':<16} {', '.join(variant.name for variant in preset.variants)}\n")
        return
    preset, recipe = _choose(options)
    output = options.output or Path("runs") / "compare" / preset.name
    check_parent(options.json, options.figure)
    make_directory(output)

    from softline.experiments.compare import compare
    from softline.experiments.figures import plot_comparison

    runs = len(preset.variants) * len(options.seeds)
    print(f"{preset.title}: {runs} runs, to {output}", flush=True)
    with Progress(runs=runs) as progress:
        progress.show("", "measuring the cost of the models")
        comparison = compare(
            recipe,
            preset.variants,
            seeds=options.seeds,
            output=output,
            jobs=options.jobs,
            progress=progress.hear_run,
            title=preset.title,
            reference=preset.reference,
        )
    results, figure = options.json or output / "comparison.json", options.figure or output / "comparison.png"
    write_json(results, comparison.to_dict())
    print(f"\n{comparison_table(comparison)}\n")
    plot_comparison(comparison, figure)
    print(f"results: {results}\nfigure: {figure}")


def _choose(options: argparse.Namespace) -> "tuple[Preset, Recipe]":
    """Return what is compared, and the recipe that the variants change."""
    from softline.engine.reading import load_recipe
    from softline.experiments.presets import Preset, attention_variants, load_preset

    if options.attentions is None:
        return load_preset(options.preset or "attentions", options.recipe, options.overrides)
    if options.preset is not None:
        raise UserError(f"name a preset or --attentions, not both: got {options.preset} and --attentions")
    recipe = options.recipe or Preset.base
    variants = tuple(attention_variants(options.attentions))
    preset = Preset("-".join(options.attentions), f"Attentions in the recipe {recipe}", "", variants)
    return preset, load_recipe(recipe, options.overrides)


def comparison_table(comparison: "Comparison") -> str:
    """Format a comparison, with a line for each variant."""
    from softline.experiments.compare import metric_label

    score = f"{metric_label(comparison.metric)} %"
    header = ["variant", score, "params M", "MMACs", f"KiB/{comparison.unit.removesuffix('s')}*", "train/s", "infer/s"]
    machine = comparison.environment
    threads = f"{machine['threads']} torch thread{'s' if machine['threads'] != 1 else ''}"
    seeds = len(comparison.seeds)
    spread = f"mean ± standard deviation of {seeds} seeds; " if seeds > 1 else "one seed; "
    return "\n".join(
        [
            format_table(header, [_cells(row) for row in comparison.rows]),
            f"{spread}{comparison.unit} per second on {machine['cpu']}, {threads}",
            "* peak memory of a training step, beyond the weights",
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
