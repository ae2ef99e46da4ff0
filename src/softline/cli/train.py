"""``softline train``: train by a recipe."""

import argparse
import signal
import sys

from softline.cli.arguments import Parser, check_alone
from softline.cli.processes import told_once
from softline.cli.progress import Progress
from softline.cli.startup import exit_code
from softline.cli.table import metrics_text
from softline.errors import UserError


def add_arguments(parser: Parser) -> None:
    parser.describe(
        """Train by a recipe: the name of one in the package, or a YAML file. Every key of the recipe can be set on the
        command line. Checkpoints (last.pt, best.pt), log.jsonl and TensorBoard files are written to the output
        directory.""",
        usage="softline train RECIPE [--resume] [--output DIR] [--KEY VALUE ...]",
        epilog="""\
            examples:
              softline train quickstart --model.options.attention inline --output runs/inline
              softline train softpp_tiny --data.source /data/imagenet --precision bf16 --workers 8
              softline train softpp_tiny --show
              torchrun --standalone --nproc-per-node 8 -m softline.cli train softpp_small --data.source /data/imagenet

            With --standalone, torchrun uses a free port. Without it, the error EADDRINUSE means that another program
            uses the port: choose another one with torchrun's --master-port.

            Ctrl-C and SIGTERM save a checkpoint and stop the run. Exit codes: 0 if the run is finished, 130 after
            Ctrl-C, 143 after SIGTERM, 2 after a mistake in the command, the recipe or the data.
            """,
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="name of a recipe, or a .yaml file")
    parser.add_argument("--list", action="store_true", help="list the recipes in the package and exit")
    parser.add_argument("--show", action="store_true", help="print the recipe with all its keys and exit")
    parser.add_argument("--resume", action="store_true", help="continue from the output directory's last checkpoint")
    parser.add_argument("--skip-corrupt", action="store_true", help="find unreadable images first and leave them out")
    parser.add_argument("--output", metavar="DIR", help="directory for checkpoints and logs (default: the recipe's)")
    parser.take_overrides()
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from softline.engine.reading import list_recipes

    if options.list:
        check_alone("--list", [options.recipe, options.output, *options.overrides])
        print("\n".join(list_recipes()))
        return 0
    if options.recipe is None:
        raise UserError("name a recipe; `softline train --list` lists those in the package")
    with told_once():
        return _train(options)


def _train(options: argparse.Namespace) -> int:
    from softline.engine.reading import dump_recipe, load_recipe

    overrides = list(options.overrides)
    if options.output is not None:
        overrides += ["--output", options.output]
    if options.skip_corrupt:
        overrides += ["--data.skip_corrupt", "true"]
    recipe = load_recipe(options.recipe, overrides)
    if options.show:
        print(dump_recipe(recipe), end="")
        return 0

    from softline.engine.train import train

    with Progress(sys.stdout) as progress:
        result = train(recipe, resume=options.resume, listeners=[progress.hear])
    # one process reports, and all have its exit code
    reports = bool(progress.started)
    if not result.finished:
        assert result.stopped_by is not None, "nothing else stops a run without an error"
        if reports:
            print(f"stopped by {result.stopped_by} after step {result.step}; continue with --resume")
        return exit_code(signal.Signals[result.stopped_by])
    if reports:
        print(f"best: {metrics_text(result.best)}")
        print(f"checkpoints and logs: {result.output}")
    return 0
