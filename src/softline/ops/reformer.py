"""Reformer attention by locality-sensitive hashing: The Efficient Transformer (https://arxiv.org/abs/2001.04451).

Keys are the queries, normalised to unit norm. In each of R rounds tokens are sorted by the bucket that a random
rotation assigns to them, the sorted sequence is cut into chunks, and a token attends to its own chunk and the previous
one. With c_ij the number of rounds in which i attends to j, weights_ij = c_ij exp(s_ij) / sum_j c_ij exp(s_ij). A token
attends to itself only if it has no other token to attend to.

Deviation: the first chunk of a round has no previous one (other implementations use the last chunk of all, or of the
previous round), so that padding at the end has no effect.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from softline.checks import check_integer
from softline.errors import UserError
from softline.ops.chunks import check_one_size
from softline.ops.inputs import (
    check_alike,
    finish,
    hide_rows,
    hide_scores,
    narrow,
    prepare,
    seeded,
    take_rows,
    unit_length,
    without_autocast,
)

SELF_SCORE = -5e4


def reformer_rotations(head_dim: int, *, num_buckets: int = 32, rounds: int = 4, seed: int | None = None) -> Tensor:
    """Random rotations [R, D, num_buckets / 2]; ``seed=None`` draws from torch's global generator."""
    check_integer("rounds", rounds, 1)
    check_integer("num_buckets", num_buckets, 2)
    if num_buckets % 2:
        raise UserError(f"num_buckets must be even, got {num_buckets}")
    return torch.randn(rounds, head_dim, num_buckets // 2, generator=seeded(seed), device="cpu")


@without_autocast
def reformer_weights(
    q: Tensor,
    *,
    rotations: Tensor,
    bucket_size: int = 64,
    key_mask: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """The definition: weights [B, H, N, N] of queries [B, H, N, D].

    rows: compute only the rows of these tokens [R]: [B, H, R, N].
    """
    _check(q, rotations, bucket_size, key_mask)
    x = prepare(q, key_mask)
    chunk = _sorted_ranks(x, rotations, key_mask) // bucket_size  # [B, H, R, N]
    places = torch.arange(q.shape[2], device=q.device)
    queries = places if rows is None else rows
    steps_back = chunk[..., queries, None] - chunk[..., None, :]
    times_seen = ((steps_back == 0) | (steps_back == 1)).sum(2)  # c_ij [B, H, N, N]
    scores = x.shape[-1] ** -0.5 * take_rows(x, rows) @ unit_length(x, (-1,)).mT
    itself = queries[:, None] == places
    scores = scores.masked_fill(itself, SELF_SCORE).masked_fill(times_seen == 0, torch.finfo(x.dtype).min)
    scores = scores + times_seen.clamp(min=1).to(x.dtype).log()
    return narrow(hide_rows(hide_scores(scores, key_mask).softmax(-1), key_mask, rows), q.dtype)


@without_autocast
def reformer_attention(
    q: Tensor, v: Tensor, *, rotations: Tensor, bucket_size: int = 64, key_mask: Tensor | None = None
) -> Tensor:
    """LSH attention of queries, which are also the keys, and values [B, H, N, D]; linear in N except for the sort.

    rotations: [R, D, num_buckets / 2] from `reformer_rotations`.
    bucket_size: tokens in a chunk of the sorted sequence; any N is padded to a multiple of it.

    Half-precision inputs are computed in float32.
    """
    _check(q, rotations, bucket_size, key_mask)
    check_alike(q, v=v)
    tokens = q.shape[2]
    # the chunks of the sorted tokens take torch.export hours
    check_one_size("reformer", tokens)
    padding = -tokens % bucket_size
    mask = q.new_ones(q.shape[0], tokens, dtype=torch.bool) if key_mask is None else key_mask
    mask = F.pad(mask, (0, padding), value=False)
    x = F.pad(prepare(q, key_mask), (0, 0, 0, padding))
    values = F.pad(prepare(v, key_mask), (0, 0, 0, padding))
    ranks = _sorted_ranks(x, rotations, mask)  # [B, H, R, N]
    order = ranks.argsort(-1)
    out, evidence = _attend_in_chunks(x, values, order, mask, bucket_size)
    # back in token order, the rounds are weighted by their softmax normalisers
    out, evidence = _take(out, ranks), evidence.gather(-1, ranks)
    out = (evidence.softmax(2).unsqueeze(-1) * out).sum(2)
    return finish(out[:, :, :tokens], v.dtype, key_mask)


def _sorted_ranks(x: Tensor, rotations: Tensor, mask: Tensor | None) -> Tensor:
    """Rank of each token of x [B, H, N, D] sorted by bucket, then by position, masked ones last: [B, H, R, N]."""
    rotated = x.detach()[:, :, None] @ rotations.to(x.dtype)  # [B, H, R, N, num_buckets / 2]
    bucket = torch.cat([rotated, -rotated], dim=-1).argmax(-1)
    if mask is not None:
        bucket = bucket.masked_fill(~mask[:, None, None, :], 2 * rotations.shape[-1])
    tokens = x.shape[2]
    place = torch.arange(tokens, device=x.device)
    return (bucket * tokens + place).argsort(-1).argsort(-1)


def _attend_in_chunks(x: Tensor, v: Tensor, order: Tensor, mask: Tensor, bucket_size: int) -> tuple[Tensor, Tensor]:
    """Attend from each sorted chunk to itself and the previous one: values [B, H, R, N, D], logsumexp [B, H, R, N]."""
    query, value = _chunks(_take(x, order), bucket_size), _chunks(_take(v, order), bucket_size)
    place = order.unflatten(-1, (-1, bucket_size))  # [B, H, R, chunks, bucket_size]
    real = mask[:, None, None, :].expand_as(order).gather(-1, order).unflatten(-1, (-1, bucket_size))
    keys = _with_previous(unit_length(query, (-1,)), 0)
    scores = query.shape[-1] ** -0.5 * query @ keys.mT  # [B, H, R, chunks, bucket_size, 2 bucket_size]
    key_place, key_real = _with_previous(place, -1), _with_previous(real, False)
    scores = scores.masked_fill(place.unsqueeze(-1) == key_place.unsqueeze(-2), SELF_SCORE)
    scores = scores.masked_fill(~key_real.unsqueeze(-2), torch.finfo(scores.dtype).min)
    out = scores.softmax(-1) @ _with_previous(value, 0)
    return out.flatten(3, 4), scores.logsumexp(-1).flatten(3, 4)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [B, H, N, D] or [B, H, R, N, D] in the order of index [B, H, R, N]."""
    x = x.unsqueeze(2) if x.ndim == 4 else x
    index = index.unsqueeze(-1).expand(*index.shape, x.shape[-1])
    return x.expand(*index.shape).gather(3, index)


def _chunks(x: Tensor, bucket_size: int) -> Tensor:
    return x.unflatten(3, (-1, bucket_size))


def _with_previous(x: Tensor, fill: float) -> Tensor:
    """Prepend to each chunk (dim 3) the previous one, and ``fill`` to the first."""
    before = torch.cat([torch.full_like(x[:, :, :, :1], fill), x[:, :, :, :-1]], dim=3)
    return torch.cat([before, x], dim=4)


def _check(q: Tensor, rotations: Tensor, bucket_size: int, key_mask: Tensor | None) -> None:
    check_alike(q, key_mask=key_mask)
    check_integer("bucket_size", bucket_size, 1)
    if rotations.ndim != 3 or rotations.shape[1] != q.shape[-1]:
        raise UserError(
            f"rotations must have shape [R, D, num_buckets / 2] with D = {q.shape[-1]}, got {tuple(rotations.shape)}"
        )
