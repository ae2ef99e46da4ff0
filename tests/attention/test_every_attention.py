"""What holds for every registered attention; a new one is picked up by registering it.

Each property is tested for each attention, with the shapes, masks and dtypes in which a fault of it would show, not for
all their combinations.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

from softline import ATTENTIONS, create_attention
from softline.measure.counting import peak_bytes
from tests.support import assert_within_budget, prefix_mask, value_and_gradients

Grid = tuple[int, int]

DIM, HEADS = 32, 2
# grids and prefix tokens: N = 1, 49, 63 and 196, and a class token before a grid that is no square
SHAPES = [((1, 1), 0), ((7, 5), 1), ((7, 7), 0), ((9, 7), 0), ((14, 14), 0)]
# dtype, by autocast or by a module of this dtype, size of the inputs
HALVES = [
    (torch.float16, True, 1e3),
    (torch.bfloat16, False, 1e3),
    (torch.float16, False, 1.0),
    (torch.bfloat16, True, 1.0),
]

# options that change what is computed, beside each attention's defaults
VARIANTS = {
    "soft, average pooling, cholesky": ("soft", {"sampling": "avgpool", "inverse": "cholesky", "ridge": 0.01}),
    "soft, halving, ridge": ("soft", {"start": "halving", "ridge": 0.01}),
    "soft, as released": ("soft", {"start": "release", "ridge": 0.01}),
    "softpp, as released": ("softpp", {"start": "release", "gradient": "autograd"}),
    "softpp, random landmarks, eigendecomposition": ("softpp", {"sampling": "random", "inverse": "pinv"}),
    "softpp, biased landmarks, no convolution": ("softpp", {"sampling": "biased", "value_conv": None}),
    "softpp, 2x3 landmarks": ("softpp", {"max_landmarks": (2, 3)}),
    "inline, exp, no residual": ("inline", {"feature_map": "exp", "local_residual": False}),
    "inline, relu": ("inline", {"feature_map": "relu"}),
    "inline, relu of a learned map": ("inline", {"feature_map": "affine_relu"}),
    "softmax, symmetric, residual": ("softmax", {"symmetric": True, "local_residual": True}),
    "softmax, relu": ("softmax", {"feature_map": "relu"}),
    "linear, exp": ("linear", {"feature_map": "exp"}),
    "linear, relu of a learned map": ("linear", {"feature_map": "affine_relu"}),
}
SOFT = [name for name in (*ATTENTIONS, *VARIANTS) if VARIANTS.get(name, (name,))[0] in ("soft", "softpp")]
# InLine's exp(0.2 x) is not normalised: at inputs of 1e3 it is beyond float32 itself
UNNORMALISED = "inline, exp, no residual"
QUADRATIC = ("softmax", "gaussian", "softmax, symmetric, residual", "softmax, relu")
WITHOUT_FACTORS = ("softmax", "gaussian", "reformer")
ROWS_SUM_TO_ONE = ("softmax", "inline", "linear", "performer", "reformer", "efficient", "focused", "angular")

every_attention = pytest.mark.parametrize("name", [*ATTENTIONS, *VARIANTS])
every_registered = pytest.mark.parametrize("name", list(ATTENTIONS))


def build(name: str, prefix: int = 0, heads: int = HEADS, **options: float) -> nn.Module:
    """The attention or variant in evaluation mode; drawn features come from the seeded generator."""
    name, variant = VARIANTS.get(name, (name, {}))
    return create_attention(name, DIM, heads, num_prefix_tokens=prefix, **variant | options).eval()


def tokens(grid_size: Grid, prefix: int = 0, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, prefix + grid_size[0] * grid_size[1], DIM, dtype=dtype)


def explicit(module: nn.Module, grid_size: Grid):
    """The module's output through its explicit weights."""
    return lambda x: module.mix(module.weights(x, grid_size), x, grid_size)


@every_attention
def test_fast_form_matches_the_definition_in_value_and_gradients(name):
    for grid_size, prefix in SHAPES:
        # if SOFT's kernel is nearly singular, rounding alone decides which form is nearer to the exact result
        ridge = {"ridge": 1.0} if name in SOFT and "released" not in name else {}
        module = build(name, prefix, **ridge)
        x = tokens(grid_size, prefix, batch=8, dtype=torch.float32)
        single = value_and_gradients(lambda x: module(x, grid_size), x)  # noqa: B023
        reference = value_and_gradients(explicit(module, grid_size), x)
        exact = value_and_gradients(explicit(copy.deepcopy(module).double(), grid_size), x.double())
        assert_within_budget(single, reference, exact)


