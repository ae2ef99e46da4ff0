import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from softline.ops import (
    gaussian_kernel,
    newton_inverse,
    soft_attention,
    soft_linear,
    soft_residual,
    soft_residuals,
    soft_weights,
)
from tests.support import assert_fast_matches_definition, prefix_mask, value_and_gradients

relaxed = settings(deadline=None, max_examples=25)
INVERSES = [("newton", 0.0), ("pinv", 0.0), ("cholesky", 1e-2)]


def naive_weights(q: Tensor, landmarks: Tensor, normalize: bool, ridge: float = 0.0) -> Tensor:
    """Eq. 5, 9 and 17 from explicit differences and an exact inverse."""
    scale = q.shape[-1] ** -0.5

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return torch.exp(-scale / 2 * (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1))

    P, A = kernel(landmarks, q), kernel(landmarks, landmarks)
    inverse = torch.linalg.inv(A + ridge * torch.eye(A.shape[-1], dtype=A.dtype))
    if normalize:
        root = torch.diag_embed(A.sum(-1) ** -0.5)
        inverse = root @ inverse @ root
    return P.mT @ inverse @ P


def inputs(tokens: int, landmarks: int, spread: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 2, tokens, 16), (2, 2, landmarks, 16), (2, 2, tokens, 16)]
    q, z, v = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return spread * q, spread * z, v


