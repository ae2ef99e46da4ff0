"""``softline quickstart``: train three attentions on real images in minutes, with a report."""

import argparse
import dataclasses
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from softline.cli.arguments import Parser, add_attentions, place
from softline.cli.outputs import held_outputs
from softline.cli.progress import Progress
from softline.files import write_json, write_text

if TYPE_CHECKING:
    from softline.experiments.quickstart import QuickstartRuns
    from softline.measure.scaling import ScalingRow

REPORT = "report.html"


def add_arguments(parser: Parser) -> None:
    parser.describe(
        """Train one small network with each attention on the 6,000 images in the package, from scratch and offline, and
        write a report with accuracies, costs, learning curves and attention heat maps. This takes about two minutes on
        two cores."""
    )
    parser.add_argument(
        "--output",
        type=place,
        default=Path("runs/quickstart"),
        metavar="DIR",
        help="directory for the report and the trained models (default: runs/quickstart); if it has a report already, "
        "DIR-2, DIR-3, ... is used instead, and an interrupted quick start is continued",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of the trainings (default: 0)")
    add_attentions(parser)
    parser.add_argument(
        "--json", type=place, metavar="PATH", help="file for the numbers (default: quickstart.json in the directory)"
    )
    parser.set_defaults(run=run)


def run(
    options: argparse.Namespace,
    *,
    overrides: Sequence[str] = (),
    image_sizes: Sequence[int] = (112, 224, 448, 896),
    jobs: int | None = None,
) -> None:
    """
    overrides: keys of the recipe.
    image_sizes: sizes at which the cost of one layer is measured.
    jobs: number of trainings at a time; defaults to one for each core.
    """
    # a missing package should be reported before the training
    import matplotlib  # noqa: F401

    output = free_directory(options.output)
    unfinished = output.exists()
    with held_outputs(options.json, directory=output):
        _announce(options, output, unfinished=unfinished)
        _quickstart(options, output, overrides, image_sizes, jobs or min(os.cpu_count() or 1, len(options.attentions)))


def _quickstart(
    options: argparse.Namespace, output: Path, overrides: Sequence[str], image_sizes: Sequence[int], jobs: int
) -> None:
    from softline.cli.compare import comparison_table
    from softline.experiments.quickstart import scores_without_attention, validation_images
    from softline.report.examples import compare_attention
    from softline.report.page import Report, render

    begin = time.monotonic()
    trained = _train(options, output, overrides, jobs)
    comparison, checkpoints = trained.comparison, trained.checkpoints
    print(f"\n{comparison_table(comparison)}\n", flush=True)
    without = scores_without_attention(comparison, checkpoints)
    listed = "  ".join(f"{name} {100 * value:.2f}" for name, value in without.items())
    print(f"top-1 % of the trained models with their attention switched off:\n  {listed}\n", flush=True)
    scaling = _measure(options.attentions, image_sizes)
    report = Report(
        comparison=comparison,
        scaling=scaling,
        examples=compare_attention(checkpoints, validation_images(comparison)),
        command=command_line(options),
        seconds=time.monotonic() - begin,
        without_attention=without,
        reused=trained.reused,
    )
    results = options.json or output / "quickstart.json"
    rows = [dataclasses.asdict(row) for row in scaling]
    write_json(results, {"comparison": comparison.to_dict(), "top1_without_attention": without, "scaling": rows})
    write_text(output / REPORT, render(report))
    print(f"models and logs: {output}\nnumbers: {results}\nopen in a browser: {(output / REPORT).resolve()}")


def free_directory(output: Path) -> Path:
    """Return the first of ``output``, ``output-2``, ``output-3``, ... without a report, so that none is overwritten."""
    candidate, count = output, 1
    while (candidate / REPORT).exists():
        count += 1
        candidate = output.with_name(f"{output.name}-{count}")
    return candidate


def command_line(options: argparse.Namespace) -> str:
    """Return the command that repeats this one, with its defaults spelled out."""
    parts = ["softline", "quickstart", "--attentions", ",".join(options.attentions), "--seed", str(options.seed)]
    return shlex.join(parts)


def _announce(options: argparse.Namespace, output: Path, *, unfinished: bool) -> None:
    print(f"Training one small network with {', '.join(options.attentions)} attention on the images of the package.")
    if output != options.output:
        print(f"{options.output} contains an earlier report, which is kept: this one goes to {output}")
    elif unfinished:
        print(f"{output} contains an unfinished quick start, which is continued")


def _train(options: argparse.Namespace, output: Path, overrides: Sequence[str], jobs: int) -> "QuickstartRuns":
    from softline.experiments.quickstart import train_attentions

    with Progress(runs=len(options.attentions)) as progress:
        progress.show("", "measuring the cost of the models")
        return train_attentions(
            options.attentions,
            output=output,
            seed=options.seed,
            overrides=overrides,
            jobs=jobs,
            progress=progress.hear_run,
        )


def _measure(attentions: Sequence[str], image_sizes: Sequence[int]) -> "list[ScalingRow]":
    from softline.measure.scaling import measure_scaling

    print(f"one layer on images of {', '.join(map(str, image_sizes))} pixels [ms]:", flush=True)
    rows: list[ScalingRow] = []
    for group in measure_scaling(attentions, image_sizes):
        rows += group
        costs = "  ".join(f"{row.attention} {row.milliseconds:.1f}" for row in group)
        print(f"  {group[0].image_size:>5}  {costs}", flush=True)
    print()
    return rows
