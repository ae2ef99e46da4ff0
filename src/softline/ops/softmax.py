"""Softmax attention, the quadratic baseline: softmax(scale q k^T) v."""

import torch.nn.functional as F
from torch import Tensor

from softline.ops.inputs import check_alike, hide, hide_rows, hide_scores, narrow, prepare, take_rows, without_autocast


@without_autocast
def softmax_weights(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    key_mask: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Attention weights [B, H, N, N] of queries and keys [B, H, N, D].

    scale: factor of the scores; defaults to D^-0.5.
    dropout: dropout probability of the weights.
    rows: compute only the rows of these tokens [R]: [B, H, R, N].
    """
    check_alike(q, k=k, key_mask=key_mask)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * take_rows(prepare(q, key_mask), rows) @ prepare(k, key_mask).mT
    weights = F.dropout(hide_scores(scores, key_mask).softmax(-1), dropout)
    return narrow(hide_rows(weights, key_mask, rows), q.dtype)


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Torch's scaled dot-product attention on q, k, v [B, H, N, D]; scale and dropout as in `softmax_weights`.

    Unlike the other operators it keeps the inputs' precision and follows autocast: torch's kernels accumulate in
    float32.
    """
    check_alike(q, k=k, v=v, key_mask=key_mask)
    out = attend(
        hide(q, key_mask), hide(k, key_mask), hide(v, key_mask), scale=scale, dropout=dropout, key_mask=key_mask
    )
    return hide(out, key_mask)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    key_mask: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v of queries [B, H, N, D] and keys and values [B, H, M, D], which are 0 where masked."""
    if key_mask is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale)
    # a sample without any real key attends to its zeroed padding, so that no row is empty
    visible = key_mask | ~key_mask.any(-1, keepdim=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None, None, :], dropout_p=dropout, scale=scale)
