"""Focused linear attention: FLatten Transformer (https://arxiv.org/abs/2308.00442).

The keys have a learned position encoding, for which the backbones state their grid. DeiT-T with three heads has 6.19 M
parameters; the paper reports 6.1 M, and its code does not include DeiT.

Deviations: the position encoding is resized to other grids (bilinear), where the authors' code takes one size only. The
learned scale divides before the operator adds 1e-6 and not after it, and no 1e-6 is added to the sums of the rows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softline import ops
from softline.attention.multihead import MultiHeadAttention, Operator
from softline.attention.registry import ATTENTIONS
from softline.checks import check_number
from softline.layers.embed import PositionEmbed
from softline.layers.grid import GridSize, as_pair
from softline.layers.local import ValueConv
from softline.ops.inputs import hide, narrow, widen


class FocusedCore(nn.Module):
    """The learned scale of each channel, the focusing power and the position encoding of the keys."""

    def __init__(self, num_heads: int, head_dim: int, power: float, position: PositionEmbed | None) -> None:
        super().__init__()
        check_number("power", power, 1)
        self.power = power
        self.scale = nn.Parameter(torch.empty(num_heads, 1, head_dim))
        self.position = position
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.scale)
        if self.position is not None:
            nn.init.zeros_(self.position.weight)

    def forward(self, q: Tensor, k: Tensor, grid_size: GridSize, key_mask: Tensor | None) -> dict[str, Any]:
        if self.position is not None:
            encoding = self.position.resized(grid_size).unflatten(-1, (k.shape[1], -1))  # [1, N, H, D]
            k = hide(widen(k) + widen(encoding.transpose(1, 2)), key_mask)
        # softplus is positive, so dividing before the operator's relu equals dividing after it, up to its 1e-6
        scale = F.softplus(widen(self.scale))
        # a scale below 1 may take float16 beyond its range, where the quotient saturates like any other result
        return {"q": narrow(widen(q) / scale, q.dtype), "k": narrow(widen(k) / scale, q.dtype), "power": self.power}

    def extra_repr(self) -> str:
        return f"power={self.power}"


@ATTENTIONS.register("focused")
def focused(
    dim: int,
    num_heads: int,
    *,
    num_prefix_tokens: int = 0,
    power: float = 3.0,
    position_grid: int | GridSize | None = None,
    value_conv: int | GridSize | None = 5,
    qkv_bias: bool = True,
) -> MultiHeadAttention:
    """FLatten's focused linear attention.

    power: focusing factor p.
    position_grid: grid for which the keys have a learned position encoding, resized for any other; None: no position
        encoding. Backbones set it to their grid at img_size.
    value_conv: kernel size of the depthwise convolution of the values that is added, one kernel per channel of a head,
        shared by the heads; None adds none.
    """
    head_dim = dim // num_heads
    local = None
    if value_conv is not None:
        local = ValueConv(num_heads, head_dim, value_conv, shared="heads", num_prefix_tokens=num_prefix_tokens)
    position = None
    if position_grid is not None:
        position = PositionEmbed(dim, as_pair("position_grid", position_grid), num_prefix_tokens=num_prefix_tokens)
    return MultiHeadAttention(
        dim,
        num_heads,
        Operator("focused", ops.focused_attention, ops.focused_weights, ops.focused_factors),
        FocusedCore(num_heads, head_dim, power, position),
        num_prefix_tokens=num_prefix_tokens,
        qkv_bias=qkv_bias,
        local=local,
    )