@relaxed
@given(
    tokens=st.integers(1, 63),
    landmarks=st.integers(1, 20),
    spread=st.floats(0.7, 3.0),
    normalize=st.booleans(),
    method=st.sampled_from(INVERSES),
    seed=st.integers(0, 2**16),
)
def test_attention_equals_the_papers_equations(tokens, landmarks, spread, normalize, method, seed):
    """For SOFT++ this is the explicit D^-1/2 A^+ D^-1/2 product."""
    q, z, v = inputs(tokens, landmarks, spread, seed)
    inverse, ridge = method
    expected = naive_weights(q, z, normalize, ridge)
    options = {"normalize": normalize, "inverse": inverse, "ridge": ridge}
    torch.testing.assert_close(soft_weights(q, z, **options), expected, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(soft_attention(q, z, v, **options), expected @ v, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("inverse", "ridge"), INVERSES)
@pytest.mark.parametrize(
    ("tokens", "landmarks", "normalize"), [(1, 1, True), (49, 9, False), (63, 49, True), (196, 49, False)]
)
def test_linear_form_matches_definition(tokens, landmarks, normalize, inverse, ridge):
    options = {"normalize": normalize, "inverse": inverse, "ridge": ridge}
    assert_fast_matches_definition(
        lambda q, z, v: soft_attention(q, z, v, **options),
        lambda q, z, v: soft_weights(q, z, **options) @ v,
        *inputs(tokens, landmarks, spread=1.5),
    )


def test_gradient_equals_autograd_through_the_naive_equations():
    for normalize in (False, True):
        actual = value_and_gradients(lambda *x: soft_attention(*x, normalize=normalize), *inputs(35, 9))  # noqa: B023
        expected = value_and_gradients(
            lambda q, z, v: naive_weights(q, z, normalize) @ v,  # noqa: B023
            *inputs(35, 9),
        )
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(("inverse", "ridge"), INVERSES)
@pytest.mark.parametrize(
    ("normalize", "dtype"), [(False, torch.float64), (True, torch.float32)], ids=["soft float64", "softpp float32"]
)
def test_identical_tokens_give_finite_outputs_and_gradients(normalize, inverse, ridge, dtype):
    q = torch.ones(1, 2, 64, 16, dtype=dtype)
    landmarks, v = torch.ones(1, 2, 49, 16, dtype=dtype), torch.randn(1, 2, 64, 16, dtype=dtype)
    for result in value_and_gradients(
        lambda *x: soft_attention(*x, normalize=normalize, inverse=inverse, ridge=ridge), q, landmarks, v
    ):
        assert result.isfinite().all()


@relaxed
@given(spread=st.floats(0.0, 0.05), seed=st.integers(0, 2**16), normalize=st.booleans())
def test_nearly_identical_tokens_give_finite_outputs_and_gradients(spread, seed, normalize):
    q, z, v = (x.float() for x in inputs(30, 25, spread, seed))
    for result in value_and_gradients(lambda *x: soft_attention(*x, normalize=normalize), q, z, v):
        assert result.isfinite().all()


def test_identical_tokens_average_to_the_exact_kernel():
    """All kernels are 1: S is the matrix of ones, and its Nystrom form through a singular A is exact."""
    q, landmarks = torch.zeros(1, 1, 10, 4), torch.zeros(1, 1, 7, 4)
    torch.testing.assert_close(
        soft_weights(q, landmarks, normalize=False), torch.ones(1, 1, 10, 10), rtol=1e-4, atol=1e-4
    )


def test_landmarks_that_are_all_the_tokens_give_the_exact_gaussian_kernel():
    q, _, _ = inputs(20, 1, spread=1.5)
    weights = soft_weights(q, q, normalize=False)
    exact = torch.exp(-0.25 / 2 * torch.cdist(q, q).square())
    torch.testing.assert_close(weights, exact, rtol=1e-6, atol=1e-8)


def test_masked_landmarks_count_for_nothing():
    q, z, v = inputs(30, 12)
    mask = torch.arange(12) < torch.tensor([[12], [5]])
    for normalize in (False, True):
        for inverse, ridge in INVERSES:
            options = {"normalize": normalize, "inverse": inverse, "ridge": ridge}
            masked = soft_attention(q, z, v, **options, landmark_mask=mask)[1:]
            truncated = soft_attention(q[1:], z[1:, :, :5], v[1:], **options)
            torch.testing.assert_close(masked, truncated, rtol=1e-9, atol=1e-10)


def test_every_implementation_gives_the_same():
    q, z, v = inputs(30, 12)
    linear = soft_attention(q, z, v, normalize=True, impl="linear")
    assert torch.equal(linear, soft_attention(q, z, v, normalize=True, impl="auto"))
    torch.testing.assert_close(linear, soft_attention(q, z, v, normalize=True, impl="explicit"))


def test_large_offsets_do_not_cancel_the_distances():
    """Distances ignore a common shift; so does the result. The inputs are such that float32 holds the shifted ones."""
    q, z, v = ((256 * x).round().float() / 256 for x in inputs(30, 12))
    shifted = soft_attention(q + 512, z + 512, v, normalize=True)
    torch.testing.assert_close(shifted, soft_attention(q, z, v, normalize=True), rtol=1e-5, atol=1e-5)


def test_bad_input_is_named():
    q, z, v = inputs(30, 12)
    with pytest.raises(ValueError, match=r'inverse="cholesky" needs ridge > 0 .*, got ridge=0.0'):
        soft_attention(q, z, v, normalize=True, inverse="cholesky")
    with pytest.raises(ValueError, match=r"ridge must be at least 0, got -1"):
        soft_attention(q, z, v, normalize=True, inverse="cholesky", ridge=-1)
    with pytest.raises(ValueError, match=r"inverse must be one of cholesky, newton, pinv; got 'newtom'; did you mean"):
        soft_attention(q, z, v, normalize=True, inverse="newtom")
    with pytest.raises(ValueError, match=r"impl must be one of auto, explicit, linear; got 'triton'"):
        soft_attention(q, z, v, normalize=True, impl="triton")
    with pytest.raises(ValueError, match=r"landmarks must share the head dimension with q"):
        soft_attention(q, z[..., :8], v, normalize=True)
    with pytest.raises(ValueError, match=r"the number of landmarks must be at least 1, got 0"):
        soft_attention(q, z[:, :, :0], v, normalize=True)
    with pytest.raises(ValueError, match=r"landmark_mask must have shape \[B, N\] = \(2, 12\), got \(2, 30\)"):
        soft_attention(q, z, v, normalize=True, landmark_mask=torch.ones(2, 30, dtype=torch.bool))


@pytest.mark.parametrize("masked", ["tokens", "landmarks"])
def test_padding_costs_no_precision_whatever_the_offset_of_the_tokens(masked):
    q, z, v = ((256 * x).round().float() / 256 + 512 for x in inputs(40, 12))
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 360)) for x in (q, z, v)]
    mask = (torch.arange(400) < 40).expand(2, -1)
    landmark_mask = (torch.arange(372) < 12).expand(2, -1)
    alone = soft_attention(q, z, v, normalize=True)
    if masked == "tokens":
        out = soft_attention(padded[0], z, padded[2], normalize=True, key_mask=mask)[:, :, :40]
    else:
        out = soft_attention(q, padded[1], v, normalize=True, landmark_mask=landmark_mask)
    torch.testing.assert_close(out, alone, rtol=1e-4, atol=1e-4 * float(alone.abs().max()))


