"""Linear angular attention: Castling-ViT, Compressing Self-Attention (https://arxiv.org/abs/2211.10526).

Deviations: the paper's auxiliary softmax branch, whose mask is driven to zero in training and which is dropped for
inference, is left out. The authors' code convolves the sequence of tokens with nine weights per head; here they are a
3 x 3 kernel on the grid, so that rows do not run into each other. See `softline.ops.angular_attention` for the
normalisation.
"""

from softline import ops
from softline.attention.multihead import MultiHeadAttention, Operator, Plain
from softline.attention.registry import ATTENTIONS
from softline.layers.grid import GridSize
from softline.layers.local import ValueConv


@ATTENTIONS.register("angular")
def angular(
    dim: int,
    num_heads: int,
    *,
    num_prefix_tokens: int = 0,
    value_conv: int | GridSize | None = 3,
    qkv_bias: bool = True,
) -> MultiHeadAttention:
    """Linear part of the angular kernel, with a depthwise convolution for the rest.

    value_conv: kernel size of the depthwise convolution of the values that is added, one kernel per head; None adds
        none.
    """
    local = None
    if value_conv is not None:
        local = ValueConv(num_heads, dim // num_heads, value_conv, num_prefix_tokens=num_prefix_tokens)
    return MultiHeadAttention(
        dim,
        num_heads,
        Operator("angular", ops.angular_attention, ops.angular_weights, ops.angular_factors),
        Plain(),
        num_prefix_tokens=num_prefix_tokens,
        qkv_bias=qkv_bias,
        local=local,
    )
