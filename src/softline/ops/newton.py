"""Newton-Raphson pseudo-inverse of symmetric positive semi-definite matrices: Algorithm 2 of SOFT.

A_0 = alpha A, A_k = 2 A_{k-1} - A_{k-1} A A_{k-1}. After T steps an eigenvalue l of A has become
(1 - (1 - alpha l^2)^(2^T)) / l: directions with alpha l^2 2^T << 1 are suppressed instead of amplified.

Deviations from the paper:
- alpha is chosen per matrix, so that no sample depends on the others in its batch.
- alpha = 2 / ||A||_1^2 is on the edge of convergence if ||A||_1 is itself an eigenvalue (a single landmark, identical
  ones, or distant ones): there 1 - alpha l^2 = -1 and the iteration collapses to 0. Such matrices start at half of it.
- "halving" stops at 1.01 and after 10 halvings, as the released code does: the paper's bound of 1 cannot always be met.
- ``gradient="autograd"`` differentiates the iteration instead of using Eq. 12, as the release's SOFT++ does.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from softline.checks import check_integer, check_option
from softline.errors import UserError
from softline.ops.chunks import is_exported, may_overwrite, of_any_size
from softline.ops.inputs import divide, widen, without_autocast

NewtonStart = Literal["norm", "halving"]
NewtonGradient = Literal["one_step", "autograd"]

HALVING_BOUND = 1.01
MAX_HALVINGS = 10
# the iteration converges if alpha l_max^2 < 2, and ||A^2||_1 >= l_max^2 is an upper bound
EDGE = 0.99
# rows of the largest matrices whose eigenvalues a CPU finds sooner than it takes 20 steps
MOST_CLOSED = 4
MOST_DOUBLINGS = 1000


class NewtonResult(NamedTuple):
    inverse: Tensor
    """[..., m, m]"""
    residual: Tensor
    """||A X A - A|| / ||A|| in the Frobenius norm, one value per matrix [...]."""


@without_autocast
def newton_inverse(
    A: Tensor,
    *,
    iterations: int = 20,
    start: NewtonStart | Tensor = "norm",
    gradient: NewtonGradient = "one_step",
) -> NewtonResult:
    """Pseudo-inverse of each symmetric positive semi-definite matrix in A [..., m, m], and its residual.

    iterations: Newton steps T; each doubles the number of correct digits once the iteration converges. About 20 are
        useful in float32: many more amplify the rounding error of a nearly singular A.
    start: "norm" is alpha = 2 / ||A||_1^2; "halving" halves it until ||I - alpha A^2||_1 <= 1.01; a tensor is alpha
        itself, of a shape that broadcasts to [..., 1, 1].
    gradient: "one_step" is the gradient of a matrix inverse, evaluated at the last iterate (Eq. 12); "autograd"
        backpropagates through alpha and all iterations, and keeps all iterates in memory for it.

    Half-precision inputs are inverted in float32.
    """
    check_newton(iterations, start, gradient)
    if A.ndim < 2 or A.shape[-1] != A.shape[-2] or A.shape[-1] == 0 or not A.is_floating_point():
        raise UserError(
            f"A must be a batch of square matrices [..., m, m] of floating-point numbers, "
            f"got {A.dtype} {tuple(A.shape)}"
        )
    if isinstance(start, Tensor):
        _check_alpha(start, A)
    matrix = widen(A)
    inverse = newton_iterate(matrix, iterations, start, gradient)
    difference = matrix @ inverse @ matrix - matrix
    residual = divide(torch.linalg.matrix_norm(difference), torch.linalg.matrix_norm(matrix))
    return NewtonResult(inverse, residual)


def _check_alpha(alpha: Tensor, A: Tensor) -> None:
    wanted = (*A.shape[:-2], 1, 1)
    sizes = zip(reversed(alpha.shape), reversed(wanted), strict=False)
    if alpha.ndim > A.ndim or not all(size in (1, least) for size, least in sizes):
        raise UserError(f"start must be a name or a tensor that broadcasts to {wanted}, got {tuple(alpha.shape)}")


def check_newton(iterations: int, start: str | Tensor, gradient: str = "one_step") -> None:
    check_integer("iterations", iterations, 1)
    if not isinstance(start, Tensor):
        check_option("start", start, get_args(NewtonStart))
    check_option("gradient", gradient, get_args(NewtonGradient))


def newton_iterate(
    A: Tensor, iterations: int, start: NewtonStart | Tensor, gradient: NewtonGradient = "one_step"
) -> Tensor:
    """The iterate A_T [..., m, m]; A is float32 or float64."""
    if gradient == "autograd" or not torch.is_grad_enabled():
        return _iterate(A, iterations, start)
    inverse: Tensor = _OneStepInverse.apply(A, iterations, start)
    return inverse


def _iterate(A: Tensor, iterations: int, start: NewtonStart | Tensor) -> Tensor:
    scaled, alpha, norm = _begin(A, start)
    rows = A.shape[-1]
    if not of_any_size(rows) and (rows == 1 or (rows <= MOST_CLOSED and _finds_eigenvalues(A))):
        return _closed_form(scaled, alpha, iterations) / norm
    inverse, negative = _flattened(alpha * scaled), _flattened(-scaled)
    if is_exported():
        # A_{k-1} (2 I - A A_{k-1}), in three steps of a graph
        twice = 2 * torch.eye(rows, dtype=A.dtype, device=A.device)
        for _ in range(iterations):
            inverse = torch.bmm(inverse, twice + torch.bmm(negative, inverse))
    else:
        for _ in range(iterations):
            inverse = _step(inverse, negative)
    return inverse.reshape(A.shape) / norm


def _finds_eigenvalues(A: Tensor) -> bool:
    # their gradient is infinite where two are equal; tensors on the meta device stand for those of a CPU
    return may_overwrite() and A.device.type in ("cpu", "meta")


def _closed_form(A: Tensor, alpha: Tensor, iterations: int) -> Tensor:
    """The iterate A_T [..., m, m] of small matrices by their eigenvalues: (1 - (1 - alpha l^2)^(2^T)) / l."""
    # 2^1024 is no number, and nothing changes after so many steps
    iterations = min(iterations, MOST_DOUBLINGS)
    if A.shape[-1] == 1:
        remainder = (1 - alpha * A.square()) ** 2.0**iterations
        return divide(1 - remainder, A)
    # eigh refuses what is not a number
    broken = ~A.sum((-2, -1), keepdim=True).isfinite()
    values, vectors = torch.linalg.eigh(A.masked_fill(broken, 0).double())
    # (1 - s)^(2^T) = (1 - s (2 - s))^(2^(T - 1)), which is exact for small s, and s may exceed 1
    s = alpha[..., 0] * values.square()
    inverted = divide(-torch.expm1(2.0 ** (iterations - 1) * torch.log1p(-s * (2 - s))), values)
    return ((vectors * inverted[..., None, :]) @ vectors.mT).to(A.dtype).masked_fill(broken, torch.nan)


class _OneStepInverse(torch.autograd.Function):
    """Newton forward; backward dL/dA = -Y^T (dL/dY) Y^T with Y the iterate (Eq. 12)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(A: Tensor, iterations: int, start: NewtonStart | Tensor) -> Tensor:
        return _iterate(A, iterations, start)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        (inverse,) = ctx.saved_tensors
        return -inverse.mT @ grad @ inverse.mT, None, None


