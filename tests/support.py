"""What several test files need."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def assert_within_budget(actual: Tensor, reference: Tensor, exact: Tensor, what: str = "value") -> None:
    """``actual`` is as close to ``exact`` (float64) as rounding allows: at most twice as far as ``reference``.

    ``reference`` is the definition evaluated in the precision of ``actual``.
    """
    assert exact.dtype == torch.float64
    assert actual.dtype == reference.dtype
    assert actual.shape == exact.shape
    eps = torch.finfo(actual.dtype).eps
    error = (actual.double() - exact).abs().max().item()
    reference_error = (reference.double() - exact).abs().max().item()
    budget = 2 * (reference_error + eps * exact.abs().max().item())
    assert error <= budget, f"{what}: error {error:.3g} exceeds the budget {budget:.3g}"


def value_and_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The output of ``function`` and the gradients of a fixed projection of it with respect to the inputs."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    out = function(*inputs)
    direction = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).sin().reshape(out.shape).to(out.dtype)
    gradients = torch.autograd.grad((out * direction).sum(), inputs, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True))]


def assert_fast_matches_definition(
    fast: Callable[..., Tensor], definition: Callable[..., Tensor], *inputs: Tensor, names: Iterable[str] = ()
) -> None:
    """Values and gradients of ``fast`` in float32 stay within the rounding budget of ``definition``."""
    single = [x.float() for x in inputs]
    # the exact result is that of the rounded inputs
    double = [x.double() for x in single]
    whats = ["value", *(f"gradient of {name}" for name in (names or map(str, range(len(inputs)))))]
    for what, actual, reference, exact in zip(
        whats,
        value_and_gradients(fast, *single),
        value_and_gradients(definition, *single),
        value_and_gradients(definition, *double),
        strict=True,
    ):
        assert_within_budget(actual, reference, exact, what)


def prefix_mask(lengths: list[int], tokens: int) -> Tensor:
    """True for the first tokens of each sample: [B, N]."""
    return torch.arange(tokens) < torch.tensor(lengths)[:, None]
