"""``softline lra``: the Long Range Arena."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from softline.cli.arguments import Parser, integers, names, place
from softline.cli.outputs import held_outputs
from softline.cli.progress import Progress
from softline.cli.table import format_table, number
from softline.errors import UserError
from softline.files import write_json

if TYPE_CHECKING:
    from softline.experiments.lra import LraResults

ATTENTIONS = ["softmax", "reformer", "linformer", "performer", "nystrom", "soft", "softpp", "inline"]


def add_arguments(parser: Parser) -> None:
    parser.describe(
        """Train every attention on every task of the Long Range Arena with the published settings, test the weights
        that were best in validation, and print the accuracies with those of the SOFT paper. Every key of the recipes
        can be set on the command line. A command that is started again keeps its finished runs.""",
        usage="softline lra [--tasks NAME,...] [--attentions NAME,...] [--data DIR] [--small] [--seeds N,...]\n"
        "                    [--output DIR] [--json PATH] [--KEY VALUE ...]",
        epilog="""\
            examples:
              softline lra --data lra_release
              softline lra --tasks listops --attentions softmax,softpp,inline --precision bf16
              softline lra --small --tasks listops --attentions softpp,inline

            DIR is the unpacked lra_release (listops-1000, tsv_data, pathfinder32), with IMDb's aclImdb and CIFAR-10's
            cifar-10-batches-py put into it. Without listops-1000, ListOps is generated; --data.generate.workers N does
            so in N processes. The paper has one landmark for every 4 tokens instead of at most 64: --attentions soft
            --model.options.attention_options.max_landmarks ratio. If softmax runs out of memory: --accumulate 8.
            """,
    )
    parser.add_argument(
        "--tasks",
        type=names,
        metavar="NAME,...",
        help="listops, text, retrieval, image or pathfinder (default: listops,text,retrieval,image as in the paper; "
        "with --small listops,image)",
    )
    parser.add_argument(
        "--attentions",
        type=names,
        default=ATTENTIONS,
        metavar="NAME,...",
        help=f"attentions to train (default: {','.join(ATTENTIONS)})",
    )
    parser.add_argument("--data", metavar="DIR", help="directory with the files of the tasks")
    parser.add_argument(
        "--small", action="store_true", help="use the recipes for two cores, which exist for listops and image"
    )
    parser.add_argument(
        "--seeds", type=integers, default=[0], metavar="N,...", help="random seeds of the runs (default: 0)"
    )
    parser.add_argument(
        "--output", type=place, metavar="DIR", help="directory for the runs (default: runs/lra, or runs/lra_small)"
    )
    parser.add_argument(
        "--json", type=place, metavar="PATH", help="file for the results (default: lra.json in the directory)"
    )
    parser.take_overrides()
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from softline.experiments.lra import SMALL_TASKS, TABLE_TASKS, check_attentions, lra_recipe, run_lra

    tasks = list(SMALL_TASKS if options.small else TABLE_TASKS) if options.tasks is None else options.tasks
    if not tasks or len(set(tasks)) < len(tasks):
        raise UserError(f"--tasks must be different, at least one, got {','.join(tasks) or 'none'}")
    check_attentions(options.attentions, options.seeds)
    recipes = {
        task: lra_recipe(task, small=options.small, data=options.data, overrides=options.overrides) for task in tasks
    }
    output = options.output or Path("runs") / ("lra_small" if options.small else "lra")
    path = options.json or output / "lra.json"
    count = len(tasks) * len(options.attentions) * len(options.seeds)
    print(f"Long Range Arena: {count} runs, to {output}", flush=True)
    with held_outputs(options.json, directory=output), Progress(runs=count) as progress:
        for results in run_lra(
            recipes,
            options.attentions,
            seeds=options.seeds,
            output=output,
            small=options.small,
            progress=progress.hear_run,
        ):
            write_json(path, {"command": options.command_line, **results.to_dict()})
    print(f"\n{lra_table(results, tasks, options.attentions)}\n\nresults: {path}")


def lra_table(results: "LraResults", tasks: list[str], attentions: list[str]) -> str:
    """Format Table 12 of SOFT: a line for each attention, its accuracy on each task, and the paper's in brackets."""
    from softline.experiments.lra import PAPER, TABLE_TASKS, TITLES

    averaged = set(TABLE_TASKS) <= set(tasks)
    header = ["attention", *(TITLES[task] for task in tasks), *(["average"] if averaged else [])]
    rows = []
    for attention in attentions:
        paper = dict(zip(TABLE_TASKS, PAPER.get(attention, ()), strict=False))
        cells = [_cell(results, task, attention, paper.get(task)) for task in tasks]
        if averaged:
            here = _average([results.mean(task, attention) for task in TABLE_TASKS])
            cells.append(_with_paper(number(here, ".2f"), _average(list(paper.values()))))
        rows.append([attention, *cells])
    seeds = len({run.seed for run in results.runs})
    spread = f", mean ± standard deviation of {seeds} seeds" if seeds > 1 else ""
    of = ", for the full tasks" if results.small else ""
    table = format_table(header, rows, left=len(header))
    return f"{table}\ntest accuracy in %{spread}; in brackets: Table 12 of SOFT{of}"


def _cell(results: "LraResults", task: str, attention: str, paper: float | None) -> str:
    mean, spread = results.mean(task, attention), results.spread(task, attention)
    if mean is None:
        return _with_paper("diverged", paper)
    text = f"{mean:.2f}" + ("" if spread is None else f" ± {spread:.2f}")
    lost = results.diverged(task, attention)
    return _with_paper(f"{text} ({lost} diverged)" if lost else text, paper)


def _with_paper(here: str, paper: float | None) -> str:
    return here if paper is None else f"{here} ({paper:.2f})"


def _average(values: list[float | None] | list[float]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
