"""What is done to each token on its own: in evaluation, a few tokens at a time."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softline.ops.chunks import is_traced, may_overwrite, token_chunks
from softline.ops.inputs import widen

# hidden numbers at once: on a CPU they stay in its cache; elsewhere few and large kernels are better
CPU_NUMBERS = 2**19
OTHER_NUMBERS = 2**26
# fewer rows would make slow matrix products
LEAST_ROWS = 1024

# gelu(x) = x sigmoid(GELU_SLOPE (x + GELU_CUBIC x^3)) is the form with tanh, as tanh(u) = 2 sigmoid(2 u) - 1
GELU_SLOPE = 2 * (2 / torch.pi) ** 0.5
GELU_CUBIC = 0.044715


def for_each_token(function: Callable[..., Tensor], *tokens: Tensor, width: int, training: bool) -> Tensor:
    """``function(*tokens)`` for tokens [B, N, C] that it treats each on its own.

    Where no gradient is wanted it is called with some of them at a time, so that hidden layers of ``width`` numbers
    for each token take no memory worth mentioning.
    """
    if training or not may_overwrite():
        return function(*tokens)
    shape = tokens[0].shape
    rows = [each.flatten(0, 1) for each in tokens]
    numbers = CPU_NUMBERS if rows[0].device.type == "cpu" else OTHER_NUMBERS
    chunks = token_chunks(rows[0].shape[0], max(numbers // width, LEAST_ROWS))
    first = function(*(each[chunks[0]] for each in rows))
    if len(chunks) == 1:
        return first.unflatten(0, shape[:2])
    out = first.new_empty(rows[0].shape[0], first.shape[-1])
    out[chunks[0]] = first
    for chunk in chunks[1:]:
        out[chunk] = function(*(each[chunk] for each in rows))
    return out.unflatten(0, shape[:2])


class TanhGELU(nn.Module):
    """The tanh approximation of GELU, through the exponential where torch's own kernel is slower: in graphs, and on a
    CPU without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        if is_traced():
            wide = widen(x)
            gate = torch.sigmoid(GELU_SLOPE * (wide + GELU_CUBIC * wide * wide * wide))
            return (wide * gate).to(x.dtype)
        if x.dtype != torch.float32 or x.device.type != "cpu" or not may_overwrite():
            return F.gelu(x, approximate="tanh")
        cubic = torch.addcmul(x, x.square(), x, value=GELU_CUBIC)
        return cubic.mul_(GELU_SLOPE).sigmoid_().mul_(x)
