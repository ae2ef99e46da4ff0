"""The parser of all commands, and arguments that several of them have."""

import argparse
import functools
import shutil
import textwrap
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from softline.errors import UserError


class Parser(argparse.ArgumentParser):
    """An argument parser that knows ``--traceback`` and can leave ``--key value`` pairs that it does not know.

    Parsers of commands, and of their sub-commands, are of this class as well.
    """

    takes_overrides = False
    """Whether the command passes on options that the parser does not know."""

    def __init__(self, **options: Any) -> None:
        self.flags: set[str] = set()
        options.setdefault(
            "formatter_class", functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=28)
        )
        super().__init__(**options)
        self.describe(self.description or "")
        self.add_argument(
            "--traceback",
            action="store_true",
            # the parsers of the command and of `softline` itself share the value, so neither may have a default
            default=argparse.SUPPRESS,
            help="after an error, print where in the code it occurred",
        )

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        self.flags |= {name for name in names if name.startswith("-")}
        return super().add_argument(*names, **options)

    def describe(self, description: str, *, usage: str | None = None, epilog: str | None = None) -> None:
        """Set the texts of the help page.

        description: wrapped to the width of the terminal.
        usage: defaults to a list of all arguments.
        epilog: printed as it is, without its indentation.
        """
        width = min(shutil.get_terminal_size().columns, 102) - 2
        self.description = textwrap.fill(" ".join(description.split()), width)
        self.usage = usage or self.usage
        self.epilog = None if epilog is None else textwrap.dedent(epilog)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # argparse removes the value -- from --option=--, and then has none
        for argument in args or ():
            if isinstance(argument, str) and argument.startswith("--") and argument.endswith("=--"):
                self.error(f"argument {argument.removesuffix('=--')}: expected a value, got --")
        return super().parse_known_args(args, namespace)

    def sub_commands(self, dest: str, metavar: str) -> Callable[..., "Parser"]:
        """Let the command have sub-commands; return the function that adds one."""
        return self.add_subparsers(dest=dest, metavar=metavar, required=True).add_parser

    def take_overrides(self) -> None:
        """Pass options that the parser does not know on to the command, as ``overrides``."""
        self.takes_overrides = True
        # an abbreviation could be somebody else's option
        self.allow_abbrev = False


def split_overrides(arguments: Sequence[str], flags: Collection[str]) -> tuple[list[str], list[str]]:
    """Separate ``--key value`` and ``--key=value`` from arguments that a parser knows by its flags.

    argparse itself would take the value of an unknown option for a positional argument.
    """
    known: list[str] = []
    overrides: list[str] = []
    waits_for_value = False
    for argument in arguments:
        if argument.startswith("--"):
            unknown = argument.partition("=")[0] not in flags
            (overrides if unknown else known).append(argument)
            waits_for_value = unknown and "=" not in argument
        else:
            (overrides if waits_for_value else known).append(argument)
            waits_for_value = False
    return known, overrides


def pairs(overrides: Sequence[str]) -> dict[str, str | None]:
    """Return the values of `split_overrides` by their keys, in the spelling of Python; None where there is no value."""
    found: dict[str, str | None] = {}
    key = ""
    for part in overrides:
        if part.startswith("--"):
            name, equals, value = part.removeprefix("--").partition("=")
            key = name.replace("-", "_")
            found[key] = value if equals else None
        else:
            found[key] = part
    return found


def check_alone(option: str, others: Sequence[Any]) -> None:
    """Refuse arguments that an option such as ``--list`` would leave without effect; None stands for none."""
    for given in others:
        if given is not None:
            raise UserError(f"{option} takes nothing else, got {given}")


def place(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("expected the name of a file or directory, got nothing")
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"expected the name of a file or directory, got {text!r}")
    return Path(text)


def integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers separated by commas, got {text!r}") from None


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def add_checkpoint(parser: Parser) -> None:
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a .pt file of `softline train`, an .onnx file of `softline export`, a directory that timm saved, or the "
        "name of a model that has published weights",
    )


def add_source(parser: Parser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a .pt file of `softline train`, a directory that timm saved, or the name of a model that has published "
        "weights",
    )


def add_attentions(parser: Parser, *, default: Sequence[str] = ("softmax", "softpp", "inline")) -> None:
    parser.add_argument(
        "--attentions",
        type=names,
        default=list(default),
        metavar="NAME,...",
        help=f"attentions to compare, the first being the baseline (default: {','.join(default)})",
    )