@pytest.mark.parametrize(("inverse", "ridge"), INVERSES)
def test_clusters_far_from_each_other_keep_the_kernel_positive(inverse, ridge):
    """Near and far pairs at once, of large numbers: rounding of distances must not make A indefinite."""
    z = torch.randn(1, 1, 2, 16).repeat_interleave(12, dim=2) * 1000 + 0.1 * torch.randn(1, 1, 24, 16)
    q, v = z[:, :, ::2], torch.randn(1, 1, 12, 16)
    for result in value_and_gradients(
        lambda *x: soft_attention(*x, normalize=True, inverse=inverse, ridge=ridge), q, z, v
    ):
        assert result.isfinite().all()


def test_per_sample_gradients_by_vmap():
    q, z, v = inputs(20, 6)

    def loss(q, z, v):
        return soft_attention(q[None], z[None], v[None], normalize=True).square().sum()

    together = torch.func.vmap(torch.func.grad(loss))(q, z, v)
    for sample in range(2):
        alone = torch.func.grad(loss)(q[sample], z[sample], v[sample])
        torch.testing.assert_close(together[sample], alone)


def test_the_residual_of_a_layers_own_kernel_is_available():
    z = 0.3 * inputs(1, 30)[1]
    residual = soft_residual(z, iterations=8)
    A = torch.exp(-0.25 / 2 * torch.cdist(z, z).square())
    torch.testing.assert_close(residual, newton_inverse(A, iterations=8).residual, rtol=1e-6, atol=1e-9)
    assert residual.shape == (2, 2)


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf"), "1"])
def test_bad_scales_are_named(scale):
    q, z, v = inputs(30, 12)
    with pytest.raises(ValueError, match="scale must be"):
        soft_attention(q, z, v, normalize=True, scale=scale)


@pytest.mark.parametrize("inverse", [{"inverse": "pinv"}, {"inverse": "newton", "iterations": 60}])
def test_landmark_of_several_cells_counts_as_often_as_it_would_stand_there(inverse):
    """Four equal landmarks in a row are one that stands for four."""
    q, v = torch.randn(2, 2, 30, 8, dtype=torch.double), torch.randn(2, 2, 30, 8, dtype=torch.double)
    landmarks = 2 * torch.randn(2, 2, 3, 8, dtype=torch.double)
    options = {"normalize": True, **inverse}
    repeated = soft_attention(q, landmarks.repeat_interleave(4, dim=2), v, **options)
    counted = soft_attention(q, landmarks, v, cells=torch.tensor([4.0]), **options)
    torch.testing.assert_close(counted, repeated, rtol=1e-8, atol=1e-10)
    explicit = soft_weights(q, landmarks, cells=torch.tensor([4.0, 4.0]), **options) @ v
    torch.testing.assert_close(explicit, repeated, rtol=1e-8, atol=1e-10)


def test_cells_of_another_batch_are_refused():
    q = torch.randn(2, 1, 4, 8)
    with pytest.raises(ValueError, match=r"cells must have shape \[2\] or \[1\], got \(3,\)"):
        soft_attention(q, q, q, normalize=True, cells=torch.ones(3))


def use_blocks(monkeypatch, block_numbers, kept_numbers=0):
    monkeypatch.setattr(soft_linear, "CPU_BLOCK_NUMBERS", block_numbers)
    monkeypatch.setattr(soft_linear, "KEPT_NUMBERS", kept_numbers)


