"""Hydra attention: Efficient Attention with Many Heads (https://arxiv.org/abs/2209.07484)."""

from softline import ops
from softline.attention.multihead import MultiHeadAttention, Operator, Plain
from softline.attention.registry import ATTENTIONS


@ATTENTIONS.register("hydra")
def hydra(dim: int, num_heads: int, *, num_prefix_tokens: int = 0, qkv_bias: bool = True) -> MultiHeadAttention:
    """Hydra attention; it has as many heads as channels regardless of ``num_heads``, so `weights` has ``dim`` maps."""
    return MultiHeadAttention(
        dim,
        num_heads,
        Operator("hydra", ops.hydra_attention, ops.hydra_weights, ops.hydra_factors),
        Plain(),
        num_prefix_tokens=num_prefix_tokens,
        qkv_bias=qkv_bias,
    )
