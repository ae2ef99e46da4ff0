"""Focused linear attention: FLatten Transformer (https://arxiv.org/abs/2308.00442).

Deviation: the authors' positional encoding of the keys, which fixes the number of tokens, is left to the backbone.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softline import ops
from softline.attention.multihead import MultiHeadAttention, Operator
from softline.attention.registry import ATTENTIONS
from softline.checks import check_number
from softline.layers.grid import GridSize
from softline.layers.local import ValueConv


class FocusedCore(nn.Module):
    """The learned scale of each channel and the focusing power."""

    def __init__(self, num_heads: int, head_dim: int, power: float) -> None:
        super().__init__()
        check_number("power", power, 1)
        self.power = power
        self.scale = nn.Parameter(torch.empty(num_heads, 1, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.scale)

    def forward(self, q: Tensor, k: Tensor, grid_size: GridSize, key_mask: Tensor | None) -> dict[str, Any]:
        # softplus is positive, so dividing before the operator's relu equals dividing after it, up to its 1e-6
        scale = F.softplus(self.scale).to(q.dtype)
        return {"q": q / scale, "k": k / scale, "power": self.power}

    def extra_repr(self) -> str:
        return f"power={self.power}"


@ATTENTIONS.register("focused")
def focused(
    dim: int,
    num_heads: int,
    *,
    num_prefix_tokens: int = 0,
    power: float = 3.0,
    value_conv: int | GridSize | None = 5,
    qkv_bias: bool = True,
) -> MultiHeadAttention:
    """FLatten's focused linear attention.

    power: focusing factor p.
    value_conv: kernel size of the depthwise convolution of the values that is added; None adds none.
    """
    head_dim = dim // num_heads
    local = None
    if value_conv is not None:
        local = ValueConv(num_heads, head_dim, value_conv, shared="heads", num_prefix_tokens=num_prefix_tokens)
    return MultiHeadAttention(
        dim,
        num_heads,
        Operator("focused", ops.focused_attention, ops.focused_weights, ops.focused_factors),
        FocusedCore(num_heads, head_dim, power),
        num_prefix_tokens=num_prefix_tokens,
        qkv_bias=qkv_bias,
        local=local,
    )
