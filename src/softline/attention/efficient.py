"""Efficient attention: Attention with Linear Complexities (https://arxiv.org/abs/1812.01243)."""

from softline import ops
from softline.attention.multihead import MultiHeadAttention, Operator, Plain
from softline.attention.registry import ATTENTIONS


@ATTENTIONS.register("efficient")
def efficient(dim: int, num_heads: int, *, num_prefix_tokens: int = 0, qkv_bias: bool = True) -> MultiHeadAttention:
    """Efficient attention: softmax of the queries over channels and of the keys over tokens."""
    return MultiHeadAttention(
        dim,
        num_heads,
        Operator("efficient", ops.efficient_attention, ops.efficient_weights, ops.efficient_factors),
        Plain(),
        num_prefix_tokens=num_prefix_tokens,
        qkv_bias=qkv_bias,
    )
