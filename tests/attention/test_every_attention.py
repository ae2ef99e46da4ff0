"""What holds for every registered attention; a new one is picked up by registering it."""

import copy

import pytest
import torch
from torch import Tensor, nn

from softline import ATTENTIONS, create_attention
from softline.measure.counting import peak_bytes
from tests.support import assert_within_budget, prefix_mask, value_and_gradients

GRIDS = [(1, 1), (7, 5), (13, 9), (56, 56)]
SMALL_GRIDS = GRIDS[:3]
DIM, HEADS = 32, 2

# options that change what is computed, beside each attention's defaults
VARIANTS = {
    "soft, average pooling, cholesky": ("soft", {"sampling": "avgpool", "inverse": "cholesky", "ridge": 0.01}),
    "soft, halving, ridge": ("soft", {"start": "halving", "ridge": 0.01}),
    "softpp, random landmarks, eigendecomposition": ("softpp", {"sampling": "random", "inverse": "pinv"}),
    "softpp, biased landmarks, no convolution": ("softpp", {"sampling": "biased", "value_conv": None}),
    "softpp, 2x3 landmarks": ("softpp", {"max_landmarks": (2, 3)}),
    "inline, exp, no residual": ("inline", {"feature_map": "exp", "local_residual": False}),
    "inline, relu": ("inline", {"feature_map": "relu"}),
    "softmax, symmetric, residual": ("softmax", {"symmetric": True, "local_residual": True}),
    "linear, exp": ("linear", {"feature_map": "exp"}),
}

every_attention = pytest.mark.parametrize("name", [*ATTENTIONS, *VARIANTS])
every_grid = pytest.mark.parametrize("grid_size", GRIDS, ids=lambda g: f"{g[0]}x{g[1]}")
every_small_grid = pytest.mark.parametrize("grid_size", SMALL_GRIDS, ids=lambda g: f"{g[0]}x{g[1]}")
with_and_without_prefix = pytest.mark.parametrize("prefix", [0, 1])
both_halves = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def build(name: str, prefix: int = 0, heads: int = HEADS) -> nn.Module:
    """The attention or variant in evaluation mode; drawn features come from the seeded generator."""
    name, variant = VARIANTS.get(name, (name, {}))
    return create_attention(name, DIM, heads, num_prefix_tokens=prefix, **variant).eval()


def tokens(grid_size: tuple[int, int], prefix: int = 0, batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, prefix + grid_size[0] * grid_size[1], DIM, dtype=dtype)


def explicit(module: nn.Module, grid_size: tuple[int, int]):
    """The module's output through its explicit weights."""
    return lambda x: module.mix(module.weights(x, grid_size), x, grid_size)


@every_attention
@with_and_without_prefix
@every_small_grid
def test_fast_form_matches_the_definition_in_value_and_gradients(name, prefix, grid_size):
    module, x = build(name, prefix), tokens(grid_size, prefix)
    single = value_and_gradients(lambda x: module(x, grid_size), x)
    reference = value_and_gradients(explicit(module, grid_size), x)
    exact = value_and_gradients(explicit(copy.deepcopy(module).double(), grid_size), x.double())
    assert_within_budget(single, reference, exact)


@every_attention
@with_and_without_prefix
@every_grid
def test_any_grid_gives_finite_tokens_of_the_same_shape(name, prefix, grid_size):
    module, x = build(name, prefix), tokens(grid_size, prefix, batch=1)
    out, gradient = value_and_gradients(lambda x: module(x, grid_size), x)
    assert out.shape == x.shape
    assert out.isfinite().all()
    assert gradient.isfinite().all()


@every_attention
@with_and_without_prefix
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_single_rows_are_those_of_the_weights(name, prefix, masked):
    module, x = build(name, prefix).double(), tokens((7, 5), prefix, dtype=torch.float64)
    mask = prefix_mask([20, x.shape[1]], x.shape[1]) if masked else None
    chosen = torch.tensor([34, 0, 19, 0, 20])
    weights = module.weights(x, (7, 5), mask)
    read = module.rows(x, (7, 5), mask)
    torch.testing.assert_close(read(chosen), weights[:, :, chosen], rtol=1e-10, atol=1e-12)
    assert read(chosen[:0]).shape == (*weights.shape[:2], 0, x.shape[1])


@pytest.mark.parametrize("name", ATTENTIONS)
def test_single_rows_take_no_memory_of_all_pairs(name):
    grid_size = (64, 64)
    module, x = build(name), tokens(grid_size, batch=1)
    with torch.no_grad():
        read = peak_bytes(lambda: module.rows(x, grid_size)(torch.arange(4)))
    pairs = 4096 * 4096 * 4
    # reformer sorts, hydra has a map for each channel
    assert read < pairs / 2


