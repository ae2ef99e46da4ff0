"""What several commands' arguments share."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from softline.errors import UserError

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def check_parent(*paths: Path | None) -> None:
    for path in paths:
        if path is not None and not path.resolve().parent.is_dir():
            raise UserError(f"no such directory: {path.parent}")


def integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers separated by commas, got {text!r}") from None


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def add_attentions(
    parser: argparse.ArgumentParser, *, default: Sequence[str] = ("softmax", "softpp", "inline")
) -> None:
    parser.add_argument(
        "--attentions",
        type=names,
        default=list(default),
        metavar="NAME,...",
        help=f"attentions to compare with the first (default: {','.join(default)})",
    )


def split_overrides(arguments: list[str]) -> tuple[str | None, list[str]]:
    """What stands before the ``--key value`` overrides, and these; argparse would take the value of one for it."""
    if arguments and not arguments[0].startswith("--"):
        return arguments[0], arguments[1:]
    return None, arguments
