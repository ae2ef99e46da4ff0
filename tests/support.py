"""What several test files need."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import timm
import torch
from torch import Tensor, nn


def assert_within_budget(actual: Sequence[Tensor], reference: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """The value and gradients of ``actual`` are as close to ``exact`` (float64) as rounding allows.

    error <= 2 * (reference_error + eps * size), where ``reference`` is the definition in the precision of ``actual``
    and size the largest number of the exact tensor. One that is tiny beside the others is a sum of numbers that cancel:
    its size is theirs, the largest of all the exact tensors.
    """
    largest = max(tensor.abs().max().item() for tensor in exact)
    for index, (a, r, e) in enumerate(zip(actual, reference, exact, strict=True)):
        assert e.dtype == torch.float64
        assert a.dtype == r.dtype
        assert a.shape == e.shape
        error = (a.double() - e).abs().max().item()
        reference_error = (r.double() - e).abs().max().item()
        size = e.abs().max().item()
        size = size if size > 1e-2 * largest else largest
        budget = 2 * (reference_error + torch.finfo(a.dtype).eps * size)
        what = f"gradient {index - 1}" if index else "value"
        assert error <= budget, f"{what}: error {error:.3g} exceeds the budget {budget:.3g}"


def value_and_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The output of ``function`` and the gradients of a fixed projection of it with respect to the inputs."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    out = function(*inputs)
    direction = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).sin().reshape(out.shape).to(out.dtype)
    gradients = torch.autograd.grad((out * direction).sum(), inputs, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True))]


def assert_fast_matches_definition(
    fast: Callable[..., Tensor], definition: Callable[..., Tensor], *inputs: Tensor
) -> None:
    """Value and gradients of ``fast`` in float32 stay within the rounding budget of ``definition``."""
    single = [x.float() for x in inputs]
    # the exact result is that of the rounded inputs
    double = [x.double() for x in single]
    assert_within_budget(
        value_and_gradients(fast, *single),
        value_and_gradients(definition, *single),
        value_and_gradients(definition, *double),
    )


def prefix_mask(lengths: list[int], tokens: int) -> Tensor:
    """True for the first tokens of each sample: [B, N]."""
    return torch.arange(tokens) < torch.tensor(lengths)[:, None]


def qkv(tokens: int = 35, heads: int = 2, dim: int = 8, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys and values of two samples [2, H, N, D]."""
    return [torch.randn(2, heads, tokens, dim, dtype=dtype) for _ in range(3)]


def fake_release(name: str, path: Path) -> nn.Module:
    """A checkpoint as InLine's authors would store this model, and the model."""
    model = timm.create_model(name).eval()
    state = {}
    for key, value in model.state_dict().items():
        key = re.sub(r"^stages\.(\d+)\.blocks\.0\.", r"blocks.\1.", key)
        key = key.replace("stages.0.embed.", "patch_embed.").replace("stages.0.position.weight", "pos_embed")
        key = key.replace("stages.0.cls_token", "cls_token")
        state[key.replace("local.hidden", "residual.0").replace("local.kernel", "residual.2")] = value
    torch.save({"model": state}, path)
    return model
