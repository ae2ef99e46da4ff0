"""Find the first module or gradient that is not finite."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from softline.errors import UserError


class NonFiniteError(UserError):
    """Training stopped because a loss, a gradient or a weight is not finite.

    reason: what is not finite, and where.
    step: the step that failed.
    note: further text for the message.
    """

    def __init__(self, reason: str, step: int, note: str = "") -> None:
        # all arguments, so that the error can be pickled and sent to another process
        super().__init__(reason, step, note)
        self.reason, self.step, self.note = reason, step, note

    def __str__(self) -> str:
        return f"{self.reason} at step {self.step}{self.note}"


def first_nonfinite(model: nn.Module, run: Callable[[], object]) -> str | None:
    """Return name and type of the first module whose output is not finite while ``run`` executes the model."""
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            if not found and not all(tensor.isfinite().all() for tensor in _tensors(output)):
                found.append(f"{name or 'the model'} ({type(module).__name__})")

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        # a compiled model would not call the hooks
        with torch.compiler.set_stance("force_eager"):
            run()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def first_nonfinite_gradient(model: nn.Module) -> str | None:
    """Return the name of the first parameter whose gradient is not finite."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return name
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
