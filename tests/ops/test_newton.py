import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from softline.ops import newton_inverse
from softline.ops.newton import newton_alpha

relaxed = settings(deadline=None, max_examples=40)


def gram(landmarks: int, spread: float, seed: int, batch: tuple[int, ...] = ()) -> Tensor:
    """Gaussian kernel matrices [..., m, m] of random landmarks of 32 channels, in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = spread * torch.randn(*batch, landmarks, 32, dtype=torch.float64, generator=generator)
    difference = x[..., :, None, :] - x[..., None, :, :]
    return torch.exp(-(32**-0.5) / 2 * difference.square().sum(-1))


def closed_form(A: Tensor, alpha: Tensor, iterations: int) -> Tensor:
    """sum_i (1 - (1 - alpha l_i^2)^(2^T)) / l_i u_i u_i^T."""
    eigenvalues, vectors = torch.linalg.eigh(A)
    remaining = (1 - alpha[..., 0] * eigenvalues.square()).abs()
    # |.|^(2^T) as T squarings: the exponent itself is even
    for _ in range(iterations):
        remaining = remaining.square()
    return (vectors * ((1 - remaining) / eigenvalues).unsqueeze(-2)) @ vectors.mT


def on_the_edge(A: Tensor) -> bool:
    """Nearly constant column sums: their maximum is nearly an eigenvalue."""
    return bool((A @ A).sum(0).max() > 0.99 * A.sum(0).max() ** 2)


@relaxed
@given(
    landmarks=st.integers(1, 49),
    spread=st.floats(0.3, 2.0),
    iterations=st.integers(1, 25),
    start=st.sampled_from(["norm", "halving"]),
    seed=st.integers(0, 2**16),
)
def test_newton_equals_its_closed_form(landmarks, spread, iterations, start, seed):
    A = gram(landmarks, spread, seed, batch=(2,))
    expected = closed_form(A, newton_alpha(A, start), iterations)
    actual = newton_inverse(A, iterations=iterations, start=start).inverse
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


@relaxed
@given(landmarks=st.integers(2, 49), spread=st.floats(0.3, 2.0), seed=st.integers(0, 2**16))
def test_the_start_is_the_papers_alpha_for_ordinary_matrices(landmarks, spread, seed):
    A = gram(landmarks, spread, seed)
    paper = 2 / A.sum(0).max().item() ** 2
    assert newton_alpha(A, "norm").item() == pytest.approx(paper / 2 if on_the_edge(A) else paper, rel=1e-12)


@relaxed
@given(landmarks=st.integers(1, 49), spread=st.floats(0.05, 2.0), seed=st.integers(0, 2**16))
def test_halving_takes_the_largest_alpha_that_meets_the_bound(landmarks, spread, seed):
    A = gram(landmarks, spread, seed)
    alpha = (1 if on_the_edge(A) else 2) / A.sum(0).max() ** 2
    identity = torch.eye(landmarks, dtype=A.dtype)
    for _ in range(10):
        if torch.linalg.matrix_norm(identity - alpha * A @ A, ord=1) <= 1.01:
            break
        alpha = alpha / 2
    assert newton_alpha(A, "halving").item() == pytest.approx(alpha.item(), rel=1e-12)


@relaxed
@given(landmarks=st.integers(1, 49), spread=st.floats(0.7, 2.0), seed=st.integers(0, 2**16))
def test_one_step_gradient_equals_autograd_through_the_inverse_when_well_conditioned(landmarks, spread, seed):
    A = gram(landmarks, spread, seed)
    cotangent = torch.randn(A.shape, dtype=A.dtype, generator=torch.Generator().manual_seed(seed))
    newton, exact = A.clone().requires_grad_(), A.clone().requires_grad_()
    (newton_inverse(newton).inverse * cotangent).sum().backward()
    (torch.linalg.inv(exact) * cotangent).sum().backward()
    assert newton.grad is not None
    torch.testing.assert_close(newton.grad, exact.grad, rtol=1e-6, atol=1e-6 * float(exact.grad.abs().max()))


@pytest.mark.parametrize(
    ("spread", "iterations", "expected"), [(0.3, 10, 1.1e-2), (0.3, 20, 1.1e-4), (0.6, 10, 9.4e-3), (1.0, 10, 0.0)]
)
def test_residual_falls_as_measured_on_gaussian_grams(spread, iterations, expected):
    """The residuals of 49 x 49 grams at several spreads, in the spectral norm that the paper's Fig. 5 plots."""
    A = gram(49, spread, seed=0, batch=(8,))
    X = newton_inverse(A, iterations=iterations).inverse
    spectral = torch.linalg.matrix_norm(A @ X @ A - A, ord=2) / torch.linalg.matrix_norm(A, ord=2)
    assert spectral.mean().item() == pytest.approx(expected, rel=1.0, abs=1e-12)


