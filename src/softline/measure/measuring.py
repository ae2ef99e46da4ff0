"""Measure cases: memory in a process of its own for each, time in turns with a matrix product as the reference."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from softline.measure.cases import DTYPES, Case, Mode, Setting, prepare
from softline.measure.counting import count_macs
from softline.measure.failures import CASE_ERRORS, failure_text
from softline.measure.memory import Memory
from softline.measure.turns import Timing, take_turns

Meter: TypeAlias = Callable[[Case, int, Mode, Setting], Memory | str]
"""Measures the memory of a case; returns a text if that fails."""

# no case has a name that starts with a space
PRODUCT = " matrix product"
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
    """Fraction of the matrix product's speed in the same rounds, in float32 or in the dtype, whichever is faster."""
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
        """Time in units of the matrix product of the same rounds, which cancels a slowdown of the whole machine."""
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
    hear: Callable[[Row], None] = lambda row: None,
) -> Iterator[Group]:
    """Measure all cases at every size in every mode, smallest size first.

    The row of a case that fails says why; a case whose memory could not be measured is not timed.

    rounds: how often each case is timed, in turns; 0 does not time anything.
    meter: measures memory; None does not.
    baseline: the case that speeds are compared with; defaults to the first.
    hear: receives each row as soon as its memory is known, and again when its time is.
    """
    for size in sorted(sizes):
        for case in cases:
            case.tokens(size)
    for size in sorted(sizes):
        for mode in modes:
            rows = {}
            for case in cases:
                row = Row(case.name, mode, size, case.label(size), case.tokens(size))
                rows[case.name] = row if meter is None else _with_memory(row, meter(case, size, mode, setting))
                hear(rows[case.name])
            peak = None
            if rounds:
                sound = [case for case in cases if rows[case.name].failure is None]
                timed, peak = _time(sound, size, mode, setting, rounds)
                base = timed.get(cases[0].name if baseline is None else baseline)
                for name, result in timed.items():
                    rows[name] = _with_time(rows[name], result, base, peak)
                    hear(rows[name])
            yield Group(size, mode, tuple(rows.values()), None if peak is None else _product_gflops(peak))


def _with_memory(row: Row, memory: Memory | str) -> Row:
    if isinstance(memory, str):
        return replace(row, failure=memory)
    return replace(row, peak_bytes=memory.peak_bytes, process_bytes=memory.process_bytes)


@dataclass(frozen=True)
class _Timed:
    timing: Timing
    macs: int


def _with_time(row: Row, result: _Timed | str, base: _Timed | str | None, peak: Timing) -> Row:
    if isinstance(result, str):
        return replace(row, failure=result)
    timing, macs = result.timing, result.macs
    product = PRODUCT_SIDE**3
    return replace(
        row,
        milliseconds=1e3 * timing.median,
        spread=1e3 * timing.spread,
        speedup=timing.ratio_to(base.timing) if isinstance(base, _Timed) else None,
        macs=macs,
        gflops=2e-9 * macs / timing.median,
        share=macs / product * timing.ratio_to(peak),
        rounds=tuple(1e3 * seconds for seconds in timing.seconds),
    )


def _time(
    cases: Sequence[Case], size: int, mode: Mode, setting: Setting, rounds: int
) -> tuple[dict[str, _Timed | str], Timing]:
    """Return the timing of each case, or why it cannot be run, and the timing of the faster matrix product."""
    if setting.compiled:
        # graphs of other sizes would make this size's shapes dynamic, and too many of them silently end compilation
        torch.compiler.reset()
    runs: dict[str, Callable[[], object]] = {}
    macs: dict[str, int] = {}
    failures: dict[str, _Timed | str] = {}
    for case in cases:
        try:
            eager, run = prepare(case, size, mode, setting)
            macs[case.name] = count_macs(eager)
            run()
        except CASE_ERRORS as error:
            failures[case.name] = failure_text(error)
        else:
            runs[case.name] = run
    products = _products(setting)
    on_gpu = torch.device(setting.device).type == "cuda"
    timings = take_turns(
        {**runs, **products},
        rounds,
        wait=partial(torch.cuda.synchronize, setting.device) if on_gpu else lambda: None,
        warm_ups=3 if setting.compiled else 1,
        least_seconds=LEAST_SECONDS,
    )
    timed: dict[str, _Timed | str] = {name: _Timed(timings[name], macs[name]) for name in runs}
    return {**timed, **failures}, min((timings[name] for name in products), key=lambda timing: timing.median)


def _products(setting: Setting) -> dict[str, Callable[[], object]]:
    """Return matrix products in the dtype and in float32, in which operators may compute whatever the dtype."""
    factor = torch.randn(PRODUCT_SIDE, PRODUCT_SIDE, device=setting.device)
    dtypes = dict.fromkeys(("float32", setting.dtype))
    return {f"{PRODUCT} {name}": _square(factor.to(DTYPES[name])) for name in dtypes}


def _square(factor: torch.Tensor) -> Callable[[], object]:
    return lambda: factor @ factor


def _product_gflops(peak: Timing) -> float:
    return 2e-9 * PRODUCT_SIDE**3 / max(peak.median, 1e-12)
