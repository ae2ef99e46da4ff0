"""Exact Gaussian-kernel attention, quadratic: appendix D of the SOFT paper (https://arxiv.org/abs/2207.03341)."""

from softline import ops
from softline.attention.multihead import MultiHeadAttention, Operator, Plain
from softline.attention.registry import ATTENTIONS


@ATTENTIONS.register("gaussian")
def gaussian(
    dim: int, num_heads: int, *, num_prefix_tokens: int = 0, symmetric: bool = True, qkv_bias: bool = True
) -> MultiHeadAttention:
    """exp(-|q - k|^2 / (2 sqrt(D))) v.

    symmetric: one projection serves as queries and keys, as in the paper.
    """
    return MultiHeadAttention(
        dim,
        num_heads,
        Operator("gaussian", ops.gaussian_attention, ops.gaussian_weights),
        Plain(),
        num_prefix_tokens=num_prefix_tokens,
        qkv_bias=qkv_bias,
        shared_qk=symmetric,
    )
