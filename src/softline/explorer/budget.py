"""The cost of a model at an image size, counted without running it: a run that would never end is not started."""

import copy
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from softline.errors import UserError
from softline.measure.counting import count_macs

MAX_MACS = 250 * 10**9
"""Multiply-adds of about ten seconds on two cores."""
MAX_TENSOR_BYTES = 2**30
"""Size of the largest tensor; others of this size come with it."""
REPEAT_SECONDS = 0.5
"""Runs that take longer are not repeated."""
REPEATS = 3


@dataclass(frozen=True)
class Need:
    """What a model needs for one image."""

    macs: int
    """Multiply-adds of matrix products and convolutions."""
    largest: int
    """Bytes of the largest tensor."""


@dataclass(frozen=True)
class Duration:
    """The median time of several runs."""

    seconds: float
    runs: int


def need(model: nn.Module, shape: tuple[int, int, int]) -> Need:
    """Count the cost of an image [C, H, W] on torch's meta device: nothing is computed or allocated."""
    # a copy: the model stays where it is
    shadow = copy.deepcopy(model).to("meta")
    image = torch.empty(1, *shape, device="meta")
    with torch.no_grad(), _Meter() as meter:
        macs = count_macs(lambda: shadow(image))
    return Need(macs + meter.softmax_macs, meter.largest)


def check_need(needed: Need, *, name: str, size: int) -> None:
    """Refuse what exceeds the limits of this page."""
    if needed.macs > MAX_MACS:
        raise UserError(
            f"{name} needs {needed.macs / 1e9:,.0f} billion multiply-adds for {size} x {size} pixels, and the limit of "
            f"this page is {MAX_MACS / 1e9:.0f}: choose a smaller size or an attention of linear cost"
        )
    if needed.largest > MAX_TENSOR_BYTES:
        raise UserError(
            f"{name} needs a tensor of {needed.largest / 2**30:,.1f} GiB for {size} x {size} pixels, and the limit of "
            f"this page is {MAX_TENSOR_BYTES / 2**30:.0f}: choose a smaller size or an attention of linear cost"
        )


@torch.no_grad()
def duration(model: nn.Module, images: Tensor) -> Duration:
    """Time the model alone on images [B, C, H, W]; a run that takes long is not repeated."""
    seconds: list[float] = []
    while len(seconds) < REPEATS and sum(seconds) <= REPEAT_SECONDS:
        begin = time.perf_counter()
        model(images)
        seconds.append(time.perf_counter() - begin)
    return Duration(statistics.median(seconds), len(seconds))


class _Meter(TorchFunctionMode):
    """Measures the largest tensor, and counts softmax attention as the CPU runs it, without N x N weights.

    The meta device would use its definition instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.softmax_macs = self.largest = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            q, k, v = args[:3]
            self.softmax_macs += q.numel() * k.shape[-2] + q[..., 0].numel() * v.shape[-2] * v.shape[-1]
            out = q.new_empty(*q.shape[:-1], v.shape[-1])
        else:
            out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel() * out.element_size())
        return out
