"""Where a model looks: rows of the explicit attention weights, laid out on the image."""

import torch
from torch import Tensor


def contrast(row: Tensor) -> Tensor:
    """Each weight's difference from the row's mean, divided by the largest difference: -1 to 1 [H, W].

    The mean, not zero, is where it turns: rows that sum to one differ little from 1 / N, and SOFT's weights may be
    negative. An even row is all zero.
    """
    difference = row - row.mean()
    largest = difference.abs().max()
    # what is left of an even row is rounding
    even = largest <= 1e-6 * row.abs().max()
    return torch.zeros_like(difference) if even else difference / largest
