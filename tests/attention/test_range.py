"""Attention modules at the ends of float16's range."""

import pytest
import torch
from torch import Tensor

from tests.attention.test_every_attention import DIM, build, every_attention

# grids and real tokens: one token, one of 35, all of them, every other one
GRIDS = [((1, 1), 1), ((7, 5), 35), ((7, 5), 1), ((7, 5), 2)]
LARGEST = torch.finfo(torch.float16).max


def inputs(tokens: int) -> list[Tensor]:
    """Tokens [2, N, C] of the largest size: random, equal, alternating, and all small but one number."""
    normal = torch.randn(2, tokens, DIM).clamp(-3, 3) / 3
    sign = (1 - 2 * (torch.arange(tokens) % 2))[:, None].expand(2, -1, DIM)
    one = normal.clone()
    one[0, tokens // 2, 0] = LARGEST
    return [LARGEST * normal, torch.full_like(normal, LARGEST), LARGEST * sign, one]


@every_attention
@pytest.mark.parametrize("enlarged", [1, 8])
def test_float16_saturates_instead_of_becoming_infinite(name, enlarged):
    """Also where projections, convolutions and predicted kernels overflow: their weights are enlarged."""
    module = build(name).half()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(enlarged)
        for grid_size, real in GRIDS:
            tokens = grid_size[0] * grid_size[1]
            place = torch.arange(tokens).expand(2, -1)
            mask = {1: place == tokens // 2, 2: place % 2 == 0}.get(real)
            for x in inputs(tokens):
                out = module(x.half(), grid_size, mask)
                assert out.dtype == torch.float16
                assert out.isfinite().all()
