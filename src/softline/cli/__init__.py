"""The ``softline`` command: parse arguments, call, print. One file for each command."""

import argparse
import os
import sys
from collections.abc import Sequence

import softline
from softline.cli import bench, convert, models

COMMANDS = (bench, models, convert)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="softline", description="Vision transformers whose attention costs O(N): SOFT, SOFT++, InLine."
    )
    parser.add_argument("--version", action="version", version=f"softline {softline.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except BrokenPipeError:
        # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"softline {options.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0
