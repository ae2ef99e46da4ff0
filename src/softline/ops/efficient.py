"""Efficient attention: Attention with Linear Complexities (https://arxiv.org/abs/1812.01243).

Queries are normalised by a softmax over the channels, keys by one over the tokens: softmax_D(q) softmax_N(k)^T v.
"""

from torch import Tensor

from softline.ops.inputs import check_alike, finish, hide, hide_scores, narrow, prepare, without_autocast


@without_autocast
def efficient_weights(q: Tensor, k: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    """The definition: weights [B, H, N, N] of queries and keys [B, H, N, D]; rows sum to 1."""
    left, right = _factors(q, k, key_mask)
    return narrow(left @ right, q.dtype)


@without_autocast
def efficient_factors(q: Tensor, k: Tensor, *, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The weights as two factors [B, H, N, D], [B, H, D, N], in float32 for half-precision inputs."""
    return _factors(q, k, key_mask)


@without_autocast
def efficient_attention(q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    """Efficient attention of q, k, v [B, H, N, D]; half-precision inputs are computed in float32."""
    check_alike(q, k=k, v=v)
    left, right = _factors(q, k, key_mask)
    return finish(left @ (right @ prepare(v, key_mask)), v.dtype, key_mask)


def _factors(q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    check_alike(q, k=k, key_mask=key_mask)
    left = hide(prepare(q, key_mask).softmax(-1), key_mask)
    right = hide_scores(prepare(k, key_mask).mT, key_mask).softmax(-1)  # [B, H, D, N]
    return left, hide(right.mT, key_mask).mT
