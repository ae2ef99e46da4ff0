"""Exact Gaussian-kernel attention: Eq. 5 and appendix D of SOFT (https://arxiv.org/abs/2207.03341).

S_ij = exp(-||q_i - k_j||^2 / (2 sqrt(D))), not normalised. Quadratic in the number of tokens.
"""

import math

import torch
from torch import Tensor

from softline.ops.chunks import may_overwrite
from softline.ops.inputs import (
    check_alike,
    count_tokens,
    finish,
    hide,
    hide_rows,
    narrow,
    prepare,
    take_rows,
    without_autocast,
)


def gaussian_kernel(x: Tensor, y: Tensor, *, scale: float, mask: Tensor | None = None) -> Tensor:
    """exp(-scale/2 * ||x_i - y_j||^2) by one matrix product: x [..., N, D], y [..., M, D] -> [..., N, M].

    mask: bool [B, M], True for real rows of y [B, H, M, D]; the others are left out of the centre.
    """
    centre = centre_of(y, mask)
    return power_of_two(left_factor(x, centre, scale) @ right_factor(y, centre, scale).mT)


def centre_of(y: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of the real rows of y [B, H, M, D], of which masked ones are 0: [B, H, 1, D], a constant.

    Distances are invariant to a common shift; around the centre of y, |x|^2 + |y|^2 - 2 x.y cancels least.
    """
    return (y.sum(-2, keepdim=True) / count_tokens(y.shape[-2], mask, y.dtype)).detach()


def left_factor(x: Tensor, centre: Tensor, scale: float) -> Tensor:
    """[s x, -s/2 |x|^2, 1] with s = scale * log2(e): [..., D + 2].

    Its product with `right_factor` is the exponent in exp(-scale/2 ||x - y||^2) = 2^exponent; exp2 costs half of exp.
    """
    x = x - centre
    scale *= math.log2(math.e)
    half = -0.5 * scale * x.square().sum(-1, keepdim=True)
    return torch.cat([scale * x, half, torch.ones_like(half)], dim=-1)


def right_factor(y: Tensor, centre: Tensor, scale: float) -> Tensor:
    """[y, 1, -s/2 |y|^2] with s = scale * log2(e): [..., D + 2]."""
    scale *= math.log2(math.e)
    if may_overwrite():
        return _right_factor_in_place(y, centre, scale)
    y = y - centre
    half = -0.5 * scale * y.square().sum(-1, keepdim=True)
    return torch.cat([y, torch.ones_like(half), half], dim=-1)


def _right_factor_in_place(y: Tensor, centre: Tensor, scale: float) -> Tensor:
    """[y, 1, -scale/2 |y|^2] without intermediate tensors as large as y."""
    # allocated from a difference, so that it is batched under torch.func.vmap if either operand is
    factor = (y[..., :1, :] - centre).new_empty(*y.shape[:-1], y.shape[-1] + 2)
    shifted = factor[..., :-2]
    shifted.copy_(y)
    shifted.sub_(centre)
    factor[..., -2] = 1
    factor[..., -1] = shifted.square().sum(-1).mul_(-0.5 * scale)
    return factor


def power_of_two(exponents: Tensor) -> Tensor:
    """2^exponents for negative squared distances; ``exponents`` may be overwritten."""
    # a squared distance is never negative, so an exponent above 0 is a rounding error
    return exponents.clamp_max_(0).exp2_() if may_overwrite() else exponents.clamp(max=0).exp2()


@without_autocast
def gaussian_weights(q: Tensor, k: Tensor, *, key_mask: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
    """Kernel matrix S [B, H, N, N] of queries and keys [B, H, N, D].

    rows: compute only the rows of these tokens [R]: [B, H, R, N].
    """
    check_alike(q, k=k, key_mask=key_mask)
    queries, keys = take_rows(prepare(q, key_mask), rows), prepare(k, key_mask)
    weights = gaussian_kernel(queries, keys, scale=q.shape[-1] ** -0.5, mask=key_mask)
    return narrow(hide_rows(hide_pairs(weights, None, key_mask), key_mask, rows), q.dtype)


@without_autocast
def gaussian_attention(q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    """S v for q, k, v [B, H, N, D]; half-precision inputs accumulate in float32."""
    check_alike(q, k=k, v=v, key_mask=key_mask)
    weights = gaussian_kernel(prepare(q, key_mask), prepare(k, key_mask), scale=q.shape[-1] ** -0.5, mask=key_mask)
    return finish(weights @ prepare(v, key_mask), v.dtype, key_mask)


def hide_pairs(weights: Tensor, row_mask: Tensor | None, column_mask: Tensor | None) -> Tensor:
    """Zero the rows and columns of masked tokens in [B, H, N, M]."""
    weights = hide(weights, row_mask)
    return weights if column_mask is None else weights.masked_fill(~column_mask[:, None, None, :], 0)
