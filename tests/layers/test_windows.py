import pytest
import torch
from torch import Tensor

from softline.attention import create_attention
from softline.layers.windows import WindowedAttention, Windows

GRIDS = [(8, 8), (9, 13), (3, 20), (1, 1)]
every_grid = pytest.mark.parametrize("grid_size", GRIDS, ids=lambda g: f"{g[0]}x{g[1]}")
every_shift = pytest.mark.parametrize("shift", [0, 2])


def places(grid_size: tuple[int, int]) -> Tensor:
    """Tokens [1, N, 1] that hold their own place, counted from 1: padding is 0."""
    return torch.arange(1.0, grid_size[0] * grid_size[1] + 1)[None, :, None]


@every_grid
@every_shift
def test_joining_undoes_splitting(grid_size, shift):
    x = torch.randn(3, grid_size[0] * grid_size[1], 5)
    windows = Windows(grid_size, (4, 4), (shift, shift))
    assert torch.equal(windows.join(windows.split(x)), x)


@every_grid
@every_shift
def test_every_token_lies_in_one_window_and_padding_is_marked(grid_size, shift):
    windows = Windows(grid_size, (4, 4), (shift, shift))
    held = windows.split(places(grid_size))[..., 0]
    assert sorted(held[held > 0].tolist()) == places(grid_size).flatten().tolist()
    mask = windows.key_mask(1, held.device)
    assert torch.equal(held > 0, torch.ones_like(held, dtype=torch.bool) if mask is None else mask)


@every_grid
def test_a_shifted_window_separates_the_sides_that_it_brings_together(grid_size):
    windows = Windows(grid_size, (4, 4), (2, 2))
    held = windows.split(places(grid_size))[..., 0].long() - 1  # -1 is padding
    allowed = windows.pair_mask(held.device)
    for window, tokens in enumerate(held.tolist()):
        for i, first in enumerate(tokens):
            for j, second in enumerate(tokens):
                if first < 0 or second < 0:
                    together = first < 0 and second < 0
                else:
                    (a, b), (c, d) = divmod(first, grid_size[1]), divmod(second, grid_size[1])
                    # neighbours on the grid are less than a window apart, unless the map itself is one window
                    together = abs(a - c) < 4 and abs(b - d) < 4
                assert together == (True if allowed is None else allowed[window, i, j].item())


@every_shift
def test_attention_inside_windows_is_the_attention_of_each_window_alone(shift):
    attention = create_attention("inline", 16, 2).double().eval()
    module = WindowedAttention(attention, 4, shifted=bool(shift))
    x = torch.randn(1, 8 * 12, 16, dtype=torch.float64)
    out = module(x, (8, 12)).unflatten(1, (8, 12))
    rolled = x.unflatten(1, (8, 12)).roll((-shift, -shift), (1, 2))
    back = out.roll((-shift, -shift), (1, 2))
    for row in range(0, 8, 4):
        for column in range(0, 12, 4):
            window = rolled[:, row : row + 4, column : column + 4].flatten(1, 2)
            expected = attention(window, (4, 4)).unflatten(1, (4, 4))
            torch.testing.assert_close(back[:, row : row + 4, column : column + 4], expected)


def test_padding_of_incomplete_windows_counts_for_nothing():
    attention = create_attention("inline", 16, 2).double().eval()
    module = WindowedAttention(attention, 4, shifted=False)
    x = torch.randn(1, 6 * 4, 16, dtype=torch.float64)
    out = module(x, (6, 4))
    torch.testing.assert_close(out[:, 16:], attention(x[:, 16:], (2, 4)))
