"""InLine attention: Bridging the Divide (https://arxiv.org/abs/2412.06590)."""

from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from softline import ops
from softline.attention.multihead import MultiHeadAttention, Operator
from softline.attention.registry import ATTENTIONS
from softline.checks import check_option
from softline.errors import UserError
from softline.layers.grid import GridSize
from softline.layers.local import LocalResidual
from softline.ops.inputs import Impl, narrow, widen, without_autocast

InlineFeatureMap = Literal["identity", "relu", "affine_relu", "leaky_relu", "exp"]
# the authors' temperature: phi(x) = exp(0.2 x)
EXP_TEMPERATURE = 0.2


class Affine(nn.Module):
    """A x + b for x [B, H, N, D], with a learned matrix A and a learned vector b for each head.

    A starts as the identity and b at 0, so that ReLU(A x + b) starts as ReLU; the paper does not state its start.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, head_dim))
        self.bias = nn.Parameter(torch.empty(num_heads, 1, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.eye(self.weight.shape[-1]))
        nn.init.zeros_(self.bias)

    @without_autocast
    def forward(self, x: Tensor) -> Tensor:
        return narrow(widen(x) @ widen(self.weight).mT + widen(self.bias), x.dtype)


class FeatureMap(nn.Module):
    """phi of queries and keys [B, H, N, D], the same for both: identity, relu, affine_relu, leaky_relu or exp."""

    def __init__(self, name: InlineFeatureMap, num_heads: int, head_dim: int) -> None:
        super().__init__()
        check_option("feature_map", name, get_args(InlineFeatureMap))
        self.name = name
        self.affine = Affine(num_heads, head_dim) if name == "affine_relu" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.affine is not None:
            return torch.relu(self.affine(x))
        phi = ops.FEATURE_MAPS[self.name]
        # exp overflows float16 early, so it saturates there like any other result
        return narrow(phi(EXP_TEMPERATURE * widen(x)), x.dtype) if self.name == "exp" else phi(x)

    def extra_repr(self) -> str:
        return self.name


class InlineCore(nn.Module):
    """The feature map of queries and keys."""

    in_parts = True
    """`MultiHeadAttention` may begin sums with it, see `softline.attention.bands`."""

    def __init__(self, feature_map: InlineFeatureMap, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.feature_map = feature_map
        self.phi = FeatureMap(feature_map, num_heads, head_dim)

    def forward(self, q: Tensor, k: Tensor, grid_size: GridSize, key_mask: Tensor | None) -> dict[str, Any]:
        return {"q": self.phi(q), "k": self.phi(k)}


class MappedSums(ops.InlineSums):
    """`ops.InlineSums` of queries and keys before the feature map."""

    def __init__(self, core: InlineCore, q: Tensor | None, centre: Tensor, grid_size: GridSize) -> None:
        super().__init__(grid_size[0] * grid_size[1], centre)
        self.phi = core.phi

    def add(self, k: Tensor, v: Tensor) -> None:
        super().add(self.phi(k), v)

    def read(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        return super().read(self.phi(q), dtype)


@ATTENTIONS.register("inline")
def inline(
    dim: int,
    num_heads: int,
    *,
    num_prefix_tokens: int = 0,
    feature_map: InlineFeatureMap = "identity",
    local_residual: bool = True,
    local_kernel: int | GridSize | None = None,
    qkv_bias: bool = True,
    impl: Impl = "auto",
) -> MultiHeadAttention:
    """InLine attention with its local residual.

    feature_map: phi of queries and keys: "identity" (the paper's default), "relu", "affine_relu" (ReLU(A x + b) with a
        learned matrix A, which starts as the identity, and a learned vector b, which starts at 0, for each head),
        "leaky_relu", or "exp" (exp(0.2 x), which is not normalised: queries or keys of a few hundred overflow float32).
    local_residual: add the depthwise convolution of the values whose kernels are predicted from the mean token.
    local_kernel: kernel size of the local residual, an int or (rows, columns), by default 3; (1, 3) for sequences.
    impl: see `softline.ops.inline_attention`.
    """
    check_option("impl", impl, get_args(Impl))
    local = None
    if local_residual:
        kernel = 3 if local_kernel is None else local_kernel
        local = LocalResidual(dim, num_heads, kernel_size=kernel, num_prefix_tokens=num_prefix_tokens)
    elif local_kernel is not None:
        raise UserError(f"local_kernel={local_kernel!r} has no effect without the local residual; leave it out")
    return MultiHeadAttention(
        dim,
        num_heads,
        Operator(
            "inline",
            partial(ops.inline_attention, impl=impl),
            ops.inline_weights,
            ops.inline_factors,
            None if impl == "explicit" else MappedSums,
        ),
        InlineCore(feature_map, num_heads, dim // num_heads),
        num_prefix_tokens=num_prefix_tokens,
        qkv_bias=qkv_bias,
        local=local,
    )
