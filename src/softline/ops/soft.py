"""SOFT and SOFT++ attention: Softmax-free Linear Transformers (https://arxiv.org/abs/2207.03341).

Keys are queries. With m landmark tokens l_1..l_m and the Gaussian kernel of Eq. 5,
    P = kernel(l, q) [m, N],  A = kernel(l, l) [m, m],
    SOFT    S = P^T A^+ P                        (Eq. 7-9),
    SOFT++  S = P^T D^-1/2 A^+ D^-1/2 P          (Eq. 17), D = diag(A 1),
applied to the values as P^T (A^+ (P v)): O(N m) time, nothing of size N x N.

Deviations from the paper: `ridge` inverts A + ridge I (the release uses 0.01 for SOFT and 0 for SOFT++); `cells` lets
one landmark represent several. Newton's start is chosen for each matrix; ``start="release"`` is that of the released
code, which its weights are trained with.
"""

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from softline.checks import check_at_least, check_number, check_option
from softline.errors import UserError
from softline.ops.gaussian import centre_of, gaussian_kernel, hide_pairs, power_of_two
from softline.ops.inputs import Impl, check_alike, check_mask, check_tensor, finish, narrow, prepare, without_autocast
from softline.ops.newton import (
    NewtonGradient,
    NewtonStart,
    check_newton,
    halve,
    newton_inverse,
    newton_iterate,
    newton_residuals,
    one_norm,
)
from softline.ops.soft_linear import SoftSums, soft_linear

Inverse = Literal["newton", "cholesky", "pinv"]
SoftStart = Literal["norm", "halving", "release"]
# eigenvalues below this many float epsilons times the largest count as 0
PINV_CUTOFF = 64
ITERATIONS = 20
# the release's SOFT starts a little below the paper's 2 / ||A||_1^2, which leaves room for a small ridge:
# the iteration converges if 0.9 (1 + ridge / ||A||_1)^2 < 1, and ||A||_1 >= 1
RELEASE_MARGIN = 0.9
RELEASE_MOST_RIDGE = 0.05


class Inversion(NamedTuple):
    """How A is inverted; `soft_attention` documents the options."""

    normalize: bool
    inverse: Inverse
    iterations: int
    start: SoftStart
    gradient: NewtonGradient
    ridge: float
    cells: Tensor | None = None


@without_autocast
def soft_weights(
    q: Tensor,
    landmarks: Tensor,
    *,
    normalize: bool,
    scale: float | None = None,
    inverse: Inverse = "newton",
    iterations: int = ITERATIONS,
    start: SoftStart = "norm",
    gradient: NewtonGradient = "one_step",
    ridge: float = 0.0,
    key_mask: Tensor | None = None,
    landmark_mask: Tensor | None = None,
    cells: Tensor | None = None,
) -> Tensor:
    """The definition: S [B, H, N, N] of queries q [B, H, N, D] and landmarks [B, H, m, D]."""
    inversion = Inversion(normalize, inverse, iterations, start, gradient, ridge, cells)
    _check(q, landmarks, inversion, key_mask, landmark_mask)
    P, A = _kernels(q, landmarks, scale, key_mask, landmark_mask)
    return narrow(P.mT @ _pseudo_inverse(A, inversion) @ P, q.dtype)


