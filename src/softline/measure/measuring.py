"""Measure cases: memory in a process of its own for each, time in turns with a matrix product as the reference."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from softline.errors import UserError
from softline.measure.cases import DTYPES, Case, Mode, Setting, prepare
from softline.measure.counting import count_macs
from softline.measure.failures import CASE_ERRORS, failure_text
from softline.measure.memory import Memory
from softline.measure.turns import Timing, take_turns
from softline.process import trim

Meter: TypeAlias = Callable[[Case, int, Mode, Setting], Memory | str]
"""Measures the memory of a case; returns a text if that fails."""
Pair: TypeAlias = tuple[int, Mode]
"""A size and a mode."""
Key: TypeAlias = tuple[str, int, Mode]
"""The name of a case, a size and a mode."""

PRODUCT_SIDE = 1024
# far above the cost of a call and of reading the clock, and of filling the caches after another case
LEAST_SECONDS = 0.05


@dataclass(frozen=True)
class Row:
    """Costs of one case at one size in one mode; None for what was not measured."""

    case: str
    mode: Mode
    size: int
    label: str
    """The size as tables print it."""
    tokens: int
    milliseconds: float | None = None
    """Median over the rounds."""
    spread: float | None = None
    """Half the distance between the rounds' quartiles, in milliseconds."""
    speedup: float | None = None
    """How many times as fast as the baseline: the median of the ratios within rounds."""
    macs: int | None = None
    """Multiply-adds of matrix products and convolutions; for a training step forward and backward."""
    gflops: float | None = None
    """10^9 operations per second, where a multiply-add is two operations."""
    share: float | None = None
    """Fraction of the matrix product's speed between the same runs, in float32 or in the dtype, whichever is faster."""
    peak_bytes: int | None = None
    """Peak memory of the run, beyond weights and inputs."""
    process_bytes: int | None = None
    """Peak memory of its process."""
    rounds: tuple[float, ...] = ()
    """Milliseconds in each round."""
    failure: str | None = None
    """The reason why it could not be measured."""

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Row":
        """Convert back what `dataclasses.asdict` and JSON have made of a row."""
        return cls(**{**content, "rounds": tuple(content["rounds"])})

    @property
    def relative_time(self) -> float | None:
        """Time in units of the matrix product between the same runs, which cancels a slowdown of the whole machine."""
        return self.macs / self.share if self.macs and self.share else None


@dataclass(frozen=True)
class Group:
    """All cases at one size in one mode."""

    size: int
    mode: Mode
    rows: tuple[Row, ...]
    peak_gflops: float | None
    """Speed of the matrix product; None if nothing was timed."""


def measure(
    cases: Sequence[Case],
    sizes: Sequence[int],
    *,
    modes: Sequence[Mode] = ("infer",),
    setting: Setting = Setting(),  # noqa: B008 (frozen)
    rounds: int = 5,
    meter: Meter | None = None,
    baseline: str | None = None,
    interleave: bool = False,
    hear: Callable[[Row], None] = lambda row: None,
) -> Iterator[Group]:
    """Measure all cases at every size in every mode, smallest size first.

    The row of a case that fails says why; a case whose memory could not be measured is not timed.

    rounds: how often each case is timed, in turns; 0 does not time anything.
    meter: measures memory; None does not.
    baseline: the case that speeds are compared with; defaults to the first.
    interleave: all sizes and modes take turns in the same rounds instead of one after the other, so that a machine
        whose speed varies does not distort growth. No group is known before all, and an allocator that keeps large
        blocks keeps those of every size.
    hear: receives each row as soon as its memory is known, and again when its time is.
    """
    if interleave and setting.compiled:
        raise UserError("sizes cannot be interleaved if models are compiled: each size has graphs of its own")
    pairs: list[Pair] = [(size, mode) for size in sorted(sizes) for mode in modes]
    for size, _ in pairs:
        for case in cases:
            case.tokens(size)
    for part in [pairs] if interleave else [[pair] for pair in pairs]:
        rows = {}
        for size, mode in part:
            for case in cases:
                row = Row(case.name, mode, size, case.label(size), case.tokens(size))
                row = row if meter is None else _with_memory(row, meter(case, size, mode, setting))
                rows[case.name, size, mode] = row
                hear(row)
        peak = None
        if rounds:
            wanted = [(case, pair) for pair in part for case in cases if rows[case.name, *pair].failure is None]
            timed, peak = _time(wanted, setting, rounds)
            for key, result in timed.items():
                base = timed.get((cases[0].name if baseline is None else baseline, *key[1:]))
                rows[key] = _with_time(rows[key], result, base, peak)
                hear(rows[key])
        gflops = None if peak is None else 2e-9 * PRODUCT_SIDE**3 / max(peak.median, 1e-12)
        for pair in part:
            yield Group(*pair, tuple(rows[case.name, *pair] for case in cases), gflops)
        # blocks of this size seldom fit the next one, and would add up
        trim()


