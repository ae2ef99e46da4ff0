"""What a model costs at a size: counted without computing it, so that what would never end is not begun."""

import copy
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from softline.errors import UserError

# some ten seconds on two cores
MAX_MACS = 250 * 10**9
# one tensor of that size comes with others
MAX_TENSOR_BYTES = 2**30
# repeated only if it does not take long
REPEAT_SECONDS = 0.5
REPEATS = 3


@dataclass(frozen=True)
class Need:
    """Of one image."""

    macs: int
    """Multiply-adds of matrix products and convolutions."""
    largest: int
    """Bytes of the largest tensor."""


@dataclass(frozen=True)
class Duration:
    seconds: float
    runs: int
    """Whose median it is."""


def need(model: nn.Module, shape: tuple[int, int, int]) -> Need:
    """Counted for an image [C, H, W] on torch's meta device: nothing is computed or allocated."""
    # a copy: the model stays where it is
    shadow = copy.deepcopy(model).to("meta")
    image = torch.empty(1, *shape, device="meta")
    with torch.no_grad(), _FusedSoftmax() as fused, _Counter() as counter:
        shadow(image)
    return Need(counter.flops // 2 + fused.macs, counter.largest)


def check_need(needed: Need, *, name: str, size: int) -> None:
    if needed.macs > MAX_MACS:
        raise UserError(
            f"{name} needs {needed.macs / 1e9:,.0f} billion multiply-adds for {size} x {size} pixels, and this page "
            f"stops at {MAX_MACS / 1e9:.0f}: choose a smaller size or an attention of linear cost"
        )
    if needed.largest > MAX_TENSOR_BYTES:
        raise UserError(
            f"{name} needs a tensor of {needed.largest / 2**30:,.1f} GiB for {size} x {size} pixels, and this page "
            f"stops at {MAX_TENSOR_BYTES / 2**30:.0f}: choose a smaller size or an attention of linear cost"
        )


@torch.no_grad()
def duration(model: nn.Module, images: Tensor) -> Duration:
    """Seconds of the model alone on images [B, C, H, W]: the median of a few runs, or of one that takes long."""
    seconds: list[float] = []
    while len(seconds) < REPEATS and sum(seconds) <= REPEAT_SECONDS:
        begin = time.perf_counter()
        model(images)
        seconds.append(time.perf_counter() - begin)
    return Duration(statistics.median(seconds), len(seconds))


class _FusedSoftmax(TorchFunctionMode):
    """Softmax attention as the CPU runs it, without N x N; the meta device would use its definition."""

    def __init__(self) -> None:
        super().__init__()
        self.macs = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args[:3]
        self.macs += q.numel() * k.shape[-2] + q[..., 0].numel() * v.shape[-2] * v.shape[-1]
        return q.new_empty(*q.shape[:-1], v.shape[-1])


class _Counter(TorchDispatchMode):
    """Counts as `softline.measure.counting.count_macs` does in less time, and the largest tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel() * out.element_size())
        return out
