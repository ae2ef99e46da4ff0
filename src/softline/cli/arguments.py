"""What several commands' arguments share."""

import argparse
from pathlib import Path
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def check_parent(*paths: Path | None) -> None:
    for path in paths:
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"no such directory: {path.parent}")


def integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers separated by commas, got {text!r}") from None


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