@every_attention
@with_and_without_prefix
def test_weights_have_one_row_and_column_for_each_token(name, prefix):
    module, x = build(name, prefix), tokens((7, 5), prefix)
    weights = module.weights(x, (7, 5))
    heads = DIM if name == "hydra" else HEADS
    assert weights.shape == (2, heads, x.shape[1], x.shape[1])


@every_attention
@with_and_without_prefix
def test_factors_multiply_to_the_weights(name, prefix):
    module, x = build(name, prefix).double(), tokens((7, 5), prefix, dtype=torch.float64)
    mask = prefix_mask([prefix + 35, prefix + 20], x.shape[1])
    if module.operator.name in ("softmax", "gaussian", "reformer"):
        with pytest.raises(ValueError, match="has no low-rank factors"):
            module.factors(x, (7, 5))
        return
    for key_mask in (None, mask):
        factors = module.factors(x, (7, 5), key_mask)
        product = factors[0]
        for factor in factors[1:]:
            product = product @ factor
        torch.testing.assert_close(product, module.weights(x, (7, 5), key_mask), rtol=1e-10, atol=1e-12)


@every_attention
@with_and_without_prefix
def test_a_sample_is_the_same_alone_and_beside_a_very_different_one(name, prefix):
    module, grid_size = build(name, prefix).double(), (13, 9)
    x = tokens(grid_size, prefix, batch=3, dtype=torch.float64)
    x[1] *= 100
    x[2] = 1
    together = module(x, grid_size).detach()
    for sample in range(3):
        alone = module(x[sample : sample + 1], grid_size)[0].detach()
        torch.testing.assert_close(together[sample], alone, rtol=1e-9, atol=1e-11 * float(alone.abs().max()))


@every_attention
@with_and_without_prefix
@pytest.mark.parametrize("rows", [1, 4, 10])
def test_masked_tokens_are_as_good_as_absent(name, prefix, rows):
    """An image padded at the bottom gives the output and the gradient of the image alone."""
    module, width = build(name, prefix).double(), 5
    length = prefix + rows * width
    padded = tokens((11, width), prefix, batch=1, dtype=torch.float64)
    padded[:, length:] *= 50
    mask = prefix_mask([length], padded.shape[1])
    masked, masked_gradient = value_and_gradients(lambda x: module(x, (11, width), mask)[:, :length], padded)
    alone, gradient = value_and_gradients(lambda x: module(x, (rows, width)), padded[:, :length])
    torch.testing.assert_close(masked, alone, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(masked_gradient[:, :length], gradient, rtol=1e-8, atol=1e-9)
    assert (masked_gradient[:, length:] == 0).all()


@every_attention
@with_and_without_prefix
def test_an_image_padded_at_the_bottom_and_the_right_gives_what_it_gives_alone(name, prefix):
    module, sizes = build(name, prefix).double(), [(9, 11), (6, 5)]
    padded = tokens((9, 11), prefix, dtype=torch.float64)
    inside = [(torch.arange(9) < h)[:, None] & (torch.arange(11) < w) for h, w in sizes]
    mask = torch.stack([torch.cat([torch.ones(prefix, dtype=torch.bool), i.flatten()]) for i in inside])
    together = module(padded, (9, 11), mask)
    for sample, size in enumerate(sizes):
        alone = module(padded[sample : sample + 1, mask[sample]], size)[0]
        torch.testing.assert_close(together[sample, mask[sample]], alone, rtol=1e-8, atol=1e-9)


@every_attention
def test_masked_weights_equal_those_of_the_truncated_grid(name):
    module, x = build(name).double(), tokens((9, 5), dtype=torch.float64)
    mask = prefix_mask([20, 20], 45)
    weights = module.weights(x, (9, 5), mask)
    torch.testing.assert_close(weights[:, :, :20, :20], module.weights(x[:, :20], (4, 5)), rtol=1e-9, atol=1e-10)
    assert (weights[:, :, 20:] == 0).all()
    assert (weights[:, :, :, 20:] == 0).all()


@every_attention
def test_what_masked_tokens_hold_does_not_matter_wherever_they_are(name):
    module, x = build(name), tokens((7, 5))
    mask = torch.rand(2, 35) > 0.4
    out = module(x, (7, 5), mask)
    spoiled = module(x.masked_fill(~mask[..., None], float("nan")), (7, 5), mask)
    assert torch.equal(out, spoiled)
    assert (out[~mask] == 0).all()


@every_attention
@with_and_without_prefix
def test_a_mask_of_ones_changes_nothing(name, prefix):
    module, x = build(name, prefix).double(), tokens((7, 5), prefix, dtype=torch.float64)
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    torch.testing.assert_close(module(x, (7, 5), mask), module(x, (7, 5)), rtol=1e-9, atol=1e-10)


@every_attention
def test_a_sample_without_any_real_token_yields_zeros(name):
    module, x = build(name), tokens((7, 5))
    mask = prefix_mask([35, 0], 35)
    out, grad = value_and_gradients(lambda x: module(x, (7, 5), mask), x)
    assert (out[1] == 0).all()
    assert (grad[1] == 0).all()
    assert out[0].isfinite().all()
    assert grad[0].isfinite().all()


@every_attention
def test_state_dict_restores_the_output(name):
    first, x = build(name), tokens((7, 5))
    second = build(name)
    assert second.load_state_dict(first.state_dict()).missing_keys == []
    assert torch.equal(first(x, (7, 5)), second(x, (7, 5)))


@every_attention
@with_and_without_prefix
def test_compiles_without_graph_breaks_forward_and_backward(name, prefix):
    torch.compiler.reset()
    module, x = build(name, prefix), tokens((7, 5), prefix)
    mask = prefix_mask([prefix + 35, prefix + 21], x.shape[1])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for key_mask in (None, mask):
        eager = value_and_gradients(lambda x: module(x, (7, 5), key_mask), x)  # noqa: B023
        graph = value_and_gradients(lambda x: compiled(x, (7, 5), key_mask), x)  # noqa: B023
        for actual, expected in zip(graph, eager, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@every_attention
@both_halves
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "half module"])
def test_half_precision_stays_finite_at_12544_tokens_and_large_inputs(name, dtype, autocast):
    grid_size = (112, 112)
    module = build(name, heads=1) if autocast else build(name, heads=1).to(dtype)
    # InLine's exp(0.2 x) is not normalised: at 1e3 it is beyond float32 itself
    for scale in (1.0,) if name == "inline, exp, no residual" else (1.0, 1e3):
        x = scale * tokens(grid_size, batch=1)
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=autocast):
            out = module(x if autocast else x.to(dtype), grid_size)
        assert out.dtype == dtype
        assert out.isfinite().all(), f"not finite at scale {scale}"


