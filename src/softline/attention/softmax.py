"""Softmax attention, the quadratic baseline, on torch's scaled dot-product attention."""

from softline import ops
from softline.attention.multihead import MultiHeadAttention, Operator, Plain
from softline.attention.registry import ATTENTIONS
from softline.layers.local import LocalResidual


@ATTENTIONS.register("softmax")
def softmax(
    dim: int,
    num_heads: int,
    *,
    num_prefix_tokens: int = 0,
    symmetric: bool = False,
    local_residual: bool = False,
    qkv_bias: bool = True,
) -> MultiHeadAttention:
    """Softmax attention.

    symmetric: keys are queries (Table 8 of the SOFT paper).
    local_residual: add InLine's predicted 3x3 residual.
    """
    local = LocalResidual(dim, num_heads, num_prefix_tokens=num_prefix_tokens) if local_residual else None
    return MultiHeadAttention(
        dim,
        num_heads,
        Operator("softmax", ops.softmax_attention, ops.softmax_weights),
        Plain(),
        num_prefix_tokens=num_prefix_tokens,
        qkv_bias=qkv_bias,
        shared_qk=symmetric,
        local=local,
    )
