"""Timing several functions in turns, so that noise of the machine affects all of them."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, TypeVar

Name = TypeVar("Name")

# most calls within one turn of a short function
MOST_REPEATS = 200


@dataclass(frozen=True)
class Timing:
    """Seconds of one call in each round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of the rounds; 0 for a single round."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2

    def ratio_to(self, other: "Timing") -> float:
        """Return how many times as fast as the other this is: the median of the ratios within rounds."""
        return median(theirs / max(mine, 1e-12) for mine, theirs in zip(self.seconds, other.seconds, strict=True))


def take_turns(
    runs: Mapping[Name, Callable[[], Any]],
    rounds: int,
    *,
    wait: Callable[[], object] = lambda: None,
    warm_ups: int = 1,
    least_seconds: float = 0.0,
) -> dict[Name, Timing]:
    """Time each function in every round, after ``warm_ups`` rounds that do not count.

    The functions take turns within a round, so that a busy moment of the machine affects all of them.

    wait: called before the clock is read, for devices that compute asynchronously.
    least_seconds: a turn repeats its function until it takes about this long, so that reading the clock is negligible.
    """
    repeats = dict.fromkeys(runs, 1)
    for _ in range(warm_ups):
        for name, run in runs.items():
            once = max(_seconds(run, 1, wait), 1e-9)
            repeats[name] = min(max(math.ceil(least_seconds / once), 1), MOST_REPEATS)
    seconds: dict[Name, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(_seconds(run, repeats[name], wait))
    return {name: Timing(tuple(times)) for name, times in seconds.items()}


def _seconds(run: Callable[[], Any], repeats: int, wait: Callable[[], object]) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    wait()
    return (time.perf_counter() - start) / repeats