@every_attention
@both_halves
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_images_of_few_colours_stay_finite(name, dtype, scale):
    """Kernels of identical and of far tokens at once: singular matrices, and the largest sums over tokens."""
    if scale > 1 and name == "inline, exp, no residual":
        pytest.skip("exp(0.2 x) is not normalised: at 1e3 it is beyond float32 itself")
    flat, stripes = torch.ones(1, 576, DIM), torch.randn(1, 2, DIM).repeat_interleave(288, dim=1)
    for image in (flat, stripes):
        with torch.autocast("cpu", dtype), torch.no_grad():
            assert build(name)(scale * image, (24, 24)).isfinite().all()


@every_attention
@both_halves
def test_half_precision_gradients_stay_finite(name, dtype):
    module, x = build(name), tokens((56, 56), batch=1).requires_grad_()
    with torch.autocast("cpu", dtype):
        out = module(x, (56, 56))
    out.float().square().mean().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    for parameter in module.parameters():
        if parameter.grad is not None:
            assert parameter.grad.isfinite().all()


@every_attention
@both_halves
def test_half_precision_is_as_accurate_as_its_inputs(name, dtype):
    """Only storing inputs, weights and results in half precision costs accuracy, not the sums over tokens."""
    module = build(name).to(dtype)
    x = tokens((24, 24), batch=1).to(dtype)
    exact = copy.deepcopy(module).double()(x.double(), (24, 24))
    if name == "reformer":
        pytest.skip("rounded queries fall into other buckets")
    error = (module(x, (24, 24)).double() - exact).abs().max()
    assert error <= 4 * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("name", list(ATTENTIONS))
def test_bad_input_is_named(name):
    module, x = build(name, 1), tokens((7, 5), 1)
    with pytest.raises(ValueError, match=r"N must be num_prefix_tokens \+ H\*W = 1 \+ 5\*5, got 36"):
        module(x, (5, 5))
    with pytest.raises(ValueError, match=r"grid_size must be at least 1x1, got 0x5"):
        module(x, (0, 5))
    with pytest.raises(ValueError, match=r"x must have shape \[B, N, 32\], got \(2, 36, 16\)"):
        module(x[..., :16], (7, 5))
    with pytest.raises(ValueError, match=r"x must have shape \[B, N, 32\], got \(36, 32\)"):
        module(x[0], (7, 5))
    with pytest.raises(ValueError, match="key_mask must be a bool tensor"):
        module(x, (7, 5), torch.ones(2, 36))
    with pytest.raises(ValueError, match=r"key_mask must have shape \[B, N\] = \(2, 36\), got \(2, 35\)"):
        module(x, (7, 5), torch.ones(2, 35, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"dim \(32\) must be divisible by num_heads \(3\)"):
        create_attention(name, 32, 3)
    with pytest.raises(ValueError, match=f"an option of '{name}' must be one of .*got 'nonsense'"):
        create_attention(name, 32, 2, nonsense=1)
