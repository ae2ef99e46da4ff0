"""Linear angular attention: Castling-ViT, Compressing Self-Attention (https://arxiv.org/abs/2211.10526).

The angular kernel of a query and a key that enclose the angle t is 1 - t / pi. Its expansion in cos(t) begins with
1/2 + cos(t) / pi, and the paper keeps these two terms, which are linear in N: with q and k of unit length,
    weights_ij = (1/2 + q_i . k_j / pi) / sum_j (1/2 + q_i . k_j / pi),
that is linear attention with phi(x) = (x / sqrt(pi), 1 / sqrt(2)). Every weight is positive, because 1/2 > 1/pi. The
paper approximates the terms that are left out with a depthwise convolution, which is part of the attention module.

Deviation: the rows are divided by their sums, as those of other kernels. The paper's linear form does not state the
division and has v_i / 2 in the place of the sum of all v_j / 2; the authors' code then divides each output by its
length, which is not a weighted mean of the values.
"""

import math

import torch
from torch import Tensor

from softline.ops.inputs import check_alike, finish, hide, narrow, prepare, unit_length, without_autocast
from softline.ops.linear import kernel_attention, kernel_factors, kernel_weights


@without_autocast
def angular_weights(q: Tensor, k: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    """The definition: weights [B, H, N, N] of queries and keys [B, H, N, D]; rows sum to 1."""
    phi_q, phi_k = _features(q, k, key_mask)
    return narrow(kernel_weights(phi_q, phi_k), q.dtype)


@without_autocast
def angular_factors(q: Tensor, k: Tensor, *, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The weights as two factors [B, H, N, D + 1], [B, H, D + 1, N], in float32 for half-precision inputs."""
    return kernel_factors(*_features(q, k, key_mask))


@without_autocast
def angular_attention(q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    """Linear angular attention of q, k, v [B, H, N, D]; half-precision inputs are computed in float32.

    A query or key of length 0 encloses a right angle with every other.
    """
    check_alike(q, k=k, v=v)
    phi_q, phi_k = _features(q, k, key_mask)
    return finish(kernel_attention(phi_q, phi_k, prepare(v, key_mask), key_mask), v.dtype, key_mask)


def _features(q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    check_alike(q, k=k, key_mask=key_mask)
    return hide(_phi(prepare(q, key_mask)), key_mask), hide(_phi(prepare(k, key_mask)), key_mask)


def _phi(x: Tensor) -> Tensor:
    constant = x.new_full((), 0.5**0.5).expand(*x.shape[:-1], 1)
    return torch.cat([unit_length(x, (-1,)) * math.pi**-0.5, constant], dim=-1)  # [B, H, N, D + 1]
