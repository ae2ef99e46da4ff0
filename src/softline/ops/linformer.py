"""Linformer attention: Self-Attention with Linear Complexity (https://arxiv.org/abs/2006.04768).

Keys and values are projected along the tokens, k' = E k and v' = F v with learned E, F [R, N], then
softmax(q k'^T / sqrt(D)) v'. The explicit weights are softmax(q k'^T / sqrt(D)) F.
"""

from torch import Tensor

from softline.errors import UserError
from softline.ops.chunks import check_one_size
from softline.ops.inputs import check_alike, finish, narrow, prepare, without_autocast
from softline.ops.softmax import attend


@without_autocast
def linformer_weights(
    q: Tensor,
    k: Tensor,
    *,
    key_projection: Tensor,
    value_projection: Tensor,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """The definition: weights [B, H, N, N] of queries and keys [B, H, N, D]; rows need not sum to 1."""
    left, right = _factors(q, k, key_projection, value_projection, scale, key_mask)
    return narrow(left @ right, q.dtype)


@without_autocast
def linformer_factors(
    q: Tensor,
    k: Tensor,
    *,
    key_projection: Tensor,
    value_projection: Tensor,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The weights as two factors [B, H, N, R], [B, H, R, N], in float32 for half-precision inputs."""
    left, right = _factors(q, k, key_projection, value_projection, scale, key_mask)
    return left, right.expand(*left.shape[:2], -1, -1)


@without_autocast
def linformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_projection: Tensor,
    value_projection: Tensor,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Linformer attention of q, k, v [B, H, N, D].

    key_projection, value_projection: E and F [R, N_max]; N tokens use the first N columns, and N must not exceed N_max.

    Half-precision inputs are computed in float32.
    """
    check_alike(q, k=k, v=v)
    # torch.export cannot promise that the tokens are no more than the columns
    check_one_size("linformer", q.shape[2])
    keys, right = _projected(q, k, key_projection, value_projection, key_mask)
    out = attend(prepare(q, key_mask), keys, right @ prepare(v, key_mask), scale=scale)
    return finish(out, v.dtype, key_mask)


def _factors(
    q: Tensor, k: Tensor, key_projection: Tensor, value_projection: Tensor, scale: float | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """softmax(q k'^T) [B, H, N, R] and F [R, N] ([B, 1, R, N] with a mask)."""
    keys, right = _projected(q, k, key_projection, value_projection, key_mask)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    left = (scale * prepare(q, key_mask) @ keys.mT).softmax(-1)
    return (left if key_mask is None else left * key_mask[:, None, :, None]), right


def _projected(
    q: Tensor, k: Tensor, key_projection: Tensor, value_projection: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The projected keys k' [B, H, R, D] and F [R, N] ([B, 1, R, N] with a mask)."""
    check_alike(q, k=k, key_mask=key_mask)
    tokens = q.shape[2]
    for name, projection in (("key_projection", key_projection), ("value_projection", value_projection)):
        if projection.ndim != 2 or projection.shape != key_projection.shape:
            raise UserError(f"{name} must have shape [R, N_max], the same for both, got {tuple(projection.shape)}")
        if tokens > projection.shape[1]:
            raise UserError(
                f"the learned Linformer projection covers at most {projection.shape[1]} tokens, got {tokens}"
            )
    k = prepare(k, key_mask)
    right = _columns(value_projection, tokens, key_mask).to(k.dtype)
    return _columns(key_projection, tokens, key_mask).to(k.dtype) @ k, right


def _columns(projection: Tensor, tokens: int, key_mask: Tensor | None) -> Tensor:
    """The columns for N tokens [R, N]; with a mask [B, 1, R, N], where the real tokens use the first columns."""
    if key_mask is None:
        return projection[:, :tokens]
    place = (key_mask.cumsum(-1) - 1).clamp(min=0)  # [B, N]
    return (projection[:, place] * key_mask).transpose(0, 1).unsqueeze(1)
