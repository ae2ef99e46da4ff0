"""InLine attention: Bridging the Divide (https://arxiv.org/abs/2412.06590)."""

from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor, nn

from softline import ops
from softline.attention.multihead import MultiHeadAttention, Operator
from softline.attention.registry import ATTENTIONS
from softline.checks import check_option
from softline.layers.grid import GridSize
from softline.layers.local import LocalResidual
from softline.ops.inputs import Impl, narrow, widen

InlineFeatureMap = Literal["identity", "relu", "leaky_relu", "exp"]
# the authors' temperature: phi(x) = exp(0.2 x)
EXP_TEMPERATURE = 0.2


class InlineCore(nn.Module):
    """The feature map of queries and keys."""

    def __init__(self, feature_map: InlineFeatureMap) -> None:
        super().__init__()
        check_option("feature_map", feature_map, get_args(InlineFeatureMap))
        self.feature_map = feature_map

    def forward(self, q: Tensor, k: Tensor, grid_size: GridSize, key_mask: Tensor | None) -> dict[str, Any]:
        return {"q": self._phi(q), "k": self._phi(k)}

    def _phi(self, x: Tensor) -> Tensor:
        phi = ops.FEATURE_MAPS[self.feature_map]
        # exp overflows float16 early, so it saturates there like any other result
        return narrow(phi(EXP_TEMPERATURE * widen(x)), x.dtype) if self.feature_map == "exp" else phi(x)

    def extra_repr(self) -> str:
        return self.feature_map


@ATTENTIONS.register("inline")
def inline(
    dim: int,
    num_heads: int,
    *,
    num_prefix_tokens: int = 0,
    feature_map: InlineFeatureMap = "identity",
    local_residual: bool = True,
    local_kernel: int | GridSize = 3,
    qkv_bias: bool = True,
    impl: Impl = "auto",
) -> MultiHeadAttention:
    """InLine attention with its local residual.

    feature_map: phi of queries and keys: "identity" (the paper's default), "relu", "leaky_relu", or "exp" (exp(0.2 x),
        which is not normalised: queries or keys of a few hundred overflow float32).
    local_residual: add the depthwise convolution of the values whose kernels are predicted from the mean token.
    local_kernel: kernel size of the local residual, an int or (rows, columns); (1, 3) for sequences.
    impl: see `softline.ops.inline_attention`.
    """
    check_option("impl", impl, get_args(Impl))
    local = None
    if local_residual:
        local = LocalResidual(dim, num_heads, kernel_size=local_kernel, num_prefix_tokens=num_prefix_tokens)
    return MultiHeadAttention(
        dim,
        num_heads,
        Operator("inline", partial(ops.inline_attention, impl=impl), ops.inline_weights, ops.inline_factors),
        InlineCore(feature_map),
        num_prefix_tokens=num_prefix_tokens,
        qkv_bias=qkv_bias,
        local=local,
    )
