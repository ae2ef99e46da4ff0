"""Classic kernelised linear attention: Transformers are RNNs (https://arxiv.org/abs/2006.16236)."""

from softline import ops
from softline.attention.multihead import MultiHeadAttention, Operator, Plain
from softline.attention.registry import ATTENTIONS
from softline.checks import check_option


@ATTENTIONS.register("linear")
def linear(
    dim: int, num_heads: int, *, num_prefix_tokens: int = 0, feature_map: str = "elu", qkv_bias: bool = True
) -> MultiHeadAttention:
    """phi(q) (phi(k)^T v), normalised.

    feature_map: see `softline.ops.linear_attention`.
    """
    check_option("feature_map", feature_map, ops.FEATURE_MAPS)
    return MultiHeadAttention(
        dim,
        num_heads,
        Operator("linear", ops.linear_attention, ops.linear_weights, ops.linear_factors),
        Plain(feature_map=feature_map),
        num_prefix_tokens=num_prefix_tokens,
        qkv_bias=qkv_bias,
    )
