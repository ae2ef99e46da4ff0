"""Softmax attention, the quadratic baseline, on torch's scaled dot-product attention.

The feature map before the softmax is an experiment of the InLine paper (https://arxiv.org/abs/2412.06590, Table 1):
with a map that is not injective, such as ReLU, softmax attention confuses queries too and is less accurate. The numbers
of that table, and the map it uses, are not in softline's sources.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from softline import ops
from softline.attention.inline import FeatureMap, InlineFeatureMap
from softline.attention.multihead import MultiHeadAttention, Operator
from softline.attention.registry import ATTENTIONS
from softline.checks import check_range
from softline.layers.grid import GridSize
from softline.layers.local import LocalResidual
from softline.ops.softmax import attend


class SoftmaxCore(nn.Module):
    """The feature map of queries and keys, and dropout of the attention weights in training."""

    in_parts = True

    def __init__(self, phi: FeatureMap, dropout: float) -> None:
        super().__init__()
        check_range("dropout", dropout, 0, 1, open_high=True)
        self.phi = phi
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, grid_size: GridSize, key_mask: Tensor | None) -> dict[str, Any]:
        return {"q": self.phi(q), "k": self.phi(k), "dropout": self.dropout if self.training else 0.0}

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}" if self.dropout else ""


def _softmax_reader(core: SoftmaxCore, k: Tensor, v: Tensor) -> Callable[[Tensor], Tensor]:
    mapped = core.phi(k)
    return lambda q: attend(core.phi(q), mapped, v)


@ATTENTIONS.register("softmax")
def softmax(
    dim: int,
    num_heads: int,
    *,
    num_prefix_tokens: int = 0,
    feature_map: InlineFeatureMap = "identity",
    symmetric: bool = False,
    local_residual: bool = False,
    dropout: float = 0.0,
    qkv_bias: bool = True,
) -> MultiHeadAttention:
    """Softmax attention.

    feature_map: phi of queries and keys before the softmax; "identity" is ordinary softmax attention, the others are
        those of "inline" attention.
    symmetric: one projection serves as queries and keys (Table 8 of the SOFT paper).
    local_residual: add InLine's predicted 3x3 local residual.
    dropout: dropout probability of the weights in training.
    """
    local = LocalResidual(dim, num_heads, num_prefix_tokens=num_prefix_tokens) if local_residual else None
    return MultiHeadAttention(
        dim,
        num_heads,
        Operator("softmax", ops.softmax_attention, ops.softmax_weights, reader=_softmax_reader),
        SoftmaxCore(FeatureMap(feature_map, num_heads, dim // num_heads), dropout),
        num_prefix_tokens=num_prefix_tokens,
        qkv_bias=qkv_bias,
        shared_qk=symmetric,
        local=local,
    )