def test_blocks_under_vmap(monkeypatch):
    """Each operand may be the only one that is batched."""
    q, z, v = inputs(20, 6)
    expected = soft_attention(q, z, v, normalize=True)
    use_blocks(monkeypatch, 2 * 6 * 7)
    for place in range(3):
        batched = [x[None].repeat(3, 1, 1, 1, 1) if place == other else x for other, x in enumerate((q, z, v))]
        axes = tuple(0 if place == other else None for other in range(3))
        with torch.no_grad():
            many = torch.vmap(lambda *x: soft_attention(*x, normalize=True), axes)(*batched)
        torch.testing.assert_close(many, expected[None].expand_as(many), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kept_numbers", [0, 2**23], ids=["computed twice", "kept"])
@pytest.mark.parametrize(
    ("block_numbers", "masked"), [(1, True), (2 * 6 * 7, False), (2 * 6 * 7, True), (2 * 6 * 20, False)]
)
def test_parts_of_samples_and_tokens_give_what_all_give(monkeypatch, kept_numbers, block_numbers, masked):
    """One token at a time, seven, or one whole sample: values, gradients of everything, and what masks hide."""
    q, z, v = inputs(20, 6)
    options = {"normalize": True}
    if masked:
        options |= {"key_mask": prefix_mask([20, 11], 20), "landmark_mask": prefix_mask([6, 4], 6)}
    at_once = value_and_gradients(lambda *x: soft_attention(*x, **options), q, z, v)
    use_blocks(monkeypatch, block_numbers, kept_numbers)
    in_chunks = value_and_gradients(lambda *x: soft_attention(*x, **options), q, z, v)
    with torch.no_grad():
        in_chunks.append(soft_attention(q, z, v, **options))
    for chunked, expected in zip(in_chunks, [*at_once, at_once[0]], strict=True):
        torch.testing.assert_close(chunked, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("block_numbers", [2**23, 3 * 2], ids=["one block", "blocks of 3 tokens"])
def test_gradients_of_gradients(monkeypatch, block_numbers):
    use_blocks(monkeypatch, block_numbers)
    q, z, v = (x[:1, :1, :, :2].clone().requires_grad_() for x in inputs(4, 2))

    def attend(q, z, v):
        return soft_attention(q, z, v, normalize=True, inverse="cholesky", ridge=0.1)

    assert torch.autograd.gradcheck(attend, (q, z, v))
    assert torch.autograd.gradgradcheck(attend, (q, z, v))


def test_training_keeps_nothing_for_every_pair_of_token_and_landmark():
    """O(N D), not O(N m): only the inputs and matrices of landmarks are saved for the backward pass."""
    tokens, landmarks = 500, 40
    q, z, v = (x.float().requires_grad_() for x in inputs(tokens, landmarks))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        soft_attention(q, z, v, normalize=True)
    large = {x.data_ptr() for x in saved if tokens in x.shape}
    assert large == {q.data_ptr(), v.data_ptr()}


@pytest.mark.parametrize(("spread", "normalize"), [(0.5, True), (0.5, False), (0.7, True), (1.0, False)])
def test_the_direct_solve_equals_newton_where_newton_converges(spread, normalize):
    """To 1e-5 in float32, at condition numbers to about 100."""
    generator = torch.Generator().manual_seed(0)
    q, z, v = (spread * torch.randn(2, 4, n, 32, generator=generator) for n in (196, 49, 196))
    A = gaussian_kernel(z.double(), z.double(), scale=32**-0.5)
    assert torch.linalg.cond(A).max() < 120
    options = {"normalize": normalize, "ridge": 1e-5}
    newton, direct, eigen = (
        soft_attention(q, z, v, inverse=inverse, **options) for inverse in ("newton", "cholesky", "pinv")
    )
    size = newton.abs().max().item()
    torch.testing.assert_close(direct, newton, rtol=0, atol=1e-5 * size)
    torch.testing.assert_close(eigen, newton, rtol=0, atol=1e-5 * size)


def test_a_gradient_that_overflows_is_not_finite():
    """Loss scaling looks for it: only results saturate in float16."""
    q, z, v = (x.half().requires_grad_() for x in inputs(20, 6))
    out = soft_attention(q, z, v, normalize=False)
    gradients = torch.autograd.grad(out, (q, v), torch.full_like(out, 6e4))
    assert not all(gradient.isfinite().all() for gradient in gradients)


def release_start(kernels: Tensor, normalize: bool) -> Tensor:
    """The releases' alpha of each matrix [B, H, m, m], as their code finds it for each sample by itself."""
    starts = torch.empty((*kernels.shape[:2], 1, 1), dtype=kernels.dtype)
    for sample, heads in enumerate(kernels):
        if not normalize:
            starts[sample, :, 0, 0] = 0.9 * 2 / heads.sum(-1).amax(-1) ** 2
            continue
        alpha = 2 / heads.sum(-1).max() ** 2
        identity = torch.eye(heads.shape[-1], dtype=heads.dtype)
        for _ in range(10):
            if (identity - heads @ (alpha * heads)).abs().sum(-2).max() <= 1.01:
                break
            alpha = alpha / 2
        starts[sample] = alpha
    return starts


@pytest.mark.parametrize(("normalize", "ridge"), [(False, 0.01), (True, 0.0)])
def test_the_start_of_the_releases(normalize, ridge):
    """Heads of different spreads in one sample: SOFT++ gives them one start, SOFT one each."""
    q, v = torch.randn(2, 3, 40, 8, dtype=torch.float64), torch.randn(2, 3, 40, 8, dtype=torch.float64)
    z = q[:, :, ::3] * torch.tensor([0.2, 0.6, 1.5], dtype=torch.float64)[:, None, None]
    A, P = (gaussian_kernel(x, z, scale=8**-0.5) for x in (z, q))
    ridged = A + ridge * torch.eye(A.shape[-1], dtype=A.dtype)
    X = release_start(A, normalize) * ridged
    for _ in range(20):
        X = 2 * X - X @ ridged @ X
    if normalize:
        root = A.sum(-1, keepdim=True).rsqrt()
        X = root * X * root.mT
    actual = soft_attention(q, z, v, normalize=normalize, start="release", ridge=ridge)
    torch.testing.assert_close(actual, P @ X @ P.mT @ v, rtol=1e-8, atol=1e-8)
    alone = soft_attention(q[1:], z[1:], v[1:], normalize=normalize, start="release", ridge=ridge)
    torch.testing.assert_close(actual[1:], alone, rtol=1e-12, atol=1e-12)
    steps = soft_residuals(z, normalize=normalize, start="release", ridge=ridge, iterations=20)
    assert steps.shape == (21, 2, 3)
    norm = torch.linalg.matrix_norm(ridged, 2)
    first = torch.linalg.matrix_norm(ridged @ (release_start(A, normalize) * ridged) @ ridged - ridged, 2) / norm
    torch.testing.assert_close(steps[0], first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"inverse": "pinv", "gradient": "autograd"},
            r'gradient=\'autograd\' needs inverse="newton" .* got inverse=\'pinv\'',
        ),
        ({"inverse": "pinv", "iterations": 3}, 'iterations=3 needs inverse="newton" .* got inverse=.pinv'),
        ({"inverse": "pinv", "start": "release"}, "start='release' needs inverse="),
        ({"cells": torch.ones(1)}, "cells count in the degrees of SOFT.. alone"),
        ({"gradient": "two_step"}, "gradient must be one of autograd, one_step; got 'two_step'"),
        ({"start": "released"}, "start must be one of halving, norm, release; got 'released'; did you mean 'release'"),
        ({"start": "release", "ridge": 0.1}, 'start="release" is chosen before the ridge .* got ridge=0.1'),
    ],
)
def test_starts_and_gradients_that_do_not_fit_are_refused(options, message):
    q = torch.randn(1, 1, 6, 4)
    with pytest.raises(ValueError, match=message):
        soft_attention(q, q[:, :, :2], q, normalize=False, **options)
