"""Attention modules by name.

A factory takes ``(dim, num_heads, *, num_prefix_tokens=0, **options)`` and returns a module that implements
`Attention`. Other packages register their factories in the entry-point group ``softline.attention``.
"""

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from softline.checks import check_integer, check_option
from softline.errors import UserError
from softline.layers.grid import GridSize
from softline.registry import Registry


class Attention(Protocol):
    """Interface of every attention module; x is [B, N, C] with N = num_prefix_tokens + H*W, key_mask is bool [B, N].

    Masked tokens have no influence on the others, and their rows of the result are zero. A module that also has the
    attribute ``override`` of `MultiHeadAttention` can be changed by the contexts of `softline.attention.hooks`.
    """

    def __call__(self, x: Tensor, grid_size: GridSize, key_mask: Tensor | None = None) -> Tensor:
        """Attend: [B, N, C] -> [B, N, C]."""
        ...

    def weights(self, x: Tensor, grid_size: GridSize, key_mask: Tensor | None = None) -> Tensor:
        """Explicit weights [B, heads, N, N], without local convolutions."""
        ...

    def mix(self, weights: Tensor, x: Tensor, grid_size: GridSize, key_mask: Tensor | None = None) -> Tensor:
        """The output for given weights: ``mix(weights(x, ...), x, ...)`` equals the module's output, at N^2 cost.

        With random landmarks this holds in evaluation mode only.
        """
        ...


Factory = Callable[..., nn.Module]


ATTENTIONS: Registry[Factory] = Registry("attention", group="softline.attention")


def create_attention(name: str, dim: int, num_heads: int, *, num_prefix_tokens: int = 0, **options: Any) -> nn.Module:
    """Build the attention ``name`` for tokens of ``dim`` channels; see `Attention` for its interface.

    num_prefix_tokens: tokens before the grid (such as a class token); spatial operations leave them out.
    options: keyword arguments of the attention, documented at its factory in `softline.attention`.
    """
    check_option("attention", name, ATTENTIONS)
    for key, value in (("dim", dim), ("num_heads", num_heads), ("num_prefix_tokens", num_prefix_tokens)):
        check_integer(key, value, 0)
    if num_heads < 1 or dim < 1 or dim % num_heads:
        raise UserError(f"dim ({dim}) must be divisible by num_heads ({num_heads}), both at least 1")
    known = option_names(name)
    if known is not None:
        for option in options:
            check_option(f"an option of {name!r}", option, known)
    return ATTENTIONS[name](dim, num_heads, num_prefix_tokens=num_prefix_tokens, **options)


def option_names(name: str) -> list[str] | None:
    """Names of the options that an attention takes; None if it accepts any."""
    parameters = inspect.signature(ATTENTIONS[name]).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    keywords = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    return [keyword for keyword in keywords if keyword != "num_prefix_tokens"]