@every_attention
@pytest.mark.parametrize(("prefix", "masked"), [(0, False), (1, True)], ids=["whole", "prefix and mask"])
def test_rows_and_factors_are_those_of_the_weights(name, prefix, masked):
    module, x = build(name, prefix).double(), tokens((7, 5), prefix)
    mask = prefix_mask([20, x.shape[1]], x.shape[1]) if masked else None
    weights = module.weights(x, (7, 5), mask)
    heads = DIM if name == "hydra" else HEADS
    assert weights.shape == (2, heads, x.shape[1], x.shape[1])
    chosen = torch.tensor([34, 0, 19, 0, 20])
    read = module.rows(x, (7, 5), mask)
    torch.testing.assert_close(read(chosen), weights[:, :, chosen], rtol=1e-10, atol=1e-12)
    assert read(chosen[:0]).shape == (2, heads, 0, x.shape[1])
    if module.operator.name in WITHOUT_FACTORS:
        with pytest.raises(ValueError, match="has no low-rank factors"):
            module.factors(x, (7, 5), mask)
        return
    product, *others = module.factors(x, (7, 5), mask)
    for factor in others:
        product = product @ factor
    torch.testing.assert_close(product, weights, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ROWS_SUM_TO_ONE)
def test_rows_of_real_tokens_sum_to_one(name):
    module, x = build(name, 1).double(), tokens((7, 5), 1)
    mask = prefix_mask([36, 20], 36)
    sums = module.weights(x, (7, 5), mask).sum(-1)
    torch.testing.assert_close(sums, mask[:, None].expand_as(sums).double(), rtol=0, atol=1e-12)


@every_registered
def test_single_rows_take_no_memory_of_all_pairs(name):
    grid_size = (64, 64)
    module, x = build(name), tokens(grid_size, batch=1, dtype=torch.float32)
    with torch.no_grad():
        read = peak_bytes(lambda: module.rows(x, grid_size)(torch.arange(4)))
    pairs = 4096 * 4096 * 4
    # reformer sorts, hydra has a map for each channel
    assert read < pairs / 2


@every_attention
def test_a_sample_is_the_same_alone_and_beside_a_very_different_one(name):
    module, grid_size = build(name, 1).double(), (13, 9)
    x = tokens(grid_size, 1, batch=3)
    x[1] *= 100
    x[2] = 1
    together = module(x, grid_size).detach()
    for sample in range(3):
        alone = module(x[sample : sample + 1], grid_size)[0].detach()
        torch.testing.assert_close(together[sample], alone, rtol=1e-9, atol=1e-11 * float(alone.abs().max()))


