"""Functions applied to each token independently; evaluation runs them on a few tokens at a time."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softline.ops.chunks import is_exported, is_traced, may_overwrite, token_chunks
from softline.ops.inputs import widen

# hidden activations computed at once: they fit the cache of a CPU; other devices run fastest with few and large kernels
CPU_NUMBERS = 2**19
OTHER_NUMBERS = 2**26
# matrix products with fewer rows are slow
LEAST_ROWS = 1024

# x sigmoid(GELU_SLOPE (x + GELU_CUBIC x^3)) equals the tanh form of GELU, since tanh(u) = 2 sigmoid(2 u) - 1
GELU_SLOPE = 2 * (2 / torch.pi) ** 0.5
GELU_CUBIC = 0.044715


def for_each_token(
    module: nn.Module, function: Callable[..., Tensor], *tokens: Tensor, width: int, out: Tensor | None = None
) -> Tensor:
    """Return ``function(*tokens)`` for tokens [B, N, C]; it is a step of ``module`` that treats tokens independently.

    In evaluation without gradients it is called with some samples, or some tokens of one sample, at a time, so that
    hidden layers with ``width`` activations per token need little memory. If a submodule is in training mode or has a
    hook, all tokens are passed at once.

    out: one of ``tokens`` that nothing else needs, of the result's shape: it is overwritten by a result of its dtype.
    """
    if not may_overwrite() or not runs_in_parts(module):
        return function(*tokens)
    parts = _parts(tokens[0], width)
    if len(parts) == 1:
        return function(*tokens)
    for part in parts:
        result = function(*(each[part] for each in tokens))
        if out is None or out.dtype != result.dtype:
            out = result.new_empty(*tokens[0].shape[:2], result.shape[-1])
        out[part] = result
    assert out is not None, "there are several parts"
    return out


def runs_in_parts(module: nn.Module) -> bool:
    """Whether a module may be called with some of its tokens at a time: it is in evaluation, and has no hooks."""
    # torch has no public way to ask for a module's hooks
    return not any(part.training or part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def _parts(tokens: Tensor, width: int) -> list[tuple[slice, slice]]:
    """Slices of samples and tokens [B, N, C] to process together: whole samples if one is small enough."""
    batch, count = tokens.shape[:2]
    numbers = CPU_NUMBERS if tokens.device.type == "cpu" else OTHER_NUMBERS
    rows = max(numbers // width, LEAST_ROWS)
    samples = token_chunks(batch, max(rows // max(count, 1), 1))
    return [(sample, chunk) for sample in samples for chunk in token_chunks(count, max(rows, 1))]


class TanhGELU(nn.Module):
    """The tanh approximation of GELU.

    It is computed as a sigmoid where torch's own kernel is slower: in compiled graphs, and on a CPU without gradients.
    """

    def forward(self, x: Tensor) -> Tensor:
        if is_traced() and not is_exported():
            wide = widen(x)
            gate = torch.sigmoid(GELU_SLOPE * (wide + GELU_CUBIC * wide * wide * wide))
            return (wide * gate).to(x.dtype)
        if x.dtype != torch.float32 or x.device.type != "cpu" or not may_overwrite():
            return F.gelu(x, approximate="tanh")
        cubic = torch.addcmul(x, x.square(), x, value=GELU_CUBIC)
        return cubic.mul_(GELU_SLOPE).sigmoid_().mul_(x)
