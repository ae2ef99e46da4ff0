"""Time several things fairly."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

# a turn of something short is repeated up to so often
MOST_REPEATS = 200


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, in each round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of the rounds; 0 for a single one."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2

    def ratio_to(self, other: "Timing") -> float:
        """How often this fits into the other: the median of the rounds' ratios, as a round shares its noise."""
        return median(theirs / max(mine, 1e-12) for mine, theirs in zip(self.seconds, other.seconds, strict=True))


def take_turns(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    wait: Callable[[], object] = lambda: None,
    warm_ups: int = 1,
    least_seconds: float = 0.0,
) -> dict[str, Timing]:
    """Times of each run over the rounds, after ``warm_ups`` that do not count.

    They take turns within a round, so that a busy moment of the machine meets all of them.

    wait: called before the clock is read, for devices that compute in the background.
    least_seconds: a turn repeats its run until it takes about so long, so that the clock does not matter.
    """
    repeats = dict.fromkeys(runs, 1)
    for _ in range(warm_ups):
        for name, run in runs.items():
            once = max(_seconds(run, 1, wait), 1e-9)
            repeats[name] = min(max(math.ceil(least_seconds / once), 1), MOST_REPEATS)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
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
