"""Classic kernelised linear attention: Transformers are RNNs (https://arxiv.org/abs/2006.16236).

weights_ij = phi(q_i) . phi(k_j) / sum_j phi(q_i) . phi(k_j), evaluated as phi(q) (phi(k)^T v).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from softline.checks import check_option
from softline.ops.inputs import (
    check_alike,
    count_tokens,
    divide,
    finish,
    hide,
    hide_scores,
    narrow,
    prepare,
    unit_range,
    without_autocast,
)


def _elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1; for negative x it is exp(x), which the sum of -1 + exp(x) and 1 would round to 0 from -17 on."""
    positive = F.relu(x)
    # x - positive is min(x, 0), with the gradient 1 at 0
    return positive + (x - positive).exp()


FEATURE_MAPS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "elu": _elu_plus_one,
        "relu": F.relu,
        "leaky_relu": F.leaky_relu,
        "identity": lambda x: x,
        "exp": torch.exp,
    }
)


@without_autocast
def linear_weights(q: Tensor, k: Tensor, *, feature_map: str = "elu", key_mask: Tensor | None = None) -> Tensor:
    """The definition: weights [B, H, N, N] of queries and keys [B, H, N, D]."""
    phi_q, phi_k = _features(q, k, feature_map, key_mask)
    return narrow(kernel_weights(phi_q, phi_k), q.dtype)


@without_autocast
def linear_factors(
    q: Tensor, k: Tensor, *, feature_map: str = "elu", key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The weights as two factors [B, H, N, D], [B, H, D, N], in float32 for half-precision inputs."""
    return kernel_factors(*_features(q, k, feature_map, key_mask))


@without_autocast
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, feature_map: str = "elu", key_mask: Tensor | None = None
) -> Tensor:
    """Linear attention of q, k, v [B, H, N, D]; half-precision inputs are computed in float32.

    feature_map: "elu" (elu + 1), "relu", "leaky_relu", "identity" or "exp". With "leaky_relu" and "identity", which
        can be negative, the denominator may vanish; a denominator of exactly 0 yields 0.
    """
    check_alike(q, k=k, v=v)
    phi_q, phi_k = _features(q, k, feature_map, key_mask)
    return finish(kernel_attention(phi_q, phi_k, prepare(v, key_mask), key_mask), v.dtype, key_mask)


def rescale_features(phi_q: Tensor, phi_k: Tensor) -> tuple[Tensor, Tensor]:
    """Features [B, H, N, R] divided by the largest of each query and by the largest of all keys of a head.

    The weights stay the same, because rows are divided by their sums, and their sums of products stay in range.
    """
    return unit_range(phi_q, (-1,))[0], unit_range(phi_k, (-2, -1))[0]


def kernel_weights(phi_q: Tensor, phi_k: Tensor) -> Tensor:
    """phi(q) phi(k)^T with rows divided by their sums: features [B, H, N, R], masked tokens zero -> [B, H, N, N]."""
    scores = phi_q @ phi_k.mT
    return divide(scores, scores.sum(-1, keepdim=True))


def kernel_factors(phi_q: Tensor, phi_k: Tensor) -> tuple[Tensor, Tensor]:
    return divide(phi_q, phi_q @ phi_k.sum(-2).unsqueeze(-1)), phi_k.mT


def kernel_attention(phi_q: Tensor, phi_k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Apply the weights of `kernel_weights` to v [B, H, N, Dv] in linear time; masked tokens of all three are zero."""
    # rows sum to 1, so the values may be shifted; centred on their mean the least is lost to cancellation
    mean = (v.sum(-2, keepdim=True) / count_tokens(v.shape[-2], key_mask, v.dtype)).detach()
    state = phi_k.mT @ (v - mean)  # [B, H, R, Dv]
    total = phi_q @ phi_k.sum(-2).unsqueeze(-1)  # [B, H, N, 1]
    return divide(phi_q @ state, total) + mean.masked_fill(total == 0, 0)


def _features(q: Tensor, k: Tensor, feature_map: str, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    check_alike(q, k=k, key_mask=key_mask)
    check_option("feature_map", feature_map, FEATURE_MAPS)
    q, k = prepare(q, key_mask), prepare(k, key_mask)
    if feature_map == "exp":
        # avoids overflow: each channel's largest key moves to the queries, where a factor per query cancels
        largest = hide_scores(k.detach().mT, key_mask).amax(-1).unsqueeze(-2)  # [B, H, 1, D]
        q, k = q + largest, k - largest
        q = q - q.detach().amax(-1, keepdim=True)
    phi = FEATURE_MAPS[feature_map]
    return rescale_features(hide(phi(q), key_mask), hide(phi(k), key_mask))