def test_the_residual_is_relative_and_one_for_each_matrix():
    A = gram(20, 0.4, seed=1, batch=(2, 3))
    result = newton_inverse(A, iterations=8)
    expected = (A @ result.inverse @ A - A).flatten(-2).norm(dim=-1) / A.flatten(-2).norm(dim=-1)
    assert result.residual.shape == (2, 3)
    torch.testing.assert_close(result.residual, expected)


@pytest.mark.parametrize("start", ["norm", "halving"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_landmarks_far_apart_give_the_identity(start, dtype):
    """The identity sits on the edge of convergence of the paper's alpha."""
    for landmarks in (1, 2, 49):
        identity = torch.eye(landmarks, dtype=dtype)
        torch.testing.assert_close(newton_inverse(identity, start=start).inverse, identity)


@pytest.mark.parametrize("start", ["norm", "halving"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identical_landmarks_give_the_pseudo_inverse(start, dtype):
    """A matrix of ones is on that edge too, and singular."""
    for landmarks in (1, 2, 49):
        ones = torch.ones(landmarks, landmarks, dtype=dtype, requires_grad=True)
        result = newton_inverse(ones, start=start)
        torch.testing.assert_close(result.inverse, torch.full_like(ones, 1 / landmarks**2), rtol=1e-3, atol=1e-6)
        assert result.residual < 1e-5
        result.inverse.sum().backward()
        assert ones.grad is not None
        assert ones.grad.isfinite().all()


@pytest.mark.parametrize("size", [0.0, 1e-25, 1e25])
def test_any_size_of_numbers_is_inverted(size):
    result = newton_inverse(size * torch.eye(3))
    expected = torch.eye(3) / size if size else torch.zeros(3, 3)
    torch.testing.assert_close(result.inverse, expected)
    assert result.residual == 0


def test_a_matrix_does_not_feel_its_neighbours_in_the_batch():
    mild, harsh = gram(49, 1.0, seed=0), gram(49, 0.05, seed=1)
    together = newton_inverse(torch.stack([mild, harsh])).inverse
    torch.testing.assert_close(together[0], newton_inverse(mild).inverse, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(together[1], newton_inverse(harsh).inverse, rtol=1e-9, atol=1e-11)


def test_half_precision_is_inverted_in_float32():
    A = gram(49, 0.6, seed=0)
    with torch.autocast("cpu", torch.bfloat16):
        result = newton_inverse(A.bfloat16())
    assert result.inverse.dtype == torch.float32
    torch.testing.assert_close(result.inverse, newton_inverse(A.bfloat16().float()).inverse)


def test_bad_input_is_named():
    with pytest.raises(
        ValueError, match=r"square matrices \[..., m, m\] of floating-point numbers, got torch.float32 \(3, 4\)"
    ):
        newton_inverse(torch.ones(3, 4))
    with pytest.raises(ValueError, match="iterations must be at least 1, got 0"):
        newton_inverse(torch.eye(3), iterations=0)
    with pytest.raises(ValueError, match="start must be one of halving, norm; got 'nrm'; did you mean 'norm'"):
        newton_inverse(torch.eye(3), start="nrm")


@pytest.mark.parametrize("start", ["norm", "halving"])
def test_autograd_differentiates_the_iterations_and_the_start(start):
    """An ill-conditioned matrix, where 20 steps do not converge and the gradient is not that of Eq. 12."""
    A = gram(20, 0.15, seed=2)
    cotangent = torch.randn(A.shape, dtype=A.dtype, generator=torch.Generator().manual_seed(3))
    ours, naive = A.clone().requires_grad_(), A.clone().requires_grad_()
    result = newton_inverse(ours, start=start, gradient="autograd").inverse
    X = newton_alpha(naive, start) * naive
    for _ in range(20):
        X = 2 * X - X @ naive @ X
    torch.testing.assert_close(result, X, rtol=1e-8, atol=1e-8)
    (expected,) = torch.autograd.grad((X * cotangent).sum(), naive)
    (actual,) = torch.autograd.grad((result * cotangent).sum(), ours)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))
    one_step = A.clone().requires_grad_()
    (paper,) = torch.autograd.grad((newton_inverse(one_step, start=start).inverse * cotangent).sum(), one_step)
    assert (paper - expected).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize("alpha", [1e-3, 0.4, 1.99, 2.0])
@pytest.mark.parametrize("iterations", [1, 4, 20])
def test_a_single_landmark_is_inverted_by_the_same_steps(alpha, iterations):
    A = torch.tensor([1.0, 0.3, 0.0], dtype=torch.float64).reshape(3, 1, 1).requires_grad_()
    X = alpha * A
    for _ in range(iterations):
        X = 2 * X - X * A * X
    start = torch.full((1, 1, 1), alpha, dtype=A.dtype)
    actual = newton_inverse(A, iterations=iterations, start=start, gradient="autograd").inverse
    torch.testing.assert_close(actual, X, rtol=1e-12, atol=1e-12)
    (expected,) = torch.autograd.grad(X[:2].sum(), A)
    (gradient,) = torch.autograd.grad(actual[:2].sum(), A)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("landmarks", [2, 3, 4])
@pytest.mark.parametrize("spread", [0.0, 0.02, 0.3, 2.0])
@pytest.mark.parametrize("start", ["norm", "halving"])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_small_matrices_are_inverted_by_the_same_steps(landmarks, spread, start, iterations):
    options = {"iterations": iterations, "start": start}

    def steps(A: Tensor) -> Tensor:
        # they are differentiated, so they are computed
        return newton_inverse(A.clone().requires_grad_(), gradient="autograd", **options).inverse.detach()

    A = gram(landmarks, spread, 0, batch=(5,))
    exact = steps(A)
    torch.testing.assert_close(newton_inverse(A, **options).inverse, exact, rtol=1e-9, atol=1e-9)
    single = newton_inverse(A.float(), **options).inverse
    error, reference = ((found.double() - exact).abs().max() for found in (single, steps(A.float())))
    assert single.dtype == torch.float32
    assert error <= 2 * (reference + torch.finfo(torch.float32).eps * exact.abs().max())


def test_a_small_matrix_that_is_no_number_has_no_inverse_and_leaves_others_alone():
    A = gram(4, 1.0, 0, batch=(3,))
    whole = newton_inverse(A).inverse
    for wrong in (torch.nan, torch.inf):
        broken = A.clone()
        broken[1, 2, 3] = broken[1, 3, 2] = wrong
        inverse = newton_inverse(broken).inverse
        assert inverse[1].isnan().all()
        assert torch.equal(inverse[[0, 2]], whole[[0, 2]])


@pytest.mark.parametrize("landmarks", [1, 4])
def test_thousands_of_steps_change_nothing_more(landmarks):
    A = gram(landmarks, 1.0, 0)
    assert torch.equal(newton_inverse(A, iterations=5000).inverse, newton_inverse(A, iterations=1000).inverse)


def test_the_start_may_be_a_number():
    A = gram(20, 0.4, seed=1, batch=(2, 3))
    alpha = torch.tensor(0.01, dtype=A.dtype).reshape(1, 1, 1, 1)
    expected = closed_form(A, alpha, 12)
    torch.testing.assert_close(newton_inverse(A, iterations=12, start=alpha).inverse, expected, rtol=1e-7, atol=1e-7)
    with pytest.raises(ValueError, match=r"start must be .* broadcasts to \(2, 3, 1, 1\), got \(3,\)"):
        newton_inverse(A, start=alpha.new_ones(3))