@without_autocast
def soft_factors(
    q: Tensor,
    landmarks: Tensor,
    *,
    normalize: bool,
    scale: float | None = None,
    inverse: Inverse = "newton",
    iterations: int = ITERATIONS,
    start: SoftStart = "norm",
    gradient: NewtonGradient = "one_step",
    ridge: float = 0.0,
    key_mask: Tensor | None = None,
    landmark_mask: Tensor | None = None,
    cells: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """S as three factors [B, H, N, m], [B, H, m, m], [B, H, m, N], in float32 for half-precision inputs."""
    inversion = Inversion(normalize, inverse, iterations, start, gradient, ridge, cells)
    _check(q, landmarks, inversion, key_mask, landmark_mask)
    P, A = _kernels(q, landmarks, scale, key_mask, landmark_mask)
    return P.mT, _pseudo_inverse(A, inversion), P


@without_autocast
def soft_attention(
    q: Tensor,
    landmarks: Tensor,
    v: Tensor,
    *,
    normalize: bool,
    scale: float | None = None,
    inverse: Inverse = "newton",
    iterations: int = ITERATIONS,
    start: SoftStart = "norm",
    gradient: NewtonGradient = "one_step",
    ridge: float = 0.0,
    key_mask: Tensor | None = None,
    landmark_mask: Tensor | None = None,
    cells: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """SOFT (``normalize=False``) or SOFT++ (``True``) attention, linear in the number of tokens.

    q: queries, which are also the keys [B, H, N, D].
    landmarks: [B, H, m, D].
    v: values [B, H, N, Dv].
    scale: both kernels are exp(-scale/2 * squared distance); defaults to D^-0.5.
    inverse: how A is inverted. "newton": Algorithm 2; "cholesky": direct solve, needs
        ridge > 0, takes a quarter of Newton's time; "pinv": eigendecomposition that drops eigenvalues below 64 epsilons
        times the largest. Where 20 Newton steps converge (condition numbers up to about 100), all three agree to 1e-5.
        Trained kernels can be worse: on photographs, released weights give logits that differ by 0.1 to 0.5 % with a
        direct inverse.
    iterations, gradient: Newton steps and their gradient, see `newton_inverse`; the direct inverses have their own
        gradient.
    start: factor of Newton's start. "norm" and "halving": see `newton_inverse`. "release": that of the released code,
        which is part of its trained models where 20 steps do not converge. For SOFT it is 0.9 * 2 / ||A||_1^2 of A
        before the ridge; for SOFT++ the heads of a sample have one factor: 2 / ||A||_1^2 of the largest norm, halved
        until ||I - alpha A^2||_1 <= 1.01 for all heads. (The release takes one for the whole batch, so that a sample
        depends on the others in it.) For a single landmark the release's SOFT++ collapses to 0, and so does this.
    ridge: A + ridge I is inverted.
    key_mask, landmark_mask: bool [B, N] and [B, m], True = real.
    cells: number of the paper's landmarks that each landmark averages [B] or [1]; D counts it that many times, so that
        SOFT++ weights tokens equally whether or not the landmarks of a large image are merged. Defaults to 1.
    impl: "linear" is P^T (A^+ (P v)); "explicit" computes the N x N weights; "auto" is "linear".

    Half-precision inputs are computed in float32, including the inverse.
    """
    inversion = Inversion(normalize, inverse, iterations, start, gradient, ridge, cells)
    _check(q, landmarks, inversion, key_mask, landmark_mask, v)
    check_option("impl", impl, get_args(Impl))
    if impl == "explicit":
        P, A = _kernels(q, landmarks, scale, key_mask, landmark_mask)
        S = P.mT @ _pseudo_inverse(A, inversion) @ P
        return finish(S @ prepare(v, key_mask), v.dtype, key_mask)
    scale = _scale(q, scale)
    landmarks, middle, centre = _middle(landmarks, scale, inversion, landmark_mask)
    return soft_linear(q, landmarks, v, middle, centre, scale, key_mask)


@without_autocast
def soft_sums(
    landmarks: Tensor,
    *,
    normalize: bool,
    scale: float | None = None,
    inverse: Inverse = "newton",
    iterations: int = ITERATIONS,
    start: SoftStart = "norm",
    gradient: NewtonGradient = "one_step",
    ridge: float = 0.0,
    cells: Tensor | None = None,
) -> SoftSums:
    """`soft_attention` for queries and values that come in parts, without gradients; see it for the arguments."""
    inversion = Inversion(normalize, inverse, iterations, start, gradient, ridge, cells)
    check_tensor("landmarks", landmarks)
    check_inverse(inversion)
    scale = _scale(landmarks, scale)
    return SoftSums(*_middle(landmarks, scale, inversion, None), scale)


def _middle(
    landmarks: Tensor, scale: float, inversion: Inversion, landmark_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Landmarks in the precision of the kernel, the pseudo-inverse of A, and the point that distances start from."""
    landmarks = prepare(landmarks, landmark_mask)
    A = _landmark_kernel(landmarks, scale, landmark_mask)
    # masked landmarks count for nothing because of these rows and columns, whatever is in their rows of P
    middle = hide_pairs(_pseudo_inverse(A, inversion), landmark_mask, landmark_mask)
    return landmarks, middle, centre_of(landmarks, landmark_mask)


@without_autocast
def soft_residual(
    landmarks: Tensor,
    *,
    normalize: bool = False,
    scale: float | None = None,
    iterations: int = ITERATIONS,
    start: SoftStart = "norm",
    ridge: float = 0.0,
    landmark_mask: Tensor | None = None,
) -> Tensor:
    """Residual of Newton's inverse X of the kernel A of landmarks [B, H, m, D]: ||A X A - A|| / ||A|| [B, H]."""
    options = Inversion(normalize, "newton", iterations, start, "one_step", ridge)
    A, alpha = _newton_problem(landmarks, scale, landmark_mask, options)
    return newton_inverse(A, iterations=iterations, start=alpha).residual


@without_autocast
def soft_residuals(
    landmarks: Tensor,
    *,
    normalize: bool = False,
    scale: float | None = None,
    iterations: int = 35,
    start: SoftStart = "norm",
    ridge: float = 0.0,
    landmark_mask: Tensor | None = None,
) -> Tensor:
    """Residuals after each Newton step [iterations + 1, B, H], see `newton_residuals`."""
    options = Inversion(normalize, "newton", iterations, start, "one_step", ridge)
    A, alpha = _newton_problem(landmarks, scale, landmark_mask, options)
    return newton_residuals(A, iterations=iterations, start=alpha)


def _newton_problem(
    landmarks: Tensor, scale: float | None, landmark_mask: Tensor | None, options: Inversion
) -> tuple[Tensor, NewtonStart | Tensor]:
    """The matrix that Newton's method inverts [B, H, m, m], with its ridge, and its start."""
    check_inverse(options)
    A = soft_kernel(landmarks, scale=scale, landmark_mask=landmark_mask)
    return _add_ridge(A, options.ridge), soft_start(A, options.normalize, options.start)


@without_autocast
def soft_kernel(
    landmarks: Tensor, *, scale: float | None = None, ridge: float = 0.0, landmark_mask: Tensor | None = None
) -> Tensor:
    """The matrix that SOFT inverts: A + ridge I [B, H, m, m] of landmarks [B, H, m, D]; float32 for half precision."""
    check_tensor("landmarks", landmarks)
    check_mask("landmark_mask", landmark_mask, landmarks.shape[0], landmarks.shape[2], landmarks.device)
    check_number("ridge", ridge, 0)
    A = _landmark_kernel(prepare(landmarks, landmark_mask), _scale(landmarks, scale), landmark_mask)
    return _add_ridge(A, ridge)


def _kernels(
    q: Tensor, landmarks: Tensor, scale: float | None, key_mask: Tensor | None, landmark_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """P [B, H, m, N] and A [B, H, m, m]; masked tokens are zero columns of P, masked landmarks identity rows of A."""
    scale = _scale(q, scale)
    q, landmarks = prepare(q, key_mask), prepare(landmarks, landmark_mask)
    P = gaussian_kernel(q, landmarks, scale=scale, mask=landmark_mask).mT
    return hide_pairs(P, landmark_mask, key_mask), _landmark_kernel(landmarks, scale, landmark_mask)


def _scale(q: Tensor, scale: float | None) -> float:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    check_number("scale", scale, 0)
    return scale


def _landmark_kernel(landmarks: Tensor, scale: float, landmark_mask: Tensor | None) -> Tensor:
    """A [B, H, m, m]."""
    # distances in float64 where available: rounding errors must not make this small matrix indefinite
    exact = landmarks if landmarks.device.type == "mps" else landmarks.double()
    centred = exact - exact.mean(-2, keepdim=True).detach()
    # l_i . l_j - |l_i|^2 / 2 - |l_j|^2 / 2, which is exactly 0 on the diagonal
    products = centred @ centred.mT
    halves = 0.5 * products.diagonal(dim1=-2, dim2=-1)
    exponents = scale * math.log2(math.e) * (products - halves[..., None] - halves[..., None, :])
    A = power_of_two(exponents.to(landmarks.dtype))
    if landmark_mask is None:
        return A
    diagonal = torch.eye(A.shape[-1], dtype=torch.bool, device=A.device)
    return hide_pairs(A, landmark_mask, landmark_mask).masked_fill(diagonal, 1)


def _pseudo_inverse(A: Tensor, options: Inversion) -> Tensor:
    """A^+ for SOFT, D^-1/2 A^+ D^-1/2 for SOFT++: [B, H, m, m]."""
    ridged = _add_ridge(A, options.ridge)
    if options.inverse == "newton":
        start = soft_start(A, options.normalize, options.start)
        inverted = newton_iterate(ridged, options.iterations, start, options.gradient)
    elif options.inverse == "pinv":
        # the cut-off does not depend on m, which counts masked landmarks too
        inverted = torch.linalg.pinv(ridged, rtol=PINV_CUTOFF * torch.finfo(A.dtype).eps, hermitian=True)
    else:
        inverted = torch.cholesky_inverse(torch.linalg.cholesky(ridged))
    if not options.normalize:
        return inverted
    root = _degree(A, options.cells).rsqrt()
    return root * inverted * root.mT


def soft_start(A: Tensor, normalize: bool, start: SoftStart) -> NewtonStart | Tensor:
    """Newton's start for kernels A [B, H, m, m] without their ridge: as `newton_inverse` takes it."""
    check_option("start", start, get_args(SoftStart))
    if start != "release":
        return start
    if not normalize:
        return RELEASE_MARGIN * 2 / one_norm(A).square()
    # one factor for the heads of a sample [B, 1, 1, 1]
    alpha = 2 / one_norm(A).amax(1, keepdim=True).square()
    return halve(alpha, A, axes=(1, 3))


def _add_ridge(A: Tensor, ridge: float) -> Tensor:
    return A if ridge == 0 else A + ridge * torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)


def _degree(A: Tensor, cells: Tensor | None) -> Tensor:
    """Diagonal of D [B, H, m, 1]: row sums of A, which count each landmark once per cell; at least 1."""
    degree = A.sum(-1, keepdim=True)
    return degree if cells is None else degree * cells.to(A.dtype)[:, None, None, None]


def _check(
    q: Tensor,
    landmarks: Tensor,
    options: Inversion,
    key_mask: Tensor | None,
    landmark_mask: Tensor | None,
    v: Tensor | None = None,
) -> None:
    check_alike(q, landmarks=landmarks, v=v, key_mask=key_mask)
    check_mask("landmark_mask", landmark_mask, q.shape[0], landmarks.shape[2], q.device)
    check_at_least("the number of landmarks", landmarks.shape[2], 1)
    check_inverse(options)
    cells = options.cells
    if cells is not None and (cells.ndim != 1 or cells.shape[0] not in (1, q.shape[0])):
        raise UserError(f"cells must have shape [{q.shape[0]}] or [1], got {tuple(cells.shape)}")


def check_inverse(options: Inversion) -> None:
    """Check the options of the inversion of A; those of Newton's method need its inverse."""
    check_option("inverse", options.inverse, get_args(Inverse))
    check_option("start", options.start, get_args(SoftStart))
    check_newton(options.iterations, "norm", options.gradient)
    check_number("ridge", options.ridge, 0)
    if options.inverse == "cholesky" and options.ridge == 0:
        raise UserError(f'inverse="cholesky" needs ridge > 0 (A may be singular), got ridge={options.ridge}')
    most = 0 if options.normalize else RELEASE_MOST_RIDGE
    if options.inverse == "newton" and options.start == "release" and options.ridge > most:
        raise UserError(
            f'start="release" is chosen before the ridge is added and needs ridge <= {most} for '
            f"{'SOFT++' if options.normalize else 'SOFT'} to converge, got ridge={options.ridge}; "
            'start="norm" takes any ridge'
        )
    of_newton = {"iterations": ITERATIONS, "start": "norm", "gradient": "one_step"}
    for option, default in of_newton.items():
        value = getattr(options, option)
        if options.inverse != "newton" and value != default:
            raise UserError(
                f'{option}={value!r} needs inverse="newton" (a direct inverse has no iterations), '
                f"got inverse={options.inverse!r}"
            )
    if options.cells is not None and not options.normalize:
        raise UserError("cells count in the degrees of SOFT++ alone, got them with normalize=False")