def _begin(A: Tensor, start: NewtonStart | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A / ||A||_1 [..., m, m], alpha for it, and ||A||_1, both [..., 1, 1]."""
    # the scale only changes the range of the numbers
    norm = one_norm(A)
    scaled = A / norm
    alpha = start.to(A.dtype) * norm.square() if isinstance(start, Tensor) else _alpha_of_unit(scaled, start)
    return scaled, alpha, norm


def _flattened(A: Tensor) -> Tensor:
    """Matrices [..., m, m] with one batch dimension [B, m, m]."""
    return A.reshape(-1, *A.shape[-2:])


def _step(inverse: Tensor, negative: Tensor) -> Tensor:
    """A_k = 2 A_{k-1} - A_{k-1} A A_{k-1}."""
    return torch.baddbmm(inverse, inverse, torch.bmm(negative, inverse), beta=2)


@without_autocast
def newton_residuals(A: Tensor, *, iterations: int = 35, start: NewtonStart | Tensor = "norm") -> Tensor:
    """||A A_k A - A||_2 / ||A||_2 after k = 0, 1, ... steps [iterations + 1, ...]: Fig. 5 of SOFT.

    The steps are those of `newton_inverse`, in the precision of A (float32 for half precision); the residuals are
    computed in float64. They are infinite once the iterate has overflowed, as it may after a hundred steps.
    """
    check_newton(iterations, start)
    scaled, alpha, _ = _begin(widen(A), start)
    exact, residuals = scaled.double(), []
    size = _symmetric_norm(exact)
    inverse, negative = _flattened(alpha * scaled), _flattened(-scaled)
    for step in range(iterations + 1):
        inverse = _step(inverse, negative) if step else inverse
        whole = inverse.reshape(A.shape).double()
        residuals.append(divide(_symmetric_norm(exact @ whole @ exact - exact), size))
    return torch.stack(residuals)


def _symmetric_norm(A: Tensor) -> Tensor:
    """||A||_2 of matrices that are symmetric up to rounding [..., m, m] -> [...]; infinite for non-finite ones."""
    broken = ~A.isfinite().all(-1).all(-1)
    whole = ((A + A.mT) / 2).masked_fill(broken[..., None, None], 0)
    return torch.linalg.eigvalsh(whole).abs().amax(-1).masked_fill(broken, torch.inf)


def one_norm(A: Tensor) -> Tensor:
    """||A||_1 [..., 1, 1]; 1 for a zero matrix."""
    norm = A.abs().sum(-2).amax(-1)[..., None, None]
    return norm.masked_fill(norm == 0, 1)


def newton_alpha(A: Tensor, start: NewtonStart) -> Tensor:
    """The initial factor alpha [..., 1, 1] of each matrix in A [..., m, m]."""
    norm = one_norm(A)
    return _alpha_of_unit(A / norm, start) / norm.square()


def _alpha_of_unit(A: Tensor, start: NewtonStart) -> Tensor:
    """`newton_alpha` of matrices with ||A||_1 = 1."""
    on_the_edge = (A @ A).abs().sum(-2, keepdim=True).amax(-1, keepdim=True) > EDGE
    alpha = 2 - on_the_edge.to(A.dtype)
    return alpha if start == "norm" else halve(alpha, A)


def halve(alpha: Tensor, A: Tensor, axes: tuple[int, ...] = (-1,)) -> Tensor:
    """Halve alpha [..., 1, 1] until ||I - alpha A^2||_1 <= 1.01, at most 10 times.

    axes: axes of the column sums [..., 1, m] whose maximum is compared with the bound; with the axis of the heads too,
        the largest norm of all heads counts.
    """
    # with C = A^2, column j of I - a C sums to |1 - a c_jj| + a sum_{i != j} |c_ij|, for all candidates a at once
    square = A @ A
    diagonal = square.diagonal(dim1=-2, dim2=-1)[..., None, :]
    others = square.abs().sum(-2, keepdim=True) - diagonal.abs()  # [..., 1, m]
    halvings = torch.arange(MAX_HALVINGS + 1, device=A.device, dtype=A.dtype)[:, None]
    candidates = alpha * 0.5**halvings  # [..., 11, 1]
    columns = (1 - candidates * diagonal).abs() + candidates * others  # [..., 11, m]
    attained = columns.amax(axes, keepdim=True) <= HALVING_BOUND
    # the first candidate that attains the bound, which is the largest as they decrease; the last one if none does
    return torch.where(attained, candidates, candidates[..., -1:, :]).amax(-2, keepdim=True)
