"""Eager execution without gradients: work in place, and on a few tokens at a time.

A compiled, exported or traced graph serves every number of tokens, and its compiler fuses the steps itself: there all
tokens are one chunk and nothing is written in place.
"""

import torch
from torch import Tensor


def is_traced() -> bool:
    """Whether the operations become a graph rather than being executed one by one."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def may_overwrite() -> bool:
    """Whether intermediate results may be computed in place: no gradient needs them, no compiler removes them."""
    return not torch.is_grad_enabled() and not is_traced()


def add_to(fresh: Tensor, other: Tensor) -> Tensor:
    """fresh + other; ``fresh`` must be the caller's own, just computed, as its memory may take the sum."""
    return fresh.add_(other) if may_overwrite() else fresh + other


def multiply_by(fresh: Tensor, other: Tensor | float) -> Tensor:
    """fresh * other; ``fresh`` must be the caller's own, just computed, as its memory may take the product."""
    return fresh.mul_(other) if may_overwrite() else fresh * other


def token_chunks(tokens: int, size: int) -> list[slice]:
    """Slices that cut ``tokens`` into chunks of ``size``; at least one."""
    if is_traced():
        return [slice(None)]
    return [slice(first, min(first + size, tokens)) for first in range(0, max(tokens, 1), size)]
