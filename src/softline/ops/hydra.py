"""Hydra attention: Efficient Attention with Many Heads (https://arxiv.org/abs/2209.07484).

There are as many heads as channels: with q and k normalised over all channels of a token, channel c has the weights
q_ic k_jc, and the output is q * sum_j (k_j * v_j). The head axis of the inputs has no meaning here.
"""

from torch import Tensor

from softline.errors import UserError
from softline.ops.inputs import check_alike, finish, narrow, prepare, unit_length, without_autocast


@without_autocast
def hydra_weights(q: Tensor, k: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    """The definition: weights [B, H * D, N, N] of queries and keys [B, H, N, D], one map per channel."""
    left, right = _factors(q, k, key_mask)
    return narrow(left @ right, q.dtype)


@without_autocast
def hydra_factors(q: Tensor, k: Tensor, *, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The weights as two factors [B, H * D, N, 1], [B, H * D, 1, N], in float32 for half-precision inputs."""
    return _factors(q, k, key_mask)


@without_autocast
def hydra_attention(q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    """Hydra attention of q, k, v [B, H, N, D]; half-precision inputs are computed in float32."""
    check_alike(q, k=k, v=v, key_mask=key_mask)
    if v.shape != q.shape:
        raise UserError(f"v must have the shape of q {tuple(q.shape)} (channels are heads), got {tuple(v.shape)}")
    state = (unit_length(prepare(k, key_mask), (1, 3)) * prepare(v, key_mask)).sum(-2, keepdim=True)  # [B, H, 1, D]
    return finish(unit_length(prepare(q, key_mask), (1, 3)) * state, v.dtype, key_mask)


def _factors(q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    check_alike(q, k=k, key_mask=key_mask)
    q, k = unit_length(prepare(q, key_mask), (1, 3)), unit_length(prepare(k, key_mask), (1, 3))
    left = q.transpose(2, 3).flatten(1, 2).unsqueeze(-1)
    right = k.transpose(2, 3).flatten(1, 2).unsqueeze(-2)
    return left, right
