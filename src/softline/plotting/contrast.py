"""Scales of a row of attention weights, which heat maps show as colour."""

import torch
from torch import Tensor


def contrast(row: Tensor) -> Tensor:
    """Each weight's difference from the row's mean, divided by the largest difference: from -1 to 1, [H, W].

    The colour changes at the mean rather than at zero, because rows that sum to one differ little from 1 / N, and
    SOFT's weights may be negative. An even row is all zero.
    """
    difference = row - row.mean()
    return _divided(difference, difference.abs().max(), row)


def unit_scale(row: Tensor) -> Tensor:
    """Weights from 0, the lowest of the row, to 1, the highest: [H, W]. An even row is all zero."""
    return _divided(row - row.min(), row.max() - row.min(), row)


def _divided(values: Tensor, largest: Tensor, row: Tensor) -> Tensor:
    # what remains of an even row is rounding error
    even = largest <= 1e-6 * row.abs().max()
    return torch.zeros_like(values) if even else values / largest
