"""Classic kernelised linear attention: Transformers are RNNs (https://arxiv.org/abs/2006.16236).

The feature map "affine_relu" is that of the InLine paper (https://arxiv.org/abs/2412.06590, Fig. 1b and Table 3).
"""

from typing import Any

from torch import Tensor, nn

from softline import ops
from softline.attention.inline import Affine
from softline.attention.multihead import MultiHeadAttention, Operator, Plain
from softline.attention.registry import ATTENTIONS
from softline.checks import check_option
from softline.layers.grid import GridSize


class AffineCore(nn.Module):
    """The learned map A x + b of queries and keys, whose ReLU are their features."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.affine = Affine(num_heads, head_dim)

    def forward(self, q: Tensor, k: Tensor, grid_size: GridSize, key_mask: Tensor | None) -> dict[str, Any]:
        return {"q": self.affine(q), "k": self.affine(k), "feature_map": "relu"}


@ATTENTIONS.register("linear")
def linear(
    dim: int, num_heads: int, *, num_prefix_tokens: int = 0, feature_map: str = "elu", qkv_bias: bool = True
) -> MultiHeadAttention:
    """phi(q) (phi(k)^T v), normalised.

    feature_map: "elu" (elu + 1), "relu", "leaky_relu", "identity", "exp", or "affine_relu": ReLU(A x + b) with a
        learned matrix A, which starts as the identity, and a learned vector b, which starts at 0, for each head. With
        "leaky_relu" and "identity", which can be negative, the denominator may vanish.
    """
    check_option("feature_map", feature_map, [*ops.FEATURE_MAPS, "affine_relu"])
    affine = feature_map == "affine_relu"
    return MultiHeadAttention(
        dim,
        num_heads,
        Operator("linear", ops.linear_attention, ops.linear_weights, ops.linear_factors),
        AffineCore(num_heads, dim // num_heads) if affine else Plain(feature_map=feature_map),
        num_prefix_tokens=num_prefix_tokens,
        qkv_bias=qkv_bias,
    )
