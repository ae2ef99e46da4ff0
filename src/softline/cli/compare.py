"""``softline compare``: variants of one model, trained alike, side by side."""

import argparse
import textwrap
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from softline.cli.arguments import Commands, check_parent, integers, names, split_overrides
from softline.errors import UserError
from softline.files import make_directory

if TYPE_CHECKING:
    from softline.engine.recipe import Recipe
    from softline.experiments.compare import Comparison, Row
    from softline.experiments.presets import Preset


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "compare",
        help="train variants of one model alike, with several seeds, and tabulate accuracy and cost",
        usage="softline compare [PRESET] [--attentions NAME,...] [--recipe RECIPE] [--seeds N,...] [--jobs N]\n"
        "                        [--output DIR] [--json PATH] [--figure PATH] [--KEY VALUE ...]",
        description="Train variants of one recipe on the same data and budget, with several seeds: those of a PRESET "
        "(default: attentions), which are papers' tables in miniature, or different attentions. Any key of the recipe "
        "can be set on the command line, for all variants. Started again, it does not repeat what is done already.",
        epilog=textwrap.dedent("""\
            examples:
              softline compare attentions --seeds 0,1,2 --jobs 2
              softline compare --attentions softmax,softpp,inline --schedule.epochs 1
              softline compare inline-kernels --recipe inline_swin_tiny --accumulate 8 --data.source /data/imagenet
            """),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--list", action="store_true", help="list the presets, and stop")
    parser.add_argument("--attentions", type=names, metavar="NAME,...", help="compare these instead of a preset")
    parser.add_argument("--recipe", metavar="RECIPE", help="what to change (default: the preset's, else quickstart)")
    parser.add_argument("--seeds", type=integers, default=[0], metavar="N,...", help="comma-separated (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trainings at a time (default: 1)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="of the runs (default: runs/compare/PRESET)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="of the results (default: DIR/comparison.json)")
    parser.add_argument("--figure", type=Path, metavar="PATH", help=".png or .svg (default: DIR/comparison.png)")
    parser.set_defaults(run=run, takes_overrides=True)


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
    from softline.files import write_json

    runs = len(preset.variants) * len(options.seeds)
    print(f"{preset.title}: {runs} runs, to {output}", flush=True)
    with RunsProgress(runs) as progress:
        comparison = compare(
            recipe,
            preset.variants,
            seeds=options.seeds,
            output=output,
            jobs=options.jobs,
            progress=progress,
            title=preset.title,
            reference=preset.reference,
        )
    results, figure = options.json or output / "comparison.json", options.figure or output / "comparison.png"
    write_json(results, comparison.to_dict())
    print(f"\n{comparison_table(comparison)}\n")
    plot_comparison(comparison, figure)
    print(f"results: {results}\nfigure: {figure}")


def _choose(options: argparse.Namespace) -> "tuple[Preset, Recipe]":
    """What is compared, and the recipe that the variants change."""
    from softline.engine.reading import load_recipe
    from softline.experiments.presets import Preset, attention_variants, load_preset

    name, overrides = split_overrides(options.overrides)
    if options.attentions is None:
        return load_preset(name or "attentions", options.recipe, overrides)
    if name is not None:
        raise UserError(f"name a preset or --attentions, not both: got {name} and --attentions")
    recipe = options.recipe or Preset.base
    variants = tuple(attention_variants(options.attentions))
    preset = Preset("-".join(options.attentions), f"Attentions by the recipe {recipe}", "", variants)
    return preset, load_recipe(recipe, overrides)


def comparison_table(comparison: "Comparison") -> str:
    """Aligned text of one line for each variant."""
    header = ["variant", "top-1 %", "params M", "MMACs", "KiB/image*", "train/s", "infer/s"]
    lines = [header, *(_cells(row) for row in comparison.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = [
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    machine = comparison.environment
    seeds = len(comparison.seeds)
    spread = f"mean ± standard deviation of {seeds} seeds; " if seeds > 1 else "one seed; "
    return "\n".join(
        [
            *text,
            f"{spread}speed in images: {machine['cpu']}, torch threads: {machine['threads']}",
            "* most memory of a training step, beyond the weights",
        ]
    )


def _cells(row: "Row") -> list[str]:
    cost = row.cost
    return [
        row.name,
        _accuracy(row),
        f"{cost.parameters / 1e6:.2f}",
        f"{cost.macs / 1e6:,.1f}",
        f"{cost.peak_bytes / 2**10:,.0f}",
        f"{cost.train_per_second:,.0f}",
        f"{cost.infer_per_second:,.0f}",
    ]


def _accuracy(row: "Row") -> str:
    if row.mean is None:
        return f"diverged at step {', '.join(str(run.step) for run in row.diverged)}"
    text = f"{100 * row.mean:.2f}" + ("" if row.spread is None else f" ± {100 * row.spread:.2f}")
    return f"{text} ({len(row.diverged)} diverged)" if row.diverged else text


class RunsProgress:
    """A line for each run that is over, and on a terminal a bar for each that goes on."""

    def __init__(self, runs: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        # results are for standard output
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.runs, self.done, self.told = runs, 0, 0.0
        self.tasks: dict[tuple[str, int], Any] = {}
        self.begun: dict[tuple[str, int], float] = {}
        self.waiting = self.bars.add_task("measuring the models", total=None, numbers="")

    def __enter__(self) -> "RunsProgress":
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def __call__(self, name: str, seed: int, event: Any) -> None:
        from softline.cli.progress import duration, metrics_text
        from softline.engine.events import Evaluated, Evaluating, Notice, Preparing, Started, Stepped
        from softline.experiments.runs import Finished

        key = (name, seed)
        if isinstance(event, Preparing):
            self._prepare(name, event)
            return
        if isinstance(event, Notice):
            self.console.print(f"{name}: {event.text}", markup=False)
            return
        self.bars.update(self.waiting, visible=False)
        if isinstance(event, Started):
            self.begun[key] = time.monotonic()
            self.tasks[key] = self.bars.add_task(
                f"{name}, seed {seed}", total=event.steps, completed=event.start_step, numbers=""
            )
        elif isinstance(event, Stepped):
            numbers = f"epoch {event.epoch:.2f}  loss {event.loss:.3f}  {duration(event.seconds_left)} left"
            self.bars.update(self.tasks[key], completed=event.step, numbers=numbers)
        elif isinstance(event, Evaluating) and key in self.tasks:
            self.bars.update(self.tasks[key], numbers=f"evaluating: {event.done:,}")
        elif isinstance(event, Evaluated):
            numbers = f"epoch {event.epoch:.2f}  {metrics_text(event.metrics)}"
            self.bars.update(self.tasks[key], numbers=numbers)
        elif isinstance(event, Finished):
            self._finish(key, event)

    def _prepare(self, name: str, event: Any) -> None:
        line = f"{event.done:,} of {event.total:,} {event.what}"
        self.bars.update(
            self.waiting, description=name, total=event.total, completed=event.done, numbers=line, visible=True
        )
        if not self.console.is_terminal and time.monotonic() - self.told > 10:
            self.told = time.monotonic()
            self.console.print(f"{name}: {line}", markup=False)

    def _finish(self, key: tuple[str, int], event: Any) -> None:
        from softline.cli.progress import duration

        self.done += 1
        if key in self.tasks:
            self.bars.remove_task(self.tasks.pop(key))
        how = "done before" if event.reused else duration(time.monotonic() - self.begun[key])
        self.console.print(f"[{self.done}/{self.runs}] {key[0]}, seed {key[1]}: {event.run.text} ({how})", markup=False)
