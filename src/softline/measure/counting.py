"""Costs that are counted rather than timed, so that a busy machine does not change them."""

import itertools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from softline.attention.soft import SoftCore

aten = torch.ops.aten


def _convolution_backward(
    grad: torch.Size, x: torch.Size, weight: torch.Size, *rest: Any, out_shape: object = None
) -> int:
    """Two per multiply-add of a convolution, for the gradient of its input and for that of its weight.

    torch's own formula counts every pair of channels of the weight's gradient, also those of different groups.
    """
    *_, transposed, _, _, wanted = rest
    places = math.prod((x if transposed else grad)[2:])
    return 2 * x[0] * places * math.prod(weight) * (wanted[0] + wanted[1])


# older versions of torch do not count their own fused attention for CPUs
FUSED: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(
        grad, q, k, v
    ),
}
FORMULAS: dict[Any, Callable[..., int]] = {
    **{operation: formula for operation, formula in FUSED.items() if operation not in flop_registry},
    aten.convolution_backward: _convolution_backward,
}


def count_macs(run: Callable[[], object]) -> int:
    """Count the multiply-adds of all matrix products and convolutions that ``run`` executes."""
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        run()
    return int(counter.get_total_flops() // 2)


class Operations(NamedTuple):
    """Multiply-adds of one forward pass."""

    macs: int
    newton: int
    """Those of Newton's iteration, which are part of macs."""


def count_operations(model: nn.Module, images: Tensor) -> Operations:
    """Count the multiply-adds of a model in evaluation, and those of SOFT's Newton iterations in it.

    Nothing is computed if the model and the images [B, C, H, W] are on the meta device.
    """
    model.eval()
    with torch.no_grad():
        macs = count_macs(lambda: model(images))
        with _direct_inverses(model):
            return Operations(macs, macs - count_macs(lambda: model(images)))


@contextmanager
def _direct_inverses(model: nn.Module) -> Iterator[None]:
    """Let SOFT invert by a direct solve, which has no matrix products that are counted."""
    cores = [module for module in model.modules() if isinstance(module, SoftCore)]
    options = [core.options for core in cores]
    for core in cores:
        kept = {key: value for key, value in core.options.items() if key not in ("iterations", "start", "gradient")}
        core.options = {**kept, "inverse": "cholesky", "ridge": 1.0}
    try:
        yield
    finally:
        for core, own in zip(cores, options, strict=True):
            core.options = own


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
