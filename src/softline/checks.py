"""Checks of arguments: each raises `UserError` with the rule and the offending value."""

import math
from collections.abc import Collection
from difflib import get_close_matches

from softline.errors import UserError


def check_option(name: str, value: object, known: Collection[str]) -> None:
    """``value`` is one of ``known``; the error lists them and names the closest."""
    if not isinstance(value, str) or value not in known:
        close = get_close_matches(str(value), list(known), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"{name} must be one of {', '.join(sorted(known))}; got {value!r}{hint}")


def check_at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise UserError(f"{name} must be at least {least}, got {value}")


def check_integer(name: str, value: object, least: int) -> None:
    # a bool is an int to Python, and a mistake here
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{name} must be a whole number, got {value!r}")
    check_at_least(name, value, least)


def check_number(name: str, value: object, least: float) -> None:
    """A finite number, at least ``least``."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not -math.inf < value < math.inf:
        raise UserError(f"{name} must be a finite number, got {value!r}")
    check_at_least(name, value, least)


def check_index(name: str, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise UserError(f"{name} must be at least 0 and below {count}, got {index}")


def check_range(
    name: str,
    value: float,
    low: float,
    high: float | None = None,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raise unless ``low <= value <= high``; an open bound is itself excluded. NaN is never in range."""
    above = value > low if open_low else value >= low
    below = high is None or (value < high if open_high else value <= high)
    if not (above and below):
        rule = f"{'above' if open_low else 'at least'} {low:g}"
        if high is not None:
            rule += f" and {'below' if open_high else 'at most'} {high:g}"
        raise UserError(f"{name} must be {rule}, got {value}")