def _with_memory(row: Row, memory: Memory | str) -> Row:
    if isinstance(memory, str):
        return replace(row, failure=memory)
    return replace(row, peak_bytes=memory.peak_bytes, process_bytes=memory.process_bytes)


@dataclass(frozen=True)
class _Timed:
    timing: Timing
    macs: int


def _with_time(row: Row, result: _Timed | str, base: _Timed | str | None, peak: Timing | None) -> Row:
    if isinstance(result, str):
        return replace(row, failure=result)
    assert peak is not None, "the product is timed with the cases"
    timing, macs = result.timing, result.macs
    return replace(
        row,
        milliseconds=1e3 * timing.median,
        spread=1e3 * timing.spread,
        speedup=timing.ratio_to(base.timing) if isinstance(base, _Timed) else None,
        macs=macs,
        gflops=2e-9 * macs / timing.median,
        share=macs / PRODUCT_SIDE**3 * peak.median / max(timing.median, 1e-12),
        rounds=tuple(1e3 * seconds for seconds in timing.seconds),
    )


def _time(
    wanted: Sequence[tuple[Case, Pair]], setting: Setting, rounds: int
) -> tuple[dict[Key, _Timed | str], Timing | None]:
    """Return the timing of each case, or why it cannot be run, and the timing of the faster matrix product."""
    if setting.compiled:
        # graphs of other sizes would make this size's shapes dynamic, and too many of them silently end compilation
        torch.compiler.reset()
    runs: dict[Key, Callable[[], object]] = {}
    macs: dict[Key, int] = {}
    failures: dict[Key, _Timed | str] = {}
    for case, pair in wanted:
        key = (case.name, *pair)
        try:
            eager, run = prepare(case, *pair, setting)
            macs[key] = count_macs(eager)
            run()
        except CASE_ERRORS as error:
            failures[key] = failure_text(error)
        else:
            runs[key] = run
    products = _products(setting)
    turns: dict[tuple[Any, ...], Callable[[], object]] = {}
    for key, run in runs.items():
        turns[key] = run
        # after every case, so that the product meets the same machine
        turns |= {(dtype, *key): product for dtype, product in products.items()}
    on_gpu = torch.device(setting.device).type == "cuda"
    timings = take_turns(
        turns,
        rounds,
        wait=partial(torch.cuda.synchronize, setting.device) if on_gpu else lambda: None,
        warm_ups=3 if setting.compiled else 1,
        least_seconds=LEAST_SECONDS,
    )
    peaks = [Timing(tuple(time for key in runs for time in timings[dtype, *key].seconds)) for dtype in products]
    timed: dict[Key, _Timed | str] = {key: _Timed(timings[key], macs[key]) for key in runs}
    return {**timed, **failures}, min(peaks, key=lambda timing: timing.median) if runs else None


def _products(setting: Setting) -> dict[str, Callable[[], object]]:
    """Return matrix products in the dtype and in float32, in which operators may compute whatever the dtype."""
    factor = torch.randn(PRODUCT_SIDE, PRODUCT_SIDE, device=setting.device)
    return {name: _square(factor.to(DTYPES[name])) for name in dict.fromkeys(("float32", setting.dtype))}


def _square(factor: torch.Tensor) -> Callable[[], object]:
    return lambda: factor @ factor
