"""Look into and change the attention of a model while it runs.

The context managers take a model, one attention module, or several modules, and leave them as they were, even if an
exception ends the block. They nest: where several contexts replace the attention of one module, the innermost counts.

    import timm, torch
    from softline.attention import record_attention, replace_weights, without_attention

    model = timm.create_model("softpp_micro").eval()
    images = torch.randn(1, 3, 32, 32)

    with torch.no_grad():
        with record_attention(model) as calls:
            model(images)
        first = calls[0].weights()  # [1, heads, N, N] of the first block

        # no token sees itself
        with replace_weights(model, lambda weights, call: weights - weights.diagonal(dim1=-2, dim2=-1).diag_embed()):
            changed = model(images)

        with without_attention(model):
            ablated = model(images)

Call `record_attention` on the model itself rather than on what `torch.compile` made of it, which does not notice hooks
that come later. The other contexts make a compiled model compile again.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from softline.attention.multihead import RowReader, apply_weights
from softline.errors import UserError
from softline.layers.grid import GridSize
from softline.layers.landmarks import lift_cap

Attentions: TypeAlias = nn.Module | Iterable[nn.Module]
"""A model or an attention module, or several of them."""


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What an attention module was given in one forward pass."""

    module: nn.Module
    x: Tensor
    """Tokens [B, N, C]; [B * windows, N, C] inside windows."""
    grid_size: GridSize
    mask: Tensor | None = None
    """Key mask [B, N], True = real token; inside Swin's softmax windows a mask of pairs [windows, N, N]."""

    def weights(self) -> Tensor:
        """Explicit weights [B, heads, N, N]."""
        return self._ask("weights")

    def rows(self) -> RowReader:
        """A function that reads single rows of the weights: token indices [R] -> [B, heads, R, N]."""
        if hasattr(self.module, "rows"):
            return self._ask("rows")
        # an attention of another package only promises all of them
        weights = self.weights()
        return lambda tokens: weights.index_select(-2, tokens)

    def factors(self) -> tuple[Tensor, ...]:
        """Low-rank matrices whose product is the weights; a `UserError` where there are none."""
        return self._ask("factors")

    def operands(self) -> dict[str, Any]:
        """The operator's arguments except for the values; see `MultiHeadAttention.operands`."""
        return self._ask("operands")

    def _ask(self, method: str) -> Any:
        if not hasattr(self.module, method):
            raise UserError(f"{type(self.module).__name__} has no {method}()")
        # not every module takes a mask
        mask = () if self.mask is None else (self.mask,)
        return getattr(self.module, method)(self.x, self.grid_size, *mask)


def find_attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The attention modules of a model by name, in order: those with a method ``weights``, and none inside another."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") or not outer for outer in found)
        if callable(getattr(module, "weights", None)) and not inside:
            found[name] = module
    return found


@contextmanager
def record_attention(attentions: Attentions) -> Iterator[list[AttentionCall]]:
    """Record what attention modules are given.

    The list that the block receives grows by an `AttentionCall` whenever one of the modules runs. The calls keep their
    tensors alive.
    """
    calls: list[AttentionCall] = []

    def record(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        given = {**dict(zip(("x", "grid_size", "key_mask"), arguments, strict=False)), **options}
        calls.append(AttentionCall(module, given["x"], given["grid_size"], given.get("key_mask")))

    with ExitStack() as stack:
        for module in _attention_modules(attentions):
            stack.callback(module.register_forward_pre_hook(record, with_kwargs=True).remove)
        yield calls


@contextmanager
def replace_attended(attentions: Attentions, function: Callable[[Tensor, AttentionCall], Tensor]) -> Iterator[None]:
    """Compute the attended values by ``function(values, call)`` instead of the operator.

    function: from values [B, heads, N, D] to attended values of the same shape. Projections and local convolutions
        stay. Inside windows it is called with the values of all windows, [B * windows, heads, N, D].
    """

    def override(module: nn.Module, values: Tensor, x: Tensor, grid_size: GridSize, mask: Tensor | None) -> Tensor:
        attended = function(values, AttentionCall(module, x, grid_size, mask))
        if attended.shape != values.shape:
            raise UserError(
                f"attended values must have the shape of the values {tuple(values.shape)}, got {tuple(attended.shape)}"
            )
        return attended

    with ExitStack() as stack:
        for module in _replaceable_modules(attentions):
            stack.callback(setattr, module, "override", module.override)
            module.override = override
        yield


@contextmanager
def replace_weights(attentions: Attentions, function: Callable[[Tensor, AttentionCall], Tensor]) -> Iterator[None]:
    """Let attention modules use the weights ``function(weights, call)`` instead of their own, at N^2 cost.

    function: from the module's weights [B, heads, N, N] to weights of the same shape. Projections and local
        convolutions stay. Inside Swin's windows the weights are those of all windows, [B * windows, heads, N, N].
    """

    def attend(values: Tensor, call: AttentionCall) -> Tensor:
        return apply_weights(function(call.weights(), call), values)

    with replace_attended(attentions, attend):
        yield


@contextmanager
def without_attention(attentions: Attentions) -> Iterator[None]:
    """Switch attention off: the attended values are zeros; projections, local convolutions and all else stay."""
    with replace_attended(attentions, lambda values, call: torch.zeros_like(values)):
        yield


@contextmanager
def uncapped_landmarks(attentions: Attentions) -> Iterator[None]:
    """Let attention modules take one landmark for each complete cell, as if built with ``max_landmarks="ratio"``."""
    with lift_cap(_listed(attentions)):
        yield


def _listed(attentions: Attentions) -> list[nn.Module]:
    return [attentions] if isinstance(attentions, nn.Module) else list(attentions)


def _attention_modules(attentions: Attentions) -> list[nn.Module]:
    """The attention modules of a model, or of several modules, each once."""
    models = _listed(attentions)
    found = [module for model in models for module in find_attentions(model).values()]
    if not found:
        named = ", ".join(type(model).__name__ for model in models) or "an empty list"
        raise UserError(f"there is no attention module in {named}")
    return list(dict.fromkeys(found))


def _replaceable_modules(attentions: Attentions) -> list[Any]:
    """The modules whose ``override`` stands for the attention modules: themselves, or those inside their windows."""
    found: list[Any] = []
    for module in _attention_modules(attentions):
        inside = [part for part in module.modules() if hasattr(part, "override")]
        if not inside:
            raise UserError(f"the attention of {type(module).__name__} cannot be replaced: it has no `override`")
        found += inside
    return found
