"""The ``softline`` command. Each command has a file of its own, which is imported when the command is named.

So that help appears at once, these files import torch, and whatever needs it, inside the functions that use it.
"""

# ruff: noqa: I001
# before the imports that take their time
from softline.cli.startup import TEXTS, exit_code

import argparse
import importlib
import os
import shlex
import sys
import traceback
from collections.abc import Sequence

import softline
from softline import process
from softline.cli.arguments import Parser, split_overrides
from softline.cli.messages import message_of
from softline.cli.signals import interrupting, interruption_of, signal_of
from softline.cli.terminal import escaping, one_line
from softline.errors import UserError

COMMANDS = {
    "quickstart": "train softmax, SOFT++ and InLine on small images and write a report, in about two minutes",
    "train": "train a model by a recipe",
    "evaluate": "measure the accuracy and speed of a trained model",
    "predict": "apply a trained model to images or texts",
    "export": "write a trained model as ONNX, torch.export or AOTInductor, and compare it with the original",
    "linearize": "give a pretrained vision transformer linear attention, and train it to do what it did",
    "compare": "train variants of one model alike, with several seeds, and compare their accuracy and cost",
    "lra": "train attentions on the Long Range Arena and compare with the SOFT paper's Table 12",
    "bench": "measure time and memory of operators, layers and models at growing sizes",
    "analyze": "draw what attention does: heat maps, convergence, spectra, injectivity, locality, cost, accuracy",
    "explore": "see in the browser what two models attend to, side by side",
    "models": "list the models with their size, cost and reported accuracy",
    "convert": "turn an official SOFT or InLine checkpoint into a directory that timm loads",
}
# the largest block of memory that a command keeps; a server should not stay as large as its largest request
KEPT = {"explore": None, "predict": process.INFERENCE_BLOCK, "evaluate": process.INFERENCE_BLOCK}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 after a mistake of the user, 130 after Ctrl-C, 143 after SIGTERM."""
    with escaping(), interrupting():
        try:
            options = parse(sys.argv[1:] if arguments is None else arguments)
            if arguments is None:
                # this process is the command's own
                process.settle(largest=KEPT.get(options.command, process.LARGEST_INT))
            return _run(options)
        except (KeyboardInterrupt, Exception) as error:
            # whatever a library has turned the interruption into
            interruption = interruption_of(error)
            if interruption is None:
                raise
            number = signal_of(interruption)
            print(f"\n{TEXTS[number]}", file=sys.stderr)
            return exit_code(number)


def _run(options: argparse.Namespace) -> int:
    try:
        code = options.run(options) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        # the reader of the output has closed it, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UserError, ModuleNotFoundError, OSError, RuntimeError, MemoryError) as error:
        message = message_of(error)
        if message is None or interruption_of(error) is not None:
            raise
        if options.traceback:
            traceback.print_exception(error)
        print(f"softline {options.command}: error: {one_line(message)}", file=sys.stderr)
        return 2
    return int(code)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; print a message and exit if that is impossible.

    The result has, besides the command's own arguments: ``command``; ``run``, the function to call with the result;
    ``overrides``, options that the command passes on; and ``command_line``, what was typed.
    """
    named = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser, command = _parsers(named)
    known = list(arguments)
    overrides: list[str] = []
    if command is not None and command.takes_overrides:
        known, overrides = split_overrides(arguments, command.flags)
    options, rest = parser.parse_known_args(known)
    if rest:
        (command or parser).error(f"unrecognized arguments: {' '.join(rest)}")
    options.traceback = getattr(options, "traceback", False)
    options.overrides = overrides
    options.command_line = shlex.join(["softline", *arguments])
    return options


def _parsers(named: str | None) -> tuple[Parser, Parser | None]:
    """Create the parser, with the arguments of the named command alone; return it and the parser of that command."""
    parser = Parser(
        prog="softline", description="Vision transformers whose attention costs O(N): SOFT, SOFT++, InLine."
    )
    parser.add_argument("--version", action="version", version=f"softline {softline.__version__}")
    add_command = parser.sub_commands("command", "COMMAND")
    commands = {name: add_command(name, help=text) for name, text in COMMANDS.items()}
    command = None if named is None else commands.get(named)
    if command is not None:
        importlib.import_module(f"softline.cli.{named}").add_arguments(command)
    return parser, command
