"""Costs that are counted rather than timed: the same on a busy machine."""

import itertools
import os
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode


def count_macs(run: Callable[[], object]) -> int:
    """Multiply-adds of all matrix products and convolutions that ``run`` executes."""
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops() // 2)


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes of CPU tensors that ``run`` holds at once, beyond what existed before."""
    # the profiler reports every missing GPU on stderr otherwise
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(itertools.accumulate(changes), default=0)


def cuda_peak_bytes(run: Callable[[], object], device: str = "cuda") -> int:
    """Most bytes of the device's tensors that ``run`` holds at once, beyond what existed before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)
