"""Enhanced linear attention: EfficientViT (https://arxiv.org/abs/2205.14756).

ReLU linear attention, which sees the whole image, enhanced with a depthwise convolution, which sees the neighbourhood.

Deviations: the paper inserts the convolution into the MLP that follows the attention, on its hidden channels. An
attention module has no MLP, so the convolution is applied to the values here, one 3 x 3 kernel per channel, and its
result is added. DeiT-T has 5.74 M parameters this way and 5.81 M with convolutions in the MLPs; FLatten reports 5.8 M.
The multi-scale tokens of the paper's later versions are left out: FLatten and InLine compare with the first one, whose
title has the name of this attention.
"""

from softline import ops
from softline.attention.multihead import MultiHeadAttention, Operator, Plain
from softline.attention.registry import ATTENTIONS
from softline.layers.grid import GridSize
from softline.layers.local import ValueConv


@ATTENTIONS.register("enhanced")
def enhanced(
    dim: int,
    num_heads: int,
    *,
    num_prefix_tokens: int = 0,
    value_conv: int | GridSize = 3,
    qkv_bias: bool = True,
) -> MultiHeadAttention:
    """Linear attention with ReLU and a depthwise convolution of the values.

    value_conv: kernel size of the depthwise convolution of the values that is added, one kernel per channel; without
        it this is "linear" attention with the feature map "relu".
    """
    return MultiHeadAttention(
        dim,
        num_heads,
        Operator("enhanced", ops.linear_attention, ops.linear_weights, ops.linear_factors),
        Plain(feature_map="relu"),
        num_prefix_tokens=num_prefix_tokens,
        qkv_bias=qkv_bias,
        local=ValueConv(num_heads, dim // num_heads, value_conv, shared="none", num_prefix_tokens=num_prefix_tokens),
    )
