"""Softmax attention, the quadratic baseline, on torch's scaled dot-product attention."""

from typing import Any

from torch import Tensor, nn

from softline import ops
from softline.attention.multihead import MultiHeadAttention, Operator
from softline.attention.registry import ATTENTIONS
from softline.checks import check_range
from softline.layers.grid import GridSize
from softline.layers.local import LocalResidual


class SoftmaxCore(nn.Module):
    """Dropout of the attention weights in training."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        check_range("dropout", dropout, 0, 1, open_high=True)
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, grid_size: GridSize, key_mask: Tensor | None) -> dict[str, Any]:
        return {"q": q, "k": k, "dropout": self.dropout if self.training else 0.0}

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}" if self.dropout else ""


@ATTENTIONS.register("softmax")
def softmax(
    dim: int,
    num_heads: int,
    *,
    num_prefix_tokens: int = 0,
    symmetric: bool = False,
    local_residual: bool = False,
    dropout: float = 0.0,
    qkv_bias: bool = True,
) -> MultiHeadAttention:
    """Softmax attention.

    symmetric: one projection serves as queries and keys (Table 8 of the SOFT paper).
    local_residual: add InLine's predicted 3x3 local residual.
    dropout: dropout probability of the weights in training.
    """
    local = LocalResidual(dim, num_heads, num_prefix_tokens=num_prefix_tokens) if local_residual else None
    return MultiHeadAttention(
        dim,
        num_heads,
        Operator("softmax", ops.softmax_attention, ops.softmax_weights),
        SoftmaxCore(dropout),
        num_prefix_tokens=num_prefix_tokens,
        qkv_bias=qkv_bias,
        shared_qk=symmetric,
        local=local,
    )
