"""Nystrom attention: Nystromformer (https://arxiv.org/abs/2102.03902).

With landmarks ql, kl of queries and keys, softmax(q k^T) is approximated by
    softmax(q kl^T) pinv(softmax(ql kl^T)) softmax(ql k^T),
with the paper's third-order iteration for the pseudo-inverse. Deviation: the iteration starts from the norms of each
matrix (the original takes their maximum over the whole batch).
"""

import torch
from torch import Tensor

from softline.checks import check_integer
from softline.errors import UserError
from softline.ops.gaussian import hide_pairs
from softline.ops.inputs import check_alike, check_mask, finish, hide_scores, narrow, prepare, without_autocast


@without_autocast
def nystrom_weights(
    q: Tensor,
    k: Tensor,
    *,
    q_landmarks: Tensor,
    k_landmarks: Tensor,
    iterations: int = 6,
    key_mask: Tensor | None = None,
    landmark_mask: Tensor | None = None,
) -> Tensor:
    """The definition: weights [B, H, N, N] of queries and keys [B, H, N, D]."""
    left, core, right = _factors(q, k, q_landmarks, k_landmarks, iterations, key_mask, landmark_mask)
    return narrow(left @ core @ right, q.dtype)


@without_autocast
def nystrom_factors(
    q: Tensor,
    k: Tensor,
    *,
    q_landmarks: Tensor,
    k_landmarks: Tensor,
    iterations: int = 6,
    key_mask: Tensor | None = None,
    landmark_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The weights as three factors [B, H, N, m], [B, H, m, m], [B, H, m, N], in float32 for half-precision inputs."""
    return _factors(q, k, q_landmarks, k_landmarks, iterations, key_mask, landmark_mask)


@without_autocast
def nystrom_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_landmarks: Tensor,
    k_landmarks: Tensor,
    iterations: int = 6,
    key_mask: Tensor | None = None,
    landmark_mask: Tensor | None = None,
) -> Tensor:
    """Nystrom attention of q, k, v [B, H, N, D] through landmarks [B, H, m, D] of queries and keys.

    key_mask, landmark_mask: bool [B, N] and [B, m], True = real.

    Half-precision inputs are computed in float32.
    """
    check_alike(q, k=k, v=v)
    left, core, right = _factors(q, k, q_landmarks, k_landmarks, iterations, key_mask, landmark_mask)
    return finish(left @ (core @ (right @ prepare(v, key_mask))), v.dtype, key_mask)


def third_order_pinv(A: Tensor, *, iterations: int = 6) -> Tensor:
    """Pseudo-inverse of non-negative matrices [..., m, m] by Z <- Z (13 I - AZ (15 I - AZ (7 I - AZ))) / 4."""
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    norms = A.sum(-1).amax(-1) * A.sum(-2).amax(-1)
    Z = A.mT / norms[..., None, None]
    for _ in range(iterations):
        AZ = A @ Z
        Z = 0.25 * Z @ (13 * identity - AZ @ (15 * identity - AZ @ (7 * identity - AZ)))
    return Z


def _factors(
    q: Tensor,
    k: Tensor,
    q_landmarks: Tensor,
    k_landmarks: Tensor,
    iterations: int,
    key_mask: Tensor | None,
    landmark_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    check_alike(q, k=k, q_landmarks=q_landmarks, k_landmarks=k_landmarks, key_mask=key_mask)
    if q_landmarks.shape != k_landmarks.shape:
        raise UserError(
            f"q_landmarks {tuple(q_landmarks.shape)} and k_landmarks {tuple(k_landmarks.shape)} must have equal shapes"
        )
    check_mask("landmark_mask", landmark_mask, q.shape[0], q_landmarks.shape[2], q.device)
    check_integer("iterations", iterations, 1)
    scale = q.shape[-1] ** -0.5
    q, k = scale * prepare(q, key_mask), prepare(k, key_mask)
    ql, kl = scale * prepare(q_landmarks, landmark_mask), prepare(k_landmarks, landmark_mask)
    left = hide_pairs(hide_scores(q @ kl.mT, landmark_mask).softmax(-1), key_mask, landmark_mask)
    right = hide_pairs(hide_scores(ql @ k.mT, key_mask).softmax(-1), landmark_mask, key_mask)
    core = hide_pairs(hide_scores(ql @ kl.mT, landmark_mask).softmax(-1), landmark_mask, landmark_mask)
    if landmark_mask is not None:
        # the row and column of a masked landmark are those of the identity: it inverts to itself and affects no other
        core = core + torch.diag_embed((~landmark_mask).to(core.dtype))[:, None]
    return left, third_order_pinv(core, iterations=iterations), right
