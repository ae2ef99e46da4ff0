"""``softline train``: train by a recipe."""

import argparse
import textwrap

from softline.cli.arguments import Commands, split_overrides
from softline.cli.processes import told_once
from softline.errors import UserError


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model by a recipe",
        usage="softline train RECIPE [--resume] [--output DIR] [--KEY VALUE ...]",
        description=textwrap.dedent("""\
            Train by a recipe: the name of one in the package, or a YAML file. Any of its keys can be set on the
            command line. Checkpoints (last.pt, best.pt), log.jsonl and TensorBoard files go to the output directory.
            """),
        epilog=textwrap.dedent("""\
            examples:
              softline train quickstart --model.options.attention inline --output runs/inline
              softline train softpp_tiny --data.source /data/imagenet --precision bf16 --workers 8
              torchrun --standalone --nproc-per-node 8 -m softline.cli train softpp_small --data.source /data/imagenet

            torchrun takes a free port by --standalone; without it, its error EADDRINUSE means that another program has
            the port: choose one by --master-port.
            """),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--list", action="store_true", help="list the recipes in the package, and stop")
    parser.add_argument("--show", action="store_true", help="print the whole recipe with every key, and stop")
    parser.add_argument("--resume", action="store_true", help="continue from the output directory's last checkpoint")
    parser.add_argument("--skip-corrupt", action="store_true", help="look for unreadable images and leave them out")
    parser.add_argument("--output", metavar="DIR", help="where checkpoints and logs go (default: the recipe's)")
    parser.set_defaults(run=run, takes_overrides=True)


def run(options: argparse.Namespace) -> int:
    from softline.engine.reading import list_recipes

    if options.list:
        print("\n".join(list_recipes()))
        return 0
    name, overrides = split_overrides(options.overrides)
    if name is None:
        raise UserError("name a recipe before its keys; `softline train --list` lists those in the package")
    with told_once():
        return _train(name, overrides, options)


def _train(name: str, overrides: list[str], options: argparse.Namespace) -> int:
    from softline.engine.reading import dump_recipe, load_recipe

    overrides = list(overrides)
    if options.output is not None:
        overrides += ["--output", options.output]
    if options.skip_corrupt:
        overrides += ["--data.skip_corrupt", "true"]
    recipe = load_recipe(name, overrides)
    if options.show:
        print(dump_recipe(recipe), end="")
        return 0

    from softline.cli.progress import Progress, metrics_text
    from softline.engine.train import train

    with Progress() as progress:
        result = train(recipe, resume=options.resume, listeners=[progress])
    if not progress.started:
        # another process speaks
        return 0
    if not result.finished:
        print(f"stopped by {result.stopped_by} after step {result.step}; continue with --resume")
        return 130 if result.stopped_by == "SIGINT" else 0
    print(f"best: {metrics_text(result.best)}")
    print(f"checkpoints and logs: {result.output}")
    return 0
