"""In-place and chunked computation, for eager execution without gradients, and how to tell how a function is executed.

A compiled, exported or traced graph serves any number of tokens: there all tokens form one chunk and nothing is
computed in place. A compiler fuses the steps of a graph; the runtimes of exported graphs, such as ONNX Runtime, execute
them one by one, so that fewer and larger steps are faster there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from softline.errors import UserError

_ONNX_STEPS: ContextVar[bool] = ContextVar("only steps that ONNX has", default=False)


def is_traced() -> bool:
    """Whether operations are being recorded in a graph instead of executed one by one."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def is_exported() -> bool:
    """Whether torch.export records a graph that another runtime will execute, step by step and in any size."""
    # torch.compile of 2.10 answers yes to the second question
    return not torch.compiler.is_dynamo_compiling() and torch.compiler.is_exporting()


def of_any_size(side: object) -> bool:
    """Whether an exported graph has to serve any length of this side."""
    return is_exported() and isinstance(side, torch.SymInt)


def check_one_size(name: str, tokens: object) -> None:
    """Refuse an exported graph for any number of tokens, for operators that cannot be recorded as one."""
    if of_any_size(tokens):
        raise UserError(
            f"{name} attention can only be exported for a fixed number of tokens: fix the size of the images (--size) "
            "or the length of the sequences (--length)"
        )


@contextmanager
def onnx_steps(wanted: bool) -> Iterator[None]:
    """Record graphs in the steps that ONNX has, where torch has others."""
    token = _ONNX_STEPS.set(wanted)
    try:
        yield
    finally:
        _ONNX_STEPS.reset(token)


def needs_onnx_steps() -> bool:
    # torch.compile cannot trace the variable in all versions
    return is_exported() and _ONNX_STEPS.get()


def may_overwrite() -> bool:
    """Whether intermediate results may be overwritten: no gradient needs them, and no compiler optimises them away."""
    return not torch.is_grad_enabled() and not is_traced()


def add_to(fresh: Tensor, other: Tensor) -> Tensor:
    """fresh + other; ``fresh`` may be overwritten, so nothing else may use it."""
    # under autocast the sum may have a wider dtype
    if may_overwrite() and fresh.dtype == torch.result_type(fresh, other):
        return fresh.add_(other)
    return fresh + other


def multiply_by(fresh: Tensor, other: Tensor | float) -> Tensor:
    """fresh * other; ``fresh`` may be overwritten, so nothing else may use it."""
    return fresh.mul_(other) if may_overwrite() else fresh * other


def token_chunks(tokens: int, size: int) -> list[slice]:
    """Slices that cut ``tokens`` into chunks of ``size``; always at least one slice."""
    if is_traced():
        return [slice(None)]
    return [slice(first, min(first + size, tokens)) for first in range(0, max(tokens, 1), size)]
