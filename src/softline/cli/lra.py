"""``softline lra``: the Long Range Arena."""

import argparse
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from softline.cli.arguments import Commands, check_parent, integers, names
from softline.errors import UserError

if TYPE_CHECKING:
    from softline.experiments.lra import LraResults

ATTENTIONS = ["softmax", "reformer", "linformer", "performer", "nystrom", "soft", "softpp", "inline"]


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "lra",
        help="train attentions on the Long Range Arena, beside the SOFT paper's Table 12",
        usage="softline lra [--tasks NAME,...] [--attentions NAME,...] [--data DIR] [--small] [--seeds N,...]\n"
        "                    [--output DIR] [--json PATH] [--KEY VALUE ...]",
        description="Train every attention on every task of the Long Range Arena with the published settings, test the "
        "weights that were best in validation, and print them beside the paper's. Any key of the recipes can be set on "
        "the command line. Started again, it does not repeat what is done already.",
        epilog=textwrap.dedent("""\
            examples:
              softline lra --data lra_release
              softline lra --tasks listops --attentions softmax,softpp,inline --precision bf16
              softline lra --small --tasks listops --attentions softpp,inline

            DIR is the unpacked lra_release (listops-1000, tsv_data, pathfinder32), with IMDb's aclImdb and CIFAR-10's
            cifar-10-batches-py put into it. Without listops-1000, ListOps is generated, by several processes with
            --data.generate.workers N. The paper's landmarks, one for every 4 tokens instead of at most 64:
            --attentions soft --model.options.attention_options.max_landmarks null. If softmax runs out of memory:
            --accumulate 8.
            """),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--tasks", type=names, metavar="NAME,...", help="default: listops,text,retrieval,image")
    parser.add_argument(
        "--attentions", type=names, default=ATTENTIONS, metavar="NAME,...", help=f"default: {','.join(ATTENTIONS)}"
    )
    parser.add_argument("--data", metavar="DIR", help="where the tasks' files lie")
    parser.add_argument("--small", action="store_true", help="the recipes for two cores, of listops and image")
    parser.add_argument("--seeds", type=integers, default=[0], metavar="N,...", help="comma-separated (default: 0)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="of the runs (default: runs/lra, runs/lra_small)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="of the results (default: DIR/lra.json)")
    parser.set_defaults(run=run, takes_overrides=True)


def run(options: argparse.Namespace) -> None:
    from softline.cli.compare import RunsProgress
    from softline.experiments.lra import SMALL_TASKS, TABLE_TASKS, check_attentions, lra_recipe, run_lra
    from softline.files import make_directory, write_json

    tasks = list(SMALL_TASKS if options.small else TABLE_TASKS) if options.tasks is None else options.tasks
    if not tasks or len(set(tasks)) < len(tasks):
        raise UserError(f"--tasks must be different, at least one, got {','.join(tasks) or 'none'}")
    check_attentions(options.attentions, options.seeds)
    recipes = {
        task: lra_recipe(task, small=options.small, data=options.data, overrides=options.overrides) for task in tasks
    }
    output = options.output or Path("runs") / ("lra_small" if options.small else "lra")
    check_parent(options.json)
    make_directory(output)
    path = options.json or output / "lra.json"
    count = len(tasks) * len(options.attentions) * len(options.seeds)
    print(f"Long Range Arena: {count} runs, to {output}", flush=True)
    with RunsProgress(count) as progress:
        for results in run_lra(
            recipes,
            options.attentions,
            seeds=options.seeds,
            output=output,
            small=options.small,
            progress=progress,
        ):
            write_json(path, {"command": options.command_line, **results.to_dict()})
    print(f"\n{lra_table(results, tasks, options.attentions)}\n\nresults: {path}")


def lra_table(results: "LraResults", tasks: list[str], attentions: list[str]) -> str:
    """Table 12: a line for each attention, accuracy on each task, and the paper's in brackets."""
    from softline.experiments.lra import PAPER, TABLE_TASKS, TITLES

    averaged = set(TABLE_TASKS) <= set(tasks)
    lines = [["attention", *(TITLES[task] for task in tasks), *(["average"] if averaged else [])]]
    for attention in attentions:
        paper = dict(zip(TABLE_TASKS, PAPER.get(attention, ()), strict=False))
        here = {task: results.mean(task, attention) for task in tasks}
        cells = [_cell(results, task, attention, paper.get(task)) for task in tasks]
        if averaged:
            mean, printed = _average([here[task] for task in TABLE_TASKS]), _average(list(paper.values()))
            cells.append(_beside("-" if mean is None else f"{mean:.2f}", printed))
        lines.append([attention, *cells])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    seeds = len({run.seed for run in results.runs})
    spread = f", mean ± standard deviation of {seeds} seeds" if seeds > 1 else ""
    of = ", which is of the full tasks" if results.small else ""
    return "\n".join([*rows, f"test accuracy in %{spread}; in brackets: Table 12 of SOFT{of}"])


def _cell(results: "LraResults", task: str, attention: str, paper: float | None) -> str:
    mean, spread = results.mean(task, attention), results.spread(task, attention)
    if mean is None:
        return _beside("diverged", paper)
    text = f"{mean:.2f}" + ("" if spread is None else f" ± {spread:.2f}")
    lost = results.diverged(task, attention)
    return _beside(f"{text} ({lost} diverged)" if lost else text, paper)


def _beside(here: str, paper: float | None) -> str:
    return here if paper is None else f"{here} ({paper:.2f})"


def _average(values: list[float | None] | list[float]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
