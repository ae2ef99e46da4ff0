"""Operators at the ends of the range: every finite float16 number, and tensors chosen to break sums and quotients."""

import itertools
import random

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from softline import ops
from softline.attention.multihead import apply_weights
from softline.ops.linear import FEATURE_MAPS
from tests.ops.test_every_operator import NAMES, functions, options

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# up to the largest float16; bfloat16 and float32 beyond it
SIZES = [0.0, 6e-8, 1e-8, 1e-4, 1.0, 300.0, 2e4, 65504.0]
MORE_SIZES = [1e-30, 1e6]
KINDS = ["normal", "positive", "equal", "alternating", "one huge", "spread"]
SHAPES = [(1, 1), (1, 8), (7, 1), (37, 8)]
MASKS = ["none", "one", "half", "all"]
CASES = 15


def soft(normalize, **chosen):
    def given(q, key_mask):
        step = max(1, q.shape[2] // 5)
        mask = None if key_mask is None else key_mask[:, ::step]
        return {"landmarks": q[:, :, ::step], "landmark_mask": mask, "normalize": normalize, **chosen}

    def attention(q, k, v, key_mask):
        return ops.soft_attention(q=q, v=v, key_mask=key_mask, **given(q, key_mask))

    return attention, lambda q, k, key_mask: ops.soft_weights(q=q, key_mask=key_mask, **given(q, key_mask))


def plain(name, **chosen):
    attention, weights = functions(name)

    def given(q, key_mask):
        found = options(name, q) | chosen
        if name == "nystrom":
            mask = None if key_mask is None else key_mask[:, :5]
            found |= {"q_landmarks": q[:, :, :5], "k_landmarks": q[:, :, :5], "landmark_mask": mask}
        return found

    return (
        lambda q, k, v, key_mask: attention(q, k, v, **given(q, key_mask), key_mask=key_mask),
        lambda q, k, key_mask: weights(q, k, **given(q, key_mask), key_mask=key_mask),
    )


OPERATORS = {
    **{name: plain(name) for name in (*NAMES, "hydra", "inline")},
    **{f"linear, {phi}": plain("linear", feature_map=phi) for phi in ("relu", "leaky_relu", "identity", "exp")},
    "inline, explicit": (plain("inline", impl="explicit")[0], plain("inline")[1]),
    "soft": soft(False),
    "softpp": soft(True),
    "soft, cholesky": soft(False, inverse="cholesky", ridge=0.01),
    "softpp, pinv": soft(True, inverse="pinv"),
}
every_operator = pytest.mark.parametrize("name", OPERATORS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float16", "bfloat16", "float32"])


def draw(kind: str, size: float, shape: tuple[int, ...]) -> Tensor:
    """Numbers of at most ``size``, in float64."""
    normal = torch.randn(shape, dtype=torch.float64).clamp(-3, 3) / 3
    sign = (1 - 2 * (torch.arange(shape[2]) % 2)).double()[:, None]
    one = torch.zeros(shape, dtype=torch.float64)
    one[0, 0, shape[2] // 2, 0] = size
    return {
        "normal": size * normal,
        "positive": size * normal.abs(),
        "equal": torch.full(shape, size, dtype=torch.float64),
        "alternating": size * sign.expand(shape),
        "one huge": one + 1e-3 * normal,
        "spread": size * normal * torch.logspace(-8, 0, shape[3], dtype=torch.float64),
    }[kind]


def mask_of(kind: str, tokens: int) -> Tensor | None:
    place = torch.arange(tokens).expand(2, -1)
    return {"none": None, "one": place == tokens // 2, "half": place % 2 == 0, "all": place < 0}[kind]


def cases(name: str, dtype: torch.dtype):
    """Description, queries, keys and values [2, 2, N, D] and mask of seeded cases."""
    chance = random.Random(f"{name} {dtype}")
    sizes = SIZES if dtype == torch.float16 else SIZES + MORE_SIZES
    every = list(itertools.product(sizes, KINDS, SHAPES, MASKS))
    for size, kind, (tokens, dim), masked in chance.sample(every, CASES):
        torch.manual_seed(chance.randrange(2**31))
        inputs = [draw(kind, size, (2, 2, tokens, dim)).to(dtype) for _ in range(3)]
        yield f"{kind} {size:g}, N={tokens}, D={dim}, mask: {masked}", inputs, mask_of(masked, tokens)


def definition(weights, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, limit: float) -> Tensor:
    return apply_weights(weights(q, k, mask), v).double().clamp(-limit, limit)


@every_operator
@every_dtype
def test_results_are_finite_and_those_of_the_definition_up_to_the_largest_number(name, dtype):
    """Within four times the error of the definition in float32, of rounding the inputs to float32, and of the result.

    Rounding the values counts by the largest of them, which the mean that is subtracted from them shares.
    """
    if (name, dtype) == ("linformer", torch.float16) and Version(torch.__version__) < Version("2.11"):
        pytest.skip("the fused kernel of torch 2.10 is less exact at the largest numbers of float16")
    attention, weights = OPERATORS[name]
    limit, single = torch.finfo(dtype).max, torch.finfo(torch.float32).eps
    for what, inputs, mask in cases(name, dtype):
        out = attention(*inputs, mask)
        assert (out.dtype, out.shape) == (dtype, inputs[2].shape), what
        assert out.isfinite().all(), f"{what}: not finite"
        if mask is not None:
            assert (out.mT[~mask[:, None, None].expand_as(out.mT)] == 0).all(), what
        exact = definition(weights, *(x.double() for x in inputs), mask, limit)
        reference = definition(weights, *(x.float() for x in inputs), mask, limit)
        moved = [x.double() * (1 + single * torch.empty_like(x, dtype=torch.float64).uniform_(-1, 1)) for x in inputs]
        rounded = definition(weights, *moved, mask, limit)
        errors = [(other - exact).abs().max().item() for other in (out.double(), reference, rounded)]
        sizes = torch.finfo(dtype).eps * exact.abs().max() + single * inputs[2].double().abs().max()
        budget = 4 * (errors[1] + errors[2] + sizes.item() + torch.finfo(dtype).smallest_normal)
        assert errors[0] <= budget, f"{what}: error {errors[0]:.3g} exceeds the budget {budget:.3g}"


# torch's own kernel: its gradient is NaN in every dtype where scores exceed 1e9
@pytest.mark.parametrize("name", [name for name in OPERATORS if name != "softmax"])
@every_dtype
def test_gradients_are_never_nan_and_infinite_in_float16_alone(name, dtype):
    attention, _ = OPERATORS[name]
    for what, inputs, mask in cases(name, dtype):
        inputs = [x.requires_grad_() for x in inputs]
        out = attention(*inputs, mask)
        gradients = torch.autograd.grad(out.float().sum(), inputs, allow_unused=True)
        for gradient in gradients:
            if gradient is not None:
                assert not gradient.isnan().any(), what
                assert dtype == torch.float16 or gradient.isfinite().all(), what


@every_dtype
def test_focused_attention_of_a_head_that_is_tiny_beside_another_is_still_a_mean(dtype):
    """Norms are shared by the heads: the features of the small head are 1e-27, and their product is below float32."""
    x = torch.full((1, 2, 1, 8), -1.0, dtype=dtype)
    x[0, 0, 0, 0] = 2e4
    v = torch.randn(1, 2, 1, 8).to(dtype).requires_grad_()
    out = ops.focused_attention(x, x, v)
    torch.testing.assert_close(out, v)
    assert torch.equal(torch.autograd.grad(out.sum(), v)[0], torch.ones_like(v))


@every_dtype
@pytest.mark.parametrize("size", [6e-8, 1 / 3, 2e4 / 3, 65504.0])
def test_inline_attention_of_equal_tokens_is_their_value(dtype, size):
    """q, k and v of 65,504 multiply to 10^15: without centring, float32 would be wrong in every digit."""
    x = torch.full((1, 1, 37, 8), size, dtype=dtype)
    torch.testing.assert_close(ops.inline_attention(x, x, x), x, rtol=32 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("phi", ["relu", "leaky_relu", "identity"])
def test_linear_attention_does_not_depend_on_the_scale_of_queries_and_keys(phi):
    q, k, v = (torch.rand(1, 2, 37, 8) for _ in range(3))
    expected = ops.linear_attention(q, k, v, feature_map=phi)
    for power in (-100, -60, 60, 100):
        scaled = ops.linear_attention(q * 2.0**power, k * 2.0**power, v, feature_map=phi)
        assert torch.equal(scaled, expected)


def test_elu_features_of_negative_numbers_keep_their_digits():
    x = torch.linspace(-80, 5, 50)
    exact = torch.where(x.double() > 0, x.double() + 1, x.double().exp())
    torch.testing.assert_close(ops.FEATURE_MAPS["elu"](x).double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [2.0**-100, 2.0**100])
def test_directions_do_not_depend_on_the_scale(size):
    q, k, v = (torch.randn(1, 2, 37, 8) for _ in range(3))
    for attention in (ops.angular_attention, ops.hydra_attention):
        assert torch.equal(attention(size * q, size * k, v), attention(q, k, v))


def test_elu_features_have_the_gradient_of_elu():
    x = torch.tensor([0.0, -1.0, 2.0, -30.0], dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad((torch.nn.functional.elu(x) + 1).sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(FEATURE_MAPS["elu"](x).sum(), x)[0], expected)
