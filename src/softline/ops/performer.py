"""Performer attention, FAVOR+: Rethinking Attention with Performers (https://arxiv.org/abs/2009.14794).

exp(q.k / sqrt(D)) is estimated by positive random features phi(x) = exp(w.x - |x|^2 / 2) / sqrt(R) of x / D^(1/4),
with orthogonal w; then linear attention.

Features are divided by the largest one (per query; over all keys) and 1e-4 is added to each, so that no denominator
vanishes. Deviation: the authors' code uses the largest w.x instead of the largest feature, which gives the added
constant up to exp(|x|^2 / 2) times the weight and makes the estimate of the kernel less accurate.
"""

from typing import Any

import torch
from torch import Tensor

from softline.checks import check_integer
from softline.errors import UserError
from softline.ops.inputs import check_alike, finish, hide, hide_scores, narrow, prepare, seeded, without_autocast
from softline.ops.linear import kernel_attention, kernel_factors, kernel_weights

STABILIZER = 1e-4


def performer_features(num_features: int, head_dim: int, *, seed: int | None = None) -> Tensor:
    """Random directions w [R, D]: orthogonal in blocks of D, with the norms of Gaussian vectors.

    seed: seed of the directions; None draws from torch's global generator.
    """
    check_integer("num_features", num_features, 1)
    check_integer("head_dim", head_dim, 1)
    draw: dict[str, Any] = {"generator": seeded(seed), "dtype": torch.float64, "device": "cpu"}
    blocks = -(-num_features // head_dim)
    Q, R = torch.linalg.qr(torch.randn(blocks, head_dim, head_dim, **draw))
    # LAPACK fixes the signs of R; undoing that makes Q uniform over the rotations and the estimate unbiased
    Q = Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    directions = Q.mT.reshape(-1, head_dim)[:num_features]
    lengths = torch.randn(num_features, head_dim, **draw).norm(dim=-1, keepdim=True)
    return (lengths * directions).float()


@without_autocast
def performer_weights(q: Tensor, k: Tensor, *, features: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """The definition: weights [B, H, N, N] of queries and keys [B, H, N, D] under features [R, D]."""
    phi_q, phi_k = _features(q, k, features, key_mask)
    return narrow(kernel_weights(phi_q, phi_k), q.dtype)


@without_autocast
def performer_factors(
    q: Tensor, k: Tensor, *, features: Tensor, key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The weights as two factors [B, H, N, R], [B, H, R, N], in float32 for half-precision inputs."""
    return kernel_factors(*_features(q, k, features, key_mask))


@without_autocast
def performer_attention(q: Tensor, k: Tensor, v: Tensor, *, features: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """FAVOR+ attention of q, k, v [B, H, N, D] under random features [R, D] from `performer_features`.

    Half-precision inputs are computed in float32.
    """
    check_alike(q, k=k, v=v)
    phi_q, phi_k = _features(q, k, features, key_mask)
    return finish(kernel_attention(phi_q, phi_k, prepare(v, key_mask), key_mask), v.dtype, key_mask)


def _features(q: Tensor, k: Tensor, features: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    check_alike(q, k=k, key_mask=key_mask)
    if features.ndim != 2 or features.shape[-1] != q.shape[-1]:
        raise UserError(f"features must have shape [R, D] with D = {q.shape[-1]}, got {tuple(features.shape)}")
    log_q = _log_features(prepare(q, key_mask), features)
    log_k = _log_features(prepare(k, key_mask), features)
    log_q = log_q - log_q.detach().amax(-1, keepdim=True)
    log_k = log_k - hide_scores(log_k.detach().mT, key_mask).amax((-1, -2), keepdim=True)
    root = features.shape[0] ** -0.5
    return hide(root * (log_q.exp() + STABILIZER), key_mask), hide(root * (log_k.exp() + STABILIZER), key_mask)


def _log_features(x: Tensor, features: Tensor) -> Tensor:
    x = x * x.shape[-1] ** -0.25
    return x @ features.to(x.dtype).mT - 0.5 * x.square().sum(-1, keepdim=True)  # [B, H, N, R]
