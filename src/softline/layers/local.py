"""Local terms that are added to an attention's output: small convolutions over the grid of values.

They are called as ``local(x, v, grid_size, key_mask) -> [B, H, N, D]`` with the attention's input x [B, N, C] and its
values v [B, H, N, D], both zero at masked tokens. The result is zero for prefix tokens.

``kernels(x, key_mask)`` is all that depends on the input, and ``convolve(v, grid_size, kernels)`` the rest, which can
be called with some rows of the grid; ``reach`` is the number of rows above and below that a row depends on.
"""

import math
from collections.abc import Iterator
from functools import reduce
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# torch exports it under no public name
from torch._higher_order_ops.scan import scan

from softline.errors import UserError
from softline.layers.grid import GridSize, as_pair, mean_token, spatial_map, spatial_tokens
from softline.ops.chunks import is_exported, is_traced, needs_onnx_steps, of_any_size
from softline.ops.inputs import narrow, saturate, widen, without_autocast

# maps of at least this many elements get a convolution of their own
LARGE_MAP = 2**14


class LocalResidual(nn.Module):
    """InLine's local residual: a depthwise convolution whose kernels are predicted from the mean token.

    r = W2 gelu(W1 mean(x)): one kernel per channel and sample, both layers grouped by head.

    kernel_size: rows and columns, an int for both; 3 in the paper.
    """

    def __init__(
        self, dim: int, num_heads: int, *, kernel_size: int | GridSize = 3, num_prefix_tokens: int = 0
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.kernel_size = _odd_pair("the kernel of the local residual", kernel_size)
        self.num_prefix_tokens = num_prefix_tokens
        self.hidden = nn.Conv1d(dim, dim, 1, groups=num_heads)
        self.kernel = nn.Conv1d(dim, math.prod(self.kernel_size) * dim, 1, groups=num_heads)
        self.reach = self.kernel_size[0] // 2

    def forward(self, x: Tensor, v: Tensor, grid_size: GridSize, key_mask: Tensor | None = None) -> Tensor:
        return self.convolve(v, grid_size, self.kernels(x, key_mask))

    def kernels(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        mean = mean_token(x, key_mask).to(x.dtype)[..., None]  # [B, C, 1]
        # saturated before gelu, which is NaN at minus infinity, and before the product with values, which may be 0
        hidden = self.hidden(mean)
        kernels = self.kernel(F.gelu(saturate(hidden, hidden.dtype)))  # [B, 9 C, 1] for 3 x 3
        return saturate(kernels, kernels.dtype)

    def convolve(self, v: Tensor, grid_size: GridSize, kernels: Tensor) -> Tensor:
        values = spatial_map(v, grid_size, self.num_prefix_tokens)
        return spatial_tokens(_convolve_each(values, kernels, self.kernel_size), self.num_heads, self.num_prefix_tokens)


@without_autocast
def _convolve_each(values: Tensor, kernels: Tensor, size: GridSize) -> Tensor:
    """Convolve each channel of each sample [B, C, H, W] with its own kernel [B, rows * columns * C, 1] in float32."""
    if values.shape[0] == 0:
        return values  # torch cannot convolve without groups
    planes, weight = widen(values), widen(kernels).reshape(-1, 1, *size)
    if is_exported():
        out = _exported_convolution(planes, weight)
    else:
        out = _shifted_sum(planes, weight) if is_traced() else _grouped_convolution(planes, weight)
    return narrow(out, values.dtype)


def _shifted_sum(planes: Tensor, weight: Tensor) -> Tensor:
    """The definition: a weighted sum of shifted maps, nine for 3 x 3; a compiler fuses it into one loop."""
    batch, channels, height, width = planes.shape
    rows, columns = weight.shape[-2:]
    weight = weight.reshape(batch, channels, rows * columns, 1, 1)
    padded = F.pad(planes, (columns // 2, columns // 2, rows // 2, rows // 2))
    shifted = [
        padded[..., row : row + height, column : column + width] for row in range(rows) for column in range(columns)
    ]
    return reduce(torch.add, [weight[:, :, place] * maps for place, maps in enumerate(shifted)])


def _grouped_convolution(planes: Tensor, weight: Tensor) -> Tensor:
    """Convolve with one group per channel.

    Large maps on a CPU are convolved one sample at a time, which keeps channels last in memory; otherwise all samples
    share one convolution.
    """
    batch, channels, height, width = planes.shape
    padding = (weight.shape[-2] // 2, weight.shape[-1] // 2)
    large = planes.device.type == "cpu" and channels * height * width >= LARGE_MAP
    if batch > 1 and not large:
        side_by_side = planes.flatten(0, 1).unsqueeze(0)  # [1, B C, H, W]
        return F.conv2d(side_by_side, weight, padding=padding, groups=batch * channels).reshape(planes.shape)
    parts = [
        F.conv2d(sample, kernels, padding=padding, groups=channels)
        for sample, kernels in zip(planes.split(1), weight.split(channels), strict=True)
    ]
    return parts[0] if batch == 1 else torch.cat(parts)


def _exported_convolution(planes: Tensor, weight: Tensor) -> Tensor:
    """Convolve for exported graphs, whose runtimes do not fuse `_shifted_sum` and need ten times as long for it.

    One convolution for all samples has a number of groups that depends on the batch. ONNX has no such convolution: if
    the batch may have any size, the samples are convolved one after the other there.
    """
    batch, channels = planes.shape[:2]
    padding = (weight.shape[-2] // 2, weight.shape[-1] // 2)
    if not (of_any_size(batch) and needs_onnx_steps()):
        side_by_side = planes.flatten(0, 1).unsqueeze(0)  # [1, B C, H, W]
        return F.conv2d(side_by_side, weight, padding=padding, groups=batch * channels).reshape(planes.shape)

    def convolve(nothing: Tensor, sample: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        maps, kernels = sample
        return nothing.clone(), F.conv2d(maps[None], kernels, padding=padding, groups=channels)[0]

    kernels = weight.unflatten(0, (batch, channels))
    return scan(convolve, planes.new_zeros(()), (planes, kernels))[1]


class ValueConv(nn.Module):
    """A depthwise convolution of the values, zero-padded.

    kernel_size: rows and columns, an int for both.
    shared: "channels", for SOFT and Nystromformer: one kernel per head, shared by its channels, no bias;
        "heads", for FLatten: one kernel per channel of a head, shared by the heads, with bias;
        "none", for CSWin's LePE and enhanced linear attention: one kernel per channel of each head, with bias.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        kernel_size: int | GridSize,
        *,
        shared: Literal["channels", "heads", "none"] = "channels",
        num_prefix_tokens: int = 0,
    ) -> None:
        super().__init__()
        kernel = _odd_pair("the kernel of the value convolution", kernel_size)
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.shared = shared
        self.num_prefix_tokens = num_prefix_tokens
        planes = {"channels": num_heads, "heads": head_dim, "none": num_heads * head_dim}[shared]
        # holds the kernels; `forward` repeats them for all channels
        self.conv = nn.Conv2d(
            planes,
            planes,
            kernel,
            padding=(kernel[0] // 2, kernel[1] // 2),
            groups=planes,
            bias=shared != "channels",
        )
        self.reach = kernel[0] // 2

    def forward(self, x: Tensor, v: Tensor, grid_size: GridSize, key_mask: Tensor | None = None) -> Tensor:
        return self.convolve(v, grid_size, None)

    def kernels(self, x: Tensor, key_mask: Tensor | None = None) -> None:
        """They do not depend on the input."""

    def convolve(self, v: Tensor, grid_size: GridSize, kernels: None) -> Tensor:
        values = spatial_map(v, grid_size, self.num_prefix_tokens)
        bias = None if self.conv.bias is None else self._spread(self.conv.bias)
        out = F.conv2d(values, self._spread(self.conv.weight), bias, padding=self.conv.padding, groups=values.shape[1])
        return spatial_tokens(saturate(out, out.dtype), self.num_heads, self.num_prefix_tokens)

    def _spread(self, parameter: Tensor) -> Tensor:
        """Repeat a parameter to one row per channel [H * D, ...]."""
        if self.shared == "channels":
            return parameter.repeat_interleave(self.head_dim, dim=0)
        if self.shared == "none":
            return parameter
        return torch.cat([parameter] * self.num_heads)


def _odd_pair(name: str, kernel_size: int | GridSize) -> GridSize:
    kernel = as_pair(name, kernel_size)
    if any(side % 2 == 0 for side in kernel):
        raise UserError(f"{name} must be odd, got {kernel_size}")
    return kernel


class LocalSum(nn.ModuleList):
    """The sum of several local terms."""

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()

    def forward(self, x: Tensor, v: Tensor, grid_size: GridSize, key_mask: Tensor | None = None) -> Tensor:
        return reduce(torch.add, [term(x, v, grid_size, key_mask) for term in self])

    @property
    def reach(self) -> int:
        return max(int(term.reach) for term in self)

    def kernels(self, x: Tensor, key_mask: Tensor | None = None) -> list[Tensor | None]:
        return [term.kernels(x, key_mask) for term in self]

    def convolve(self, v: Tensor, grid_size: GridSize, kernels: list[Tensor | None]) -> Tensor:
        return reduce(torch.add, [term.convolve(v, grid_size, own) for term, own in zip(self, kernels, strict=True)])
