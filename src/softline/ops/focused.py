"""Focused linear attention: FLatten Transformer (https://arxiv.org/abs/2308.00442).

Linear attention with phi(x) = |y| / |y^p| y^p, y = relu(x) + 1e-6: the norm stays, the power p sharpens the direction.
As in the authors' code, norms are taken over all channels of a token.
"""

import torch.nn.functional as F
from torch import Tensor

from softline.checks import check_number
from softline.ops.inputs import check_alike, finish, hide, narrow, prepare, unit_range, without_autocast
from softline.ops.linear import kernel_attention, kernel_factors, kernel_weights, rescale_features


@without_autocast
def focused_weights(q: Tensor, k: Tensor, *, power: float = 3.0, key_mask: Tensor | None = None) -> Tensor:
    """The definition: weights [B, H, N, N] of queries and keys [B, H, N, D]."""
    phi_q, phi_k = _features(q, k, power, key_mask)
    return narrow(kernel_weights(phi_q, phi_k), q.dtype)


@without_autocast
def focused_factors(
    q: Tensor, k: Tensor, *, power: float = 3.0, key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The weights as two factors [B, H, N, D], [B, H, D, N], in float32 for half-precision inputs."""
    return kernel_factors(*_features(q, k, power, key_mask))


@without_autocast
def focused_attention(q: Tensor, k: Tensor, v: Tensor, *, power: float = 3.0, key_mask: Tensor | None = None) -> Tensor:
    """Focused linear attention of q, k, v [B, H, N, D]; half-precision inputs are computed in float32."""
    check_alike(q, k=k, v=v)
    phi_q, phi_k = _features(q, k, power, key_mask)
    return finish(kernel_attention(phi_q, phi_k, prepare(v, key_mask), key_mask), v.dtype, key_mask)


def _features(q: Tensor, k: Tensor, power: float, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    check_alike(q, k=k, key_mask=key_mask)
    check_number("power", power, 1)
    phi_q, phi_k = (hide(_focus(prepare(x, key_mask), power), key_mask) for x in (q, k))
    return rescale_features(phi_q, phi_k)


def _focus(x: Tensor, power: float) -> Tensor:
    # |y| = largest |y / largest|, and the factor cancels in y^p / |y^p|
    y, largest = unit_range(F.relu(x) + 1e-6, (1, 3))
    sharp = y**power
    return sharp * (largest * _length(y) / _length(sharp))


def _length(x: Tensor) -> Tensor:
    return x.square().sum((1, 3), keepdim=True).sqrt()
