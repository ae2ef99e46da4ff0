"""Options of a task's own methods, which the command line passes on without knowing the task."""

import argparse
from collections.abc import Sequence
from typing import Any

from softline.cli.arguments import pairs


def given_options(options: argparse.Namespace, listed: Sequence[str]) -> dict[str, Any]:
    """Return the options that were given: those that the command lists, and others as YAML values.

    An option without a value is a switch, and true.
    """
    from softline.plain import read_yaml

    given = {name: getattr(options, name) for name in listed}
    further = {
        name: True if text is None else read_yaml(text, f"--{name.replace('_', '-')} {text!r}")
        for name, text in pairs(options.overrides).items()
    }
    return {name: value for name, value in given.items() if value is not None and value is not False} | further
