"""SOFT and SOFT++: Softmax-free Linear Transformers (https://arxiv.org/abs/2207.03341).

As in the released code: queries are divided by D^(1/4) before landmarks are sampled (so that half the squared distance
is that of Eq. 5), learned landmarks pass LayerNorm and GELU, and a depthwise convolution of the values is added.
Deviations: the landmark grid is capped at 7 x 7 unless ``max_landmarks="ratio"``, and a landmark that represents
several of the paper's counts that many times in SOFT++'s degrees, so that the weights do not grow with the image; the
Newton iteration has its own start for every matrix, and the release's only with ``start="release"``.
"""

from functools import partial
from typing import Any, cast, get_args

from torch import Tensor, nn

from softline import ops
from softline.attention.multihead import MultiHeadAttention, Operator
from softline.attention.registry import ATTENTIONS
from softline.checks import check_option
from softline.layers.grid import GridSize
from softline.layers.landmarks import LandmarkPlan, MaxLandmarks, Sampling, create_landmarks
from softline.layers.local import ValueConv
from softline.ops.inputs import Impl
from softline.ops.newton import NewtonGradient
from softline.ops.soft import ITERATIONS, Inverse, Inversion, SoftStart, check_inverse


class SoftCore(nn.Module):
    """The landmarks of the queries and the options of the operator."""

    in_parts = True
    """`MultiHeadAttention` may begin sums with it, see `softline.attention.bands`."""

    def __init__(self, landmarks: nn.Module, *, num_prefix_tokens: int = 0, **options: Any) -> None:
        super().__init__()
        self.landmarks = landmarks
        self.num_prefix_tokens = num_prefix_tokens
        self.options = options

    def forward(self, q: Tensor, k: Tensor, grid_size: GridSize, key_mask: Tensor | None) -> dict[str, Any]:
        prefix = self.num_prefix_tokens
        spatial_mask = None if key_mask is None else key_mask[:, prefix:]
        landmarks, landmark_mask = self.landmarks(q[:, :, prefix:], grid_size, spatial_mask)
        cells = None
        if self.options["normalize"]:
            cells = cast(LandmarkPlan, self.landmarks.plan).cells_each(grid_size, spatial_mask, q.device)
        given = {"q": q, "landmarks": landmarks, "landmark_mask": landmark_mask, "cells": cells}
        return {**given, **self.options}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


def _sums(core: SoftCore, q: Tensor | None, centre: Tensor, grid_size: GridSize) -> ops.SoftSums:
    assert q is not None, "queries and keys have one projection"
    given = core(q, q, grid_size, None)
    return ops.soft_sums(**{name: value for name, value in given.items() if name not in ("q", "landmark_mask")})


@ATTENTIONS.register("soft")
def soft(
    dim: int,
    num_heads: int,
    *,
    num_prefix_tokens: int = 0,
    normalize: bool = False,
    sampling: Sampling = "conv",
    ratio: int | GridSize = 1,
    max_landmarks: MaxLandmarks = 7,
    inverse: Inverse = "newton",
    iterations: int = ITERATIONS,
    start: SoftStart = "norm",
    gradient: NewtonGradient = "one_step",
    ridge: float = 0.0,
    value_conv: int | GridSize | None = 3,
    qkv_bias: bool = True,
    impl: Impl = "auto",
) -> MultiHeadAttention:
    """SOFT: P^T A^+ P; "softpp" is SOFT++, the same with ``normalize=True``: P^T D^-1/2 A^+ D^-1/2 P.

    sampling, ratio, max_landmarks: landmark sampling, see `softline.layers.landmarks.create_landmarks`.
    inverse, iterations, start, gradient, ridge, impl: see `softline.ops.soft_attention`.
    value_conv: kernel size of the depthwise convolution of the values that is added (9, 5, 3 in stages 1, 2, 3 of the
        released models); None adds none.
    """
    check_inverse(Inversion(normalize, inverse, iterations, start, gradient, ridge))
    check_option("impl", impl, get_args(Impl))
    head_dim = dim // num_heads
    # |D^(-1/4) q - l|^2 = D^(-1/2) |q - D^(1/4) l|^2: scaling the few landmarks is cheaper than the many queries
    landmarks = create_landmarks(sampling, head_dim, ratio=ratio, max_landmarks=max_landmarks, scale=head_dim**-0.25)
    core = SoftCore(
        landmarks,
        num_prefix_tokens=num_prefix_tokens,
        normalize=normalize,
        inverse=inverse,
        iterations=iterations,
        start=start,
        gradient=gradient,
        ridge=ridge,
    )
    local = None
    if value_conv is not None:
        local = ValueConv(num_heads, head_dim, value_conv, num_prefix_tokens=num_prefix_tokens)
    return MultiHeadAttention(
        dim,
        num_heads,
        Operator(
            "softpp" if normalize else "soft",
            partial(ops.soft_attention, impl=impl),
            ops.soft_weights,
            ops.soft_factors,
            None if impl == "explicit" else _sums,
        ),
        core,
        num_prefix_tokens=num_prefix_tokens,
        qkv_bias=qkv_bias,
        shared_qk=True,
        local=local,
    )


softpp = partial(soft, normalize=True)
softpp.__doc__ = "SOFT++: `soft` with ``normalize=True`` and the same options."
ATTENTIONS.register("softpp")(softpp)
