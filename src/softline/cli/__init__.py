"""The ``softline`` command: parse arguments, call, print. One file for each command."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

import softline
from softline.cli import analyze, bench, compare, convert, evaluate, explore, lra, models, predict, quickstart, train

COMMANDS = (quickstart, train, evaluate, predict, compare, lra, bench, analyze, explore, models, convert)

# packages of the extras, by the extra that brings them
EXTRAS = {
    **dict.fromkeys(("accelerate", "jsonargparse", "matplotlib", "rich", "tensorboard", "torchmetrics"), "train"),
    "gradio": "explore",
    **dict.fromkeys(("faster_coco_eval", "segmentation_models_pytorch"), "dense"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="softline", description="Vision transformers whose attention costs O(N): SOFT, SOFT++, InLine."
    )
    parser.add_argument("--version", action="version", version=f"softline {softline.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    options, rest = parser.parse_known_args(arguments)
    if rest and not getattr(options, "takes_overrides", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.overrides = rest
    options.command_line = shlex.join(["softline", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        code = options.run(options)
    except BrokenPipeError:
        # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        print(f"softline {options.command}: error: {_missing(error.name)}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"softline {options.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return code or 0


def _missing(package: str) -> str:
    return f"this needs {package}: pip install 'softline[{EXTRAS[package]}]'"
