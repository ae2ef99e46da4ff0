"""``softline quickstart``: three attentions trained on real images in minutes, with a report to look at."""

import argparse
import dataclasses
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softline.cli.arguments import Commands, add_attentions, check_parent

if TYPE_CHECKING:
    from softline.data.images import ImageSource
    from softline.experiments.compare import Comparison
    from softline.measure.scaling import ScalingRow

REPORT = "report.html"


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "quickstart",
        help="train softmax, SOFT++ and InLine on real images, with a report, in about two minutes",
        description="Train one small network with each attention on the 6,000 images of the package, from scratch and "
        "offline, and write a report: accuracy, cost, learning curves, what a layer costs on large images, and "
        "attention heat maps. Takes about two minutes on two cores.",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/quickstart"),
        metavar="DIR",
        help="where the report and the trained models go (default: runs/quickstart); if a report is there already, "
        "DIR-2, DIR-3, ... is taken instead, and an interrupted quickstart is continued",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the trainings (default: 0)")
    add_attentions(parser)
    parser.add_argument("--json", type=Path, metavar="PATH", help="of the numbers (default: DIR/quickstart.json)")
    parser.set_defaults(run=run)


def run(
    options: argparse.Namespace,
    *,
    overrides: Sequence[str] = (),
    image_sizes: Sequence[int] = (112, 224, 448, 896),
    jobs: int | None = None,
) -> None:
    """
    overrides: of the recipe.
    image_sizes: at which the cost of one layer is measured.
    jobs: trainings at a time; one for each core by default.
    """
    # what is missing is better found out before the training
    import matplotlib  # noqa: F401

    from softline.cli.compare import comparison_table
    from softline.files import write_json, write_text
    from softline.report.examples import compare_attention
    from softline.report.page import Report, render

    begin = time.monotonic()
    check_parent(options.json)
    output = free_directory(options.output)
    comparison, reused = _train(options, output, overrides, jobs or min(os.cpu_count() or 1, len(options.attentions)))
    print(f"\n{comparison_table(comparison)}\n", flush=True)
    checkpoints, source = _checkpoints(comparison, output), _test_images(comparison)
    without = _switch_off(checkpoints, source)
    scaling = _measure(options.attentions, image_sizes)
    report = Report(
        comparison=comparison,
        scaling=scaling,
        examples=compare_attention(checkpoints, source),
        command=command_line(options),
        seconds=time.monotonic() - begin,
        without_attention=without,
        reused=reused,
    )
    results = options.json or output / "quickstart.json"
    rows = [dataclasses.asdict(row) for row in scaling]
    write_json(results, {"comparison": comparison.to_dict(), "top1_without_attention": without, "scaling": rows})
    write_text(output / REPORT, render(report))
    print(f"models and logs: {output}\nnumbers: {results}\nopen in a browser: {(output / REPORT).resolve()}")


def free_directory(output: Path) -> Path:
    """``output``, or ``output-2``, ``output-3``, ...: the first without a report. Nothing is overwritten."""
    candidate, count = output, 1
    while (candidate / REPORT).exists():
        count += 1
        candidate = output.with_name(f"{output.name}-{count}")
    return candidate


def command_line(options: argparse.Namespace) -> str:
    """What repeats this, whatever the defaults become."""
    parts = ["softline", "quickstart", "--attentions", ",".join(options.attentions), "--seed", str(options.seed)]
    return shlex.join(parts)


def _train(
    options: argparse.Namespace, output: Path, overrides: Sequence[str], jobs: int
) -> "tuple[Comparison, list[str]]":
    """The comparison, and what was not trained now, or not from the start."""
    from softline.cli.compare import RunsProgress
    from softline.engine.events import Started
    from softline.engine.reading import load_recipe
    from softline.experiments.compare import compare
    from softline.experiments.presets import attention_variants
    from softline.experiments.runs import Finished

    variants = attention_variants(options.attentions)
    recipe = load_recipe("quickstart", overrides)
    _announce(options, output)
    reused: list[str] = []
    with RunsProgress(len(variants)) as progress:

        def hear(name: str, seed: int, event: Any) -> None:
            if (isinstance(event, Finished) and event.reused) or (isinstance(event, Started) and event.start_step):
                reused.append(name)
            progress(name, seed, event)

        comparison = compare(
            recipe,
            variants,
            seeds=[options.seed],
            output=output,
            jobs=jobs,
            progress=hear,
            title="Linear attention, first look",
            reference="",
        )
    return comparison, reused


def _announce(options: argparse.Namespace, output: Path) -> None:
    print(f"Training one small network with {', '.join(options.attentions)} attention on the images of the package.")
    if output != options.output:
        print(f"{options.output} holds an earlier report, which stays: this one goes to {output}")
    elif output.exists():
        print(f"{output} holds an unfinished quickstart: what is done there is kept, the rest goes on")


def _checkpoints(comparison: "Comparison", output: Path) -> dict[str, Path]:
    """Of the runs that did not diverge before their first."""
    from softline.engine.checkpoint import LAST

    (seed,) = comparison.seeds
    paths = {row.name: output / row.name / f"seed{seed}" / LAST for row in comparison.rows}
    return {name: path for name, path in paths.items() if path.exists()}


def _test_images(comparison: "Comparison") -> "ImageSource":
    from softline.data.images import ImageSource, open_source

    data = comparison.recipe["data"]
    source = open_source(data["source"], data["val_split"], root=data["root"])
    assert isinstance(source, ImageSource), "the images of the package can be read in any order"
    return source


def _switch_off(checkpoints: Mapping[str, Path], source: "ImageSource") -> dict[str, float]:
    """What the trained models reach without their attention."""
    from softline.experiments.ablation import attention_off, top1
    from softline.tasks.loading import load_trained

    found = {}
    for name, path in checkpoints.items():
        trained = load_trained(str(path))
        with attention_off(trained.model):
            found[name] = top1(trained, source)
    listed = "  ".join(f"{name} {100 * value:.2f}" for name, value in found.items())
    print(f"top-1 % of the trained models with their attention switched off:\n  {listed}\n", flush=True)
    return found


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
