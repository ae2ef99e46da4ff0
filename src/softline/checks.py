"""Argument checks; each raises `UserError` with the rule and the offending value."""

import math
from collections.abc import Collection
from difflib import get_close_matches
from typing import TypeGuard

from softline.errors import UserError


def check_option(name: str, value: object, known: Collection[str]) -> None:
    """Check that ``value`` is one of ``known``; the error lists them and suggests the closest."""
    if not isinstance(value, str) or value not in known:
        close = get_close_matches(str(value), list(known), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"{name} must be one of {', '.join(sorted(known))}; got {value!r}{hint}")


def check_at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise UserError(f"{name} must be at least {least}, got {value}")


def check_integer(name: str, value: object, least: int) -> None:
    # in Python a bool is an int
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{name} must be a whole number, got {value!r}")
    check_at_least(name, value, least)


def check_number(name: str, value: object, least: float) -> None:
    """Check that ``value`` is a finite number, at least ``least``."""
    if not _is_number(value) or not -math.inf < value < math.inf:
        raise UserError(f"{name} must be a finite number, got {value!r}")
    check_at_least(name, value, least)


def check_index(name: str, index: int, count: int) -> None:
    check_range(name, index, 0, count, open_high=True)


def check_range(
    name: str,
    value: object,
    low: float,
    high: float | None = None,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Check that ``low <= value <= high``; an open bound is itself excluded. NaN and infinity are never in range."""
    if not _is_number(value):
        raise UserError(f"{name} must be a number, got {value!r}")
    if value in (math.inf, -math.inf):
        raise UserError(f"{name} must be a finite number, got {value}")
    above = value > low if open_low else value >= low
    below = high is None or (value < high if open_high else value <= high)
    if not (above and below):
        rule = f"{'above' if open_low else 'at least'} {low:g}"
        if high is not None:
            rule += f" and {'below' if open_high else 'at most'} {high:g}"
        raise UserError(f"{name} must be {rule}, got {value}")


def check_pair(name: str, pair: object, low: float, high: float | None = None) -> None:
    """Check for two numbers ``low < first <= second <= high``."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise UserError(f"{name} must be two numbers, got {pair!r}")
    first, second = pair
    check_range(f"{name} (first)", first, low, high, open_low=True)
    check_range(f"{name} (second)", second, first, high)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
