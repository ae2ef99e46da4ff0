"""InLine attention: Bridging the Divide, Reconsidering Softmax and Linear Attention (https://arxiv.org/abs/2412.06590).

weights = scores - mean(scores) + 1/N: rows sum to 1 by subtraction where linear attention divides, so that queries of
one direction and different length keep different weights. Linear in N because
    sum_j weights_ij v_j = mean(v) + scale * q_i^T sum_j k_j (v_j - mean(v))^T.
"""

from typing import get_args

import torch
from torch import Tensor

from softline.ops.gaussian import hide_pairs
from softline.ops.inputs import (
    Impl,
    check_alike,
    check_mask,
    check_option,
    count_tokens,
    finish,
    hide,
    narrow,
    prepare,
    without_autocast,
)


@without_autocast
def inline_weights(q: Tensor, k: Tensor, *, scale: float | None = None, key_mask: Tensor | None = None) -> Tensor:
    """The definition: weights [B, H, N, N] of queries and keys [B, H, N, D]. They sum to 1 and may be negative."""
    check_alike(q, k=k)
    check_mask("key_mask", key_mask, q.shape[0], q.shape[2], q.device)
    return narrow(_weights(q, k, scale, key_mask), q.dtype)


@without_autocast
def inline_factors(
    q: Tensor, k: Tensor, *, scale: float | None = None, key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The weights as two factors [B, H, N, D + 1], [B, H, D + 1, N], in float32 for half-precision inputs."""
    check_alike(q, k=k)
    check_mask("key_mask", key_mask, q.shape[0], q.shape[2], q.device)
    n = count_tokens(q.shape[2], key_mask, prepare(q, None).dtype)
    q, k = _scale(q, scale, n) * prepare(q, key_mask), prepare(k, key_mask)
    centred = hide(k - k.sum(-2, keepdim=True) / n, key_mask)
    ones = hide(k.new_ones(()).expand(*k.shape[:-1], 1), key_mask)
    left = torch.cat([q, ones / n], dim=-1)
    right = torch.cat([centred, ones], dim=-1)
    return left, right.mT


@without_autocast
def inline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """InLine attention, linear in the number of tokens.

    q, k: queries and keys, feature map already applied [B, H, N, D].
    v: values [B, H, N, Dv].
    scale: factor of the similarities; D^-0.5 / N unless given, N counting real tokens only.
    key_mask: bool [B, N], True = real token.
    impl: "linear" sums keys and values first; "explicit" goes through the N x N weights; "auto" picks "linear".

    Half-precision inputs are computed in float32.
    """
    check_alike(q, k=k, v=v)
    check_mask("key_mask", key_mask, q.shape[0], q.shape[2], q.device)
    check_option("impl", impl, get_args(Impl))
    values = prepare(v, key_mask)
    if impl == "explicit":
        return finish(_weights(q, k, scale, key_mask) @ values, v.dtype, key_mask)
    n = count_tokens(q.shape[2], key_mask, values.dtype)
    mean = values.sum(-2, keepdim=True) / n  # [B, H, 1, Dv]
    # centred before the product: the state holds covariances, not large sums that cancel later
    state = prepare(k, key_mask).mT @ hide(values - mean, key_mask)  # [B, H, D, Dv]
    out = prepare(q, key_mask) @ (_scale(q, scale, n) * state) + mean
    return finish(out, v.dtype, key_mask)


def _weights(q: Tensor, k: Tensor, scale: float | None, key_mask: Tensor | None) -> Tensor:
    q, k = prepare(q, key_mask), prepare(k, key_mask)
    n = count_tokens(q.shape[2], key_mask, q.dtype)
    scores = _scale(q, scale, n) * q @ k.mT  # a masked key scores 0 and leaves the sum alone
    weights = scores - scores.sum(-1, keepdim=True) / n + 1 / n
    return hide_pairs(weights, key_mask, key_mask)


def _scale(q: Tensor, scale: float | None, n: int | Tensor) -> float | Tensor:
    return q.shape[-1] ** -0.5 / n if scale is None else scale