@every_attention
@pytest.mark.parametrize(("rows", "prefix"), [(1, 0), (4, 1), (10, 1)])
def test_masked_tokens_are_as_good_as_absent(name, rows, prefix):
    """An image padded at the bottom gives the output and the gradient of the image alone."""
    module, width = build(name, prefix).double(), 5
    length = prefix + rows * width
    padded = tokens((11, width), prefix, batch=1)
    padded[:, length:] *= 50
    mask = prefix_mask([length], padded.shape[1])
    masked, masked_gradient = value_and_gradients(lambda x: module(x, (11, width), mask)[:, :length], padded)
    alone, gradient = value_and_gradients(lambda x: module(x, (rows, width)), padded[:, :length])
    torch.testing.assert_close(masked, alone, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(masked_gradient[:, :length], gradient, rtol=1e-8, atol=1e-9)
    assert (masked_gradient[:, length:] == 0).all()


@every_attention
def test_an_image_padded_at_the_bottom_and_the_right_gives_what_it_gives_alone(name):
    module, sizes = build(name, 1).double(), [(9, 11), (6, 5)]
    padded = tokens((9, 11), 1)
    inside = [(torch.arange(9) < h)[:, None] & (torch.arange(11) < w) for h, w in sizes]
    mask = torch.stack([torch.cat([torch.ones(1, dtype=torch.bool), i.flatten()]) for i in inside])
    together = module(padded, (9, 11), mask)
    for sample, size in enumerate(sizes):
        alone = module(padded[sample : sample + 1, mask[sample]], size)[0]
        torch.testing.assert_close(together[sample, mask[sample]], alone, rtol=1e-8, atol=1e-9)


@every_attention
def test_masked_weights_equal_those_of_the_truncated_grid(name):
    module, x = build(name).double(), tokens((9, 5))
    mask = prefix_mask([20, 20], 45)
    weights = module.weights(x, (9, 5), mask)
    torch.testing.assert_close(weights[:, :, :20, :20], module.weights(x[:, :20], (4, 5)), rtol=1e-9, atol=1e-10)
    assert (weights[:, :, 20:] == 0).all()
    assert (weights[:, :, :, 20:] == 0).all()


@every_attention
def test_what_masked_tokens_hold_does_not_matter_wherever_they_are(name):
    module, x = build(name), tokens((7, 5), dtype=torch.float32)
    mask = torch.rand(2, 35) > 0.4
    out = module(x, (7, 5), mask)
    spoiled = module(x.masked_fill(~mask[..., None], float("nan")), (7, 5), mask)
    assert torch.equal(out, spoiled)
    assert (out[~mask] == 0).all()


@every_attention
def test_a_mask_of_ones_changes_nothing(name):
    module, x = build(name, 1).double(), tokens((7, 5), 1)
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    torch.testing.assert_close(module(x, (7, 5), mask), module(x, (7, 5)), rtol=1e-9, atol=1e-10)


@every_attention
def test_a_sample_without_any_real_token_yields_zeros(name):
    module, x = build(name), tokens((7, 5), dtype=torch.float32)
    mask = prefix_mask([35, 0], 35)
    out, grad = value_and_gradients(lambda x: module(x, (7, 5), mask), x)
    assert (out[1] == 0).all()
    assert (grad[1] == 0).all()
    assert out[0].isfinite().all()
    assert grad[0].isfinite().all()


@every_registered
def test_an_empty_batch_passes_through(name):
    module, x = build(name), torch.randn(0, 35, DIM)
    for mask in (None, torch.ones(0, 35, dtype=torch.bool)):
        assert module(x, (7, 5), mask).shape == (0, 35, DIM)


@every_registered
def test_state_dict_restores_the_output(name):
    first, x = build(name), tokens((7, 5), dtype=torch.float32)
    second = build(name)
    assert second.load_state_dict(first.state_dict()).missing_keys == []
    assert torch.equal(first(x, (7, 5)), second(x, (7, 5)))


@every_attention
def test_half_precision_stays_finite_at_12544_tokens_and_large_inputs(name):
    grid_size = (112, 112)
    # of quadratic attentions, which take seconds, large inputs alone
    for dtype, autocast, size in HALVES[:2] if name in QUADRATIC else HALVES:
        module = build(name, heads=1) if autocast else build(name, heads=1).to(dtype)
        x = tokens(grid_size, batch=1, dtype=torch.float32)
        x = x if name == UNNORMALISED else size * x
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=autocast):
            out = module(x if autocast else x.to(dtype), grid_size)
        assert out.dtype == dtype
        assert out.isfinite().all(), f"not finite in {dtype} at inputs of {size}"


@every_attention
def test_images_of_few_colours_stay_finite(name):
    """Kernels of identical and of far tokens at once: singular matrices, and the largest sums over tokens."""
    flat, stripes = torch.ones(1, 576, DIM), torch.randn(1, 2, DIM).repeat_interleave(288, dim=1)
    module = build(name)
    for dtype, size in ((torch.float16, 1.0), (torch.float16, 1e3), (torch.bfloat16, 1e3)):
        for image in (flat, stripes):
            image = image if name == UNNORMALISED else size * image
            with torch.autocast("cpu", dtype), torch.no_grad():
                assert module(image, (24, 24)).isfinite().all(), f"not finite in {dtype} at inputs of {size}"


@every_attention
@pytest.mark.parametrize(("dtype", "side"), [(torch.float16, 56), (torch.bfloat16, 14)], ids=["float16", "bfloat16"])
def test_half_precision_gradients_stay_finite(name, dtype, side):
    module, x = build(name), tokens((side, side), batch=1, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype):
        out = module(x, (side, side))
    out.float().square().mean().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


# Reformer's rounded queries fall into other buckets
@pytest.mark.parametrize("name", [name for name in (*ATTENTIONS, *VARIANTS) if name != "reformer"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_is_as_accurate_as_its_inputs(name, dtype):
    """Only storing inputs, weights and results in half precision costs accuracy, not the sums over tokens."""
    module, x = build(name).to(dtype), tokens((24, 24), batch=1).to(dtype)
    exact = copy.deepcopy(module).double()(x.double(), (24, 24))
    out = module(x, (24, 24))
    assert out.dtype == module.weights(x, (24, 24)).dtype == dtype
    assert (out.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps * exact.abs().max()


@every_registered
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


@every_registered
def test_projections_can_do_without_bias(name):
    assert create_attention(name, 32, 2).qkv.bias is not None
    assert create_attention(name, 32, 2, qkv_bias=False).qkv.bias is None
