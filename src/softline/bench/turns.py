"""Time several things fairly."""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any


def take_turns(
    runs: Mapping[str, Callable[[], Any]], rounds: int, *, wait: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Median seconds of each run over the rounds, after one that does not count.

    They take turns within a round, so that a busy moment of the machine meets all of them.

    wait: called before the clock is read, for devices that compute in the background.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            wait()
            start = time.perf_counter()
            run()
            wait()
            seconds[name].append(time.perf_counter() - start)
    return {name: median(times) for name, times in seconds.items()}
