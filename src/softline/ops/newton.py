"""Newton-Raphson pseudo-inverse of symmetric positive semi-definite matrices: Algorithm 2 of SOFT.

A_0 = alpha A, A_k = 2 A_{k-1} - A_{k-1} A A_{k-1}. After T steps an eigenvalue l of A has become
(1 - (1 - alpha l^2)^(2^T)) / l: directions with alpha l^2 2^T << 1 are suppressed instead of amplified.

Deviations from the paper:
- alpha is chosen per matrix, so that no sample depends on the others in its batch.
- alpha = 2 / ||A||_1^2 is on the edge of convergence if ||A||_1 is itself an eigenvalue (a single landmark, identical
  ones, or distant ones): there 1 - alpha l^2 = -1 and the iteration collapses to 0. Such matrices start at half of it.
- "halving" stops at 1.01 and after 10 halvings, as the released code does: the paper's bound of 1 cannot always be met.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from softline.checks import check_integer, check_option
from softline.errors import UserError
from softline.ops.inputs import divide, widen, without_autocast

NewtonStart = Literal["norm", "halving"]

HALVING_BOUND = 1.01
MAX_HALVINGS = 10
# the iteration converges if alpha l_max^2 < 2, and ||A^2||_1 >= l_max^2 is an upper bound
EDGE = 0.99


class NewtonResult(NamedTuple):
    inverse: Tensor
    """[..., m, m]"""
    residual: Tensor
    """||A X A - A|| / ||A|| in the Frobenius norm, one value per matrix [...]."""


@without_autocast
def newton_inverse(A: Tensor, *, iterations: int = 20, start: NewtonStart = "norm") -> NewtonResult:
    """Pseudo-inverse of each symmetric positive semi-definite matrix in A [..., m, m], and its residual.

    iterations: Newton steps T; each doubles the number of correct digits once the iteration converges. About 20 are
        useful in float32: many more amplify the rounding error of a nearly singular A.
    start: "norm" is alpha = 2 / ||A||_1^2; "halving" halves it until ||I - alpha A^2||_1 <= 1.01.

    The gradient is that of a matrix inverse, evaluated at the last iterate (Eq. 12): nothing is backpropagated through
    the iterations. Half-precision inputs are inverted in float32.
    """
    check_newton(iterations, start)
    if A.ndim < 2 or A.shape[-1] != A.shape[-2] or A.shape[-1] == 0 or not A.is_floating_point():
        raise UserError(
            f"A must be a batch of square matrices [..., m, m] of floating-point numbers, "
            f"got {A.dtype} {tuple(A.shape)}"
        )
    matrix = widen(A)
    inverse = newton_iterate(matrix, iterations, start)
    difference = matrix @ inverse @ matrix - matrix
    residual = divide(torch.linalg.matrix_norm(difference), torch.linalg.matrix_norm(matrix))
    return NewtonResult(inverse, residual)


def check_newton(iterations: int, start: str) -> None:
    check_integer("iterations", iterations, 1)
    check_option("start", start, get_args(NewtonStart))


def newton_iterate(A: Tensor, iterations: int, start: NewtonStart) -> Tensor:
    """The iterate A_T [..., m, m] with the one-step gradient of Eq. 12; A is float32 or float64."""
    inverse: Tensor = _OneStepInverse.apply(A, iterations, start)
    return inverse


class _OneStepInverse(torch.autograd.Function):
    """Newton forward; backward dL/dA = -Y^T (dL/dY) Y^T with Y the iterate (Eq. 12)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(A: Tensor, iterations: int, start: NewtonStart) -> Tensor:
        # scaled to ||A||_1 = 1, which only changes the range of the numbers
        norm = _one_norm(A)
        inverse, negative = _begin(A / norm, start)
        for _ in range(iterations):
            inverse = _step(inverse, negative)
        return inverse.reshape(A.shape) / norm

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        (inverse,) = ctx.saved_tensors
        return -inverse.mT @ grad @ inverse.mT, None, None


def _begin(A: Tensor, start: NewtonStart) -> tuple[Tensor, Tensor]:
    """A_0 and -A, with all batch dimensions of A [..., m, m] flattened to one: [B, m, m]."""
    inverse = newton_alpha(A, start) * A
    return inverse.reshape(-1, *A.shape[-2:]), -A.reshape(-1, *A.shape[-2:])


def _step(inverse: Tensor, negative: Tensor) -> Tensor:
    """A_k = 2 A_{k-1} - A_{k-1} A A_{k-1}."""
    return torch.baddbmm(inverse, inverse, torch.bmm(negative, inverse), beta=2)


@without_autocast
def newton_residuals(A: Tensor, *, iterations: int = 35, start: NewtonStart = "norm") -> Tensor:
    """||A A_k A - A||_2 / ||A||_2 after k = 0, 1, ... steps [iterations + 1, ...]: Fig. 5 of SOFT.

    The steps are those of `newton_inverse`, in the precision of A (float32 for half precision); the residuals are
    computed in float64. They are infinite once the iterate has overflowed, as it may after a hundred steps.
    """
    check_newton(iterations, start)
    scaled = widen(A) / _one_norm(widen(A))
    inverse, negative = _begin(scaled, start)
    exact, residuals = -negative.double(), []
    norm = _symmetric_norm(exact)
    for step in range(iterations + 1):
        inverse = _step(inverse, negative) if step else inverse
        residuals.append(divide(_symmetric_norm(exact @ inverse.double() @ exact - exact), norm))
    return torch.stack(residuals).reshape(-1, *A.shape[:-2])


def _symmetric_norm(A: Tensor) -> Tensor:
    """||A||_2 of matrices that are symmetric up to rounding [..., m, m] -> [...]; infinite for non-finite ones."""
    broken = ~A.isfinite().all(-1).all(-1)
    whole = ((A + A.mT) / 2).masked_fill(broken[..., None, None], 0)
    return torch.linalg.eigvalsh(whole).abs().amax(-1).masked_fill(broken, torch.inf)


def _one_norm(A: Tensor) -> Tensor:
    """||A||_1 [..., 1, 1]; 1 for a zero matrix."""
    norm = A.abs().sum(-2).amax(-1)[..., None, None]
    return norm.masked_fill(norm == 0, 1)


def newton_alpha(A: Tensor, start: NewtonStart) -> Tensor:
    """The initial factor alpha [..., 1, 1] of each matrix in A [..., m, m]."""
    norm = _one_norm(A)
    square = A @ A
    column_sums = square.abs().sum(-2, keepdim=True)  # [..., 1, m]
    on_the_edge = column_sums.amax(-1, keepdim=True) > EDGE * norm.square()
    alpha = torch.where(on_the_edge, 1, 2) / norm.square()
    if start == "norm":
        return alpha
    # ||I - a A^2||_1 for all candidates a at once: with C = A^2, column j sums to |1 - a c_jj| + a sum_{i != j} |c_ij|
    diagonal = square.diagonal(dim1=-2, dim2=-1)[..., None, :]
    halvings = torch.arange(MAX_HALVINGS + 1, device=A.device, dtype=A.dtype)[:, None]
    candidates = alpha * 0.5**halvings  # [..., 11, 1]
    columns = (1 - candidates * diagonal).abs() + candidates * (column_sums - diagonal.abs())  # [..., 11, m]
    attained = columns.amax(-1, keepdim=True) <= HALVING_BOUND
    # the first candidate that attains the bound, which is the largest as they decrease; the last one if none does
    return torch.where(attained, candidates, candidates[..., -1:, :]).amax(-2, keepdim=True)
