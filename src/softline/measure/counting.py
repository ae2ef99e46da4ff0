"""Costs that are counted rather than timed, so that a busy machine does not change them."""

import itertools
import os
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode


def count_macs(run: Callable[[], object]) -> int:
    """Count the multiply-adds of all matrix products and convolutions that ``run`` executes."""
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops() // 2)


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak bytes of CPU tensors that ``run`` holds at once, beyond those that existed before."""
    # otherwise the profiler writes about missing GPUs to stderr
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(itertools.accumulate(changes), default=0)


def cuda_peak_bytes(run: Callable[[], object], device: str = "cuda") -> int:
    """Return the peak bytes of GPU tensors that ``run`` holds at once, beyond those that existed before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)
