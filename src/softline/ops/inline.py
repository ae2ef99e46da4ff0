"""InLine attention: Bridging the Divide, Reconsidering Softmax and Linear Attention (https://arxiv.org/abs/2412.06590).

weights = scores - mean(scores) + 1/N: rows sum to 1 by subtraction instead of linear attention's division, so that
queries with the same direction and different norms have different weights. Linear in N because
    sum_j weights_ij v_j = mean(v) + scale * q_i^T sum_j k_j (v_j - mean(v))^T.
"""

from typing import Any, get_args

import torch
from torch import Tensor

from softline.checks import check_number, check_option
from softline.ops.chunks import add_to
from softline.ops.gaussian import hide_pairs
from softline.ops.inputs import (
    Impl,
    check_alike,
    count_tokens,
    finish,
    hide,
    narrow,
    prepare,
    sum_tokens,
    widen,
    without_autocast,
)


@without_autocast
def inline_weights(q: Tensor, k: Tensor, *, scale: float | None = None, key_mask: Tensor | None = None) -> Tensor:
    """The definition: weights [B, H, N, N] of queries and keys [B, H, N, D]; rows sum to 1, weights may be negative."""
    check_alike(q, k=k, key_mask=key_mask)
    return narrow(_weights(q, k, scale, key_mask), q.dtype)


@without_autocast
def inline_factors(
    q: Tensor, k: Tensor, *, scale: float | None = None, key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The weights as two factors [B, H, N, D + 1], [B, H, D + 1, N], in float32 for half-precision inputs."""
    check_alike(q, k=k, key_mask=key_mask)
    n = count_tokens(q.shape[2], key_mask, prepare(q, None).dtype)
    q, k = _scale(q, scale, n) * prepare(q, key_mask), prepare(k, key_mask)
    centred = hide(k - sum_tokens(k) / n, key_mask)
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

    q, k: queries and keys after the feature map [B, H, N, D].
    v: values [B, H, N, Dv].
    scale: factor of the similarities; defaults to D^-0.5 / N, where N counts real tokens only.
    key_mask: bool [B, N], True = real token.
    impl: "linear" multiplies keys and values first; "explicit" computes the N x N weights; "auto" is "linear".

    Half-precision inputs are computed in float32.
    """
    check_alike(q, k=k, v=v, key_mask=key_mask)
    check_option("impl", impl, get_args(Impl))
    if scale is not None:
        check_number("scale", scale, 0)
    if impl == "explicit":
        return finish(_weights(q, k, scale, key_mask) @ prepare(v, key_mask), v.dtype, key_mask)
    out: Tensor = _InlineLinear.apply(q, k, v, scale, key_mask)
    return out


class InlineSums:
    """`inline_attention` for tokens that come in parts, without gradients: all are added before any are read.

    tokens: the number of all tokens.
    centre: about the mean of all values [B, H, 1, Dv]. It may be any point, but only near the mean nothing cancels.
    """

    def __init__(self, tokens: int, centre: Tensor, *, scale: float | None = None) -> None:
        self.tokens, self.centre, self.scale = tokens, widen(centre), scale
        self.state: Tensor | None = None

    def add(self, k: Tensor, v: Tensor) -> None:
        """Add keys [B, H, n, D] and their values [B, H, n, Dv]."""
        keys, values = widen(k), widen(v) - self.centre
        # of the products, of the keys and of the values
        sums = keys.mT @ values, sum_tokens(keys), sum_tokens(values)
        if self.state is None:
            self.state, self.keys, self.values = sums
        else:
            self.state, self.keys, self.values = self.state + sums[0], self.keys + sums[1], self.values + sums[2]

    def read(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        """Attended values [B, H, n, Dv] of these queries, in the dtype of the values."""
        assert self.state is not None, "everything has been added"
        state = self.state - (self.keys / self.tokens).mT @ self.values
        mean = self.centre + self.values / self.tokens
        return narrow((widen(q) @ (_scale(q, self.scale, self.tokens) * state)).add_(mean), dtype)


class _InlineLinear(torch.autograd.Function):
    """mean(v) + scale q C with C = (k - mean(k))^T (v - mean(v)); saves only q, k and v for the backward pass.

    For an incoming gradient g: dC = scale q^T g, dq = scale g C^T, dk = (v - mean(v)) dC^T,
    dv = (k - mean(k)) dC + mean(g).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None, key_mask: Tensor | None) -> Tensor:
        n = count_tokens(q.shape[2], key_mask, widen(q).dtype)
        values, mean = _centre(v, n, key_mask)
        keys = prepare(k, key_mask)
        # centred before the product, so that the state holds covariances and not large sums that cancel later
        state = keys.mT @ values  # [B, H, D, Dv]
        # centred values sum to 0 but for rounding, which would count as often as there are keys
        state = state - (sum_tokens(keys) / n).mT @ sum_tokens(values)
        return finish(add_to(prepare(q, key_mask) @ (_scale(q, scale, n) * state), mean), v.dtype, key_mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        q, k, v, ctx.scale, key_mask = inputs
        ctx.save_for_backward(q, k, v, key_mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, key_mask = ctx.saved_tensors
        n = count_tokens(q.shape[2], key_mask, widen(q).dtype)
        scale = _scale(q, ctx.scale, n)
        grad = prepare(grad, key_mask)
        d_state = scale * (prepare(q, key_mask).mT @ grad)  # [B, H, D, Dv]
        values, _ = _centre(v, n, key_mask)
        keys, _ = _centre(k, n, key_mask)
        state = keys.mT @ values
        d_q = grad @ (scale * state).mT
        d_k = values @ d_state.mT
        d_v = add_to(keys @ d_state, sum_tokens(grad) / n)
        # no saturation: an overflowing gradient must stay visible
        return (*(hide(d, key_mask).to(x.dtype) for d, x in ((d_q, q), (d_k, k), (d_v, v))), None, None)


def _centre(x: Tensor, n: int | Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [B, H, N, D] minus its mean over the n real tokens, and that mean [B, H, 1, D]; masked tokens stay 0."""
    x = prepare(x, key_mask)
    mean = sum_tokens(x) / n
    return hide(x - mean, key_mask), mean


def _weights(q: Tensor, k: Tensor, scale: float | None, key_mask: Tensor | None) -> Tensor:
    q, k = prepare(q, key_mask), prepare(k, key_mask)
    n = count_tokens(q.shape[2], key_mask, q.dtype)
    scores = _scale(q, scale, n) * q @ k.mT  # a masked key has score 0 and does not change the sum
    weights = scores - scores.sum(-1, keepdim=True) / n + 1 / n
    return hide_pairs(weights, key_mask, key_mask)


def _scale(q: Tensor, scale: float | None, n: int | Tensor) -> float | Tensor:
    return q.shape[-1] ** -0.5 / n if scale is None else scale
