"""Explicit weights of attentions inside windows and strips, over the whole grid."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from softline.attention import create_attention
from softline.backbones.cswin import StripAttention, cswin_backbone
from softline.backbones.swin import PositionBiasAttention, swin_backbone
from softline.layers.windows import WindowedAttention
from softline.measure.counting import peak_bytes

Grid = tuple[int, int]

DIM, HEADS, WINDOW = 16, 4, 4
# padded along both axes, along one, not at all; one window along one axis, and along both
GRIDS = [(9, 5), (15, 8), (8, 12), (3, 10), (9, 4), (3, 4)]
# without their local terms, which are not part of the weights
INNER = {"inline": {"local_residual": False}, "softpp": {"value_conv": None}, "linear": {}, "softmax": {}}
STRIPS = [1, 2, 4, None]

# a shift changes nothing where the map is one window
PLACES = [(grid_size, shifted) for grid_size in GRIDS for shifted in (False, True) if grid_size != (3, 4) or shifted]
every_inner = pytest.mark.parametrize("name", ["biased", *INNER])
every_strip = pytest.mark.parametrize("strip", STRIPS)


def windowed(name: str, *, shifted: bool, window: int = WINDOW) -> WindowedAttention:
    if name != "biased":
        return WindowedAttention(create_attention(name, DIM, HEADS, **INNER[name]), window, shifted=shifted).eval()
    biased = PositionBiasAttention(DIM, HEADS, window)
    nn.init.normal_(biased.position_bias)
    return WindowedAttention(biased, window, shifted=shifted, mask="pairs").eval()


def strips(strip: int | None) -> StripAttention:
    """Without LePE, which is not part of the weights."""
    module = StripAttention(DIM, HEADS, strip).eval()
    for parameter in module.local.parameters():
        nn.init.zeros_(parameter)
    return module


def tokens(grid_size: Grid) -> Tensor:
    return torch.randn(2, grid_size[0] * grid_size[1], DIM, dtype=torch.float64)


def region_along(place: int, side: int, window: int, shift: int, separate_sides: bool) -> tuple[int, bool]:
    """The window of a place along one axis, and on which of the sides that a shift brings together it lies."""
    if side <= window:
        return 0, False
    padded = -(-side // window) * window
    return (place - shift) % padded // window, separate_sides and place < shift


def seen_in_windows(grid_size: Grid, windows: Grid, *, shift: int = 0, separate_sides: bool = False) -> Tensor:
    """Which tokens each token may see [N, N]."""
    regions = [
        [region_along(place, side, window, shift, separate_sides) for place in range(side)]
        for side, window in zip(grid_size, windows, strict=True)
    ]
    of_tokens = list(product(*regions))
    return torch.tensor([[first == second for second in of_tokens] for first in of_tokens])


def assert_gives_rows(module: nn.Module, x: Tensor, grid_size: Grid, weights: Tensor) -> None:
    """For tokens in any order, repeated, none, and all."""
    last = x.shape[1] - 1
    read = module.rows(x, grid_size)
    for chosen in ([last, 0, 7, 3, 7, last // 2], [5], [], list(range(last + 1))):
        index = torch.tensor(chosen, dtype=torch.int64)
        rows = read(index)
        assert rows.shape == (2, module.num_heads, len(chosen), x.shape[1])
        torch.testing.assert_close(rows, weights[:, :, index], rtol=1e-9, atol=1e-11)


def assert_gives_output(module: nn.Module, inner: nn.Module, x: Tensor, grid_size: Grid, weights: Tensor) -> None:
    """The weights times the values, projected, are what the module gives."""
    values = inner.qkv(x)[..., -DIM:].unflatten(-1, (HEADS, -1)).transpose(1, 2)
    out = inner.proj((weights @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, module(x, grid_size), rtol=1e-9, atol=1e-11)


@torch.no_grad()
@every_inner
def test_weights_inside_windows_give_the_output_and_the_rows(name):
    for grid_size, shifted in PLACES:
        module, x = windowed(name, shifted=shifted).double(), tokens(grid_size)
        weights = module.weights(x, grid_size)
        assert weights.shape == (2, HEADS, x.shape[1], x.shape[1])
        assert_gives_output(module, module.attention, x, grid_size, weights)
        assert_gives_rows(module, x, grid_size, weights)


@torch.no_grad()
@every_strip
def test_weights_inside_strips_give_the_output_and_the_rows(strip):
    for grid_size in GRIDS:
        module, x = strips(strip).double(), tokens(grid_size)
        weights = module.weights(x, grid_size)
        assert_gives_output(module, module, x, grid_size, weights)
        assert_gives_rows(module, x, grid_size, weights)


@torch.no_grad()
@pytest.mark.parametrize("name", ["biased", "softmax", "inline"])
def test_tokens_see_those_of_their_window_and_no_others(name):
    for grid_size, shifted in PLACES:
        module, x = windowed(name, shifted=shifted).double(), tokens(grid_size)
        weights = module.weights(x, grid_size)
        shift = WINDOW // 2 if shifted else 0
        seen = seen_in_windows(grid_size, (WINDOW, WINDOW), shift=shift, separate_sides=name == "biased")
        assert torch.equal(weights != 0, seen.expand_as(weights))
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


@torch.no_grad()
@every_strip
def test_half_of_the_heads_see_vertical_strips_and_half_horizontal_ones(strip):
    for grid_size in GRIDS:
        module, x = strips(strip).double(), tokens(grid_size)
        weights = module.weights(x, grid_size)
        height, width = grid_size
        halves = [grid_size, grid_size] if strip is None else [(height, strip), (strip, width)]
        for half, windows in zip(weights.chunk(2, dim=1), halves, strict=True):
            assert torch.equal(half != 0, seen_in_windows(grid_size, windows).expand_as(half))
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


@torch.no_grad()
@every_inner
def test_a_map_that_is_one_window_has_the_weights_of_the_attention_inside(name):
    module, x = windowed(name, shifted=True).double(), tokens((3, 4))
    assert torch.equal(module.weights(x, (3, 4)), module.attention.weights(x, (3, 4)))
    chosen = torch.tensor([11, 0, 4])
    assert torch.equal(module.rows(x, (3, 4))(chosen), module.attention.rows(x, (3, 4))(chosen))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_scores_beyond_half_precision_have_weights(dtype):
    module, x = PositionBiasAttention(DIM, HEADS, WINDOW).to(dtype), torch.randn(3, 16, DIM).to(dtype)
    nn.init.normal_(module.qkv.weight, std=400)
    q, k, _ = module.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).double()
    scores = 0.5 * q @ k.mT
    assert scores.abs().max() > torch.finfo(torch.float16).max
    weights = module.weights(x, (4, 4))
    assert weights.dtype == dtype
    expected = (scores + module.bias((4, 4)).double()).softmax(-1)
    # float32 scores of this size are wrong by their last digits, and the weights in proportion
    error = torch.finfo(torch.float32).eps * scores.abs().max() + torch.finfo(dtype).eps
    assert (weights.double() - expected).abs().max() <= 2 * error


@torch.no_grad()
@pytest.mark.parametrize("make", [lambda: windowed("biased", shifted=True, window=8), lambda: strips(2)])
def test_single_rows_take_no_memory_of_all_pairs(make):
    module, grid_size = make(), (66, 63)
    x = torch.randn(1, 66 * 63, DIM)
    used = peak_bytes(lambda: module.rows(x, grid_size)(torch.arange(3)))
    # a tenth of one head's map of all pairs
    assert used < x.shape[1] ** 2 * 4 / 10


@torch.no_grad()
@pytest.mark.parametrize(
    ("build", "options"),
    [
        (swin_backbone, {"stage_types": "IS", "window_size": 8, "softmax_windows": 4}),
        (cswin_backbone, {"stage_types": "IS", "strips": (2, 2)}),
        (cswin_backbone, {"stage_types": "SS", "strips": (2, None)}),
    ],
)
def test_every_block_of_a_backbone_gives_rows(build, options):
    model = build(embed_dim=8, depths=(2, 2), num_heads=(2, 4), num_classes=3, **options).eval()
    calls = []
    for stage in model.stages:
        for block in stage.blocks:
            block.attn.register_forward_pre_hook(lambda module, given: calls.append((module, *given)))
    model(torch.randn(2, 3, 72, 40))
    for (module, x, grid_size), heads in zip(calls, (2, 2, 4, 4), strict=True):
        assert (module.num_heads, module.num_prefix_tokens) == (heads, 0)
        rows = module.rows(x, grid_size)(torch.tensor([3, 0]))
        assert rows.shape == (2, heads, 2, x.shape[1])
        torch.testing.assert_close(rows.sum(-1), torch.ones(2, heads, 2))
