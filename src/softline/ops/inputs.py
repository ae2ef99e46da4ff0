"""Steps shared by all operators: checking their tensors, widening them, masking tokens.

Precision: float16 and bfloat16 inputs are widened to float32 and autocast is disabled inside an operator, because sums
over thousands of tokens, squared distances and inverses are too inaccurate in half precision. The result has the dtype
of the values; a float16 result beyond +-65504 saturates there instead of becoming infinite.
"""

import functools
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from softline.checks import check_integer
from softline.errors import UserError
from softline.ops.chunks import is_exported, needs_onnx_steps

HALF = (torch.float16, torch.bfloat16)

Impl = Literal["auto", "linear", "explicit"]

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` with autocast disabled on the device of its first tensor."""

    @functools.wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> R:
        tensors = [value for value in (*args, *options.values()) if isinstance(value, Tensor)]
        if not tensors:
            raise UserError(f"{function.__name__} takes torch.Tensors, got none")
        device = tensors[0].device.type
        # an exported graph records the context, which not every runtime can read; without autocast it does nothing
        if is_exported() and not torch.is_autocast_enabled(device):
            return function(*args, **options)
        # torch before 2.13 cannot trace the question, and compiles for devices that have autocast
        if not torch.compiler.is_compiling() and not torch.amp.is_autocast_available(device):
            return function(*args, **options)
        with torch.autocast(device, enabled=False):
            return function(*args, **options)

    return run


def check_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise UserError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.ndim != 4:
        raise UserError(f"{name} must have shape [B, H, N, D], got {tuple(tensor.shape)}")
    if not tensor.is_floating_point():
        raise UserError(f"{name} must be a floating-point tensor, got {tensor.dtype}")


def check_alike(q: Tensor, *, key_mask: Tensor | None = None, **others: Tensor | None) -> None:
    """Check that the others share batch, heads, dtype and device with q; k also its shape, v its number of tokens.

    key_mask: bool [B, N], checked too.
    """
    check_tensor("q", q)
    for name, other in others.items():
        if other is None:
            continue
        check_tensor(name, other)
        if other.dtype != q.dtype or other.device != q.device:
            raise UserError(
                f"{name} must have the dtype and device of q ({q.dtype} on {q.device}), "
                f"got {other.dtype} on {other.device}"
            )
        shared = {"v": 3}.get(name, 2)
        if other.shape[:shared] != q.shape[:shared]:
            rule = "batch, heads and tokens" if shared == 3 else "batch and heads"
            raise UserError(f"{name} must share {rule} with q {tuple(q.shape)}, got {tuple(other.shape)}")
        if name != "v" and other.shape[-1] != q.shape[-1]:
            raise UserError(f"{name} must share the head dimension with q {tuple(q.shape)}, got {tuple(other.shape)}")
        if name == "k" and other.shape != q.shape:
            raise UserError(f"k must have the shape of q {tuple(q.shape)}, got {tuple(other.shape)}")
    check_mask("key_mask", key_mask, q.shape[0], q.shape[2], q.device)


def check_mask(name: str, mask: Tensor | None, batch: int, tokens: int, device: torch.device) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise UserError(f"{name} must be a bool tensor (True = real token), got {kind}")
    if mask.shape != (batch, tokens):
        raise UserError(f"{name} must have shape [B, N] = {(batch, tokens)}, got {tuple(mask.shape)}")
    if mask.device != device:
        raise UserError(f"{name} must be on {device} like q, got {mask.device}")


def seeded(seed: int | None) -> torch.Generator | None:
    """A CPU generator seeded with ``seed``; None stands for torch's global generator."""
    if seed is None:
        return None
    check_integer("seed", seed, 0)
    return torch.Generator("cpu").manual_seed(seed)


def widen(tensor: Tensor) -> Tensor:
    """Convert float16 and bfloat16 to float32; wider types are unchanged."""
    return tensor.float() if tensor.dtype in HALF else tensor


def hide(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Zero the rows of masked tokens: ``tensor`` is [B, H, N, D], ``mask`` is [B, N]."""
    # a fill and not a product: padding may hold NaN, and 0 * NaN is NaN
    return tensor if mask is None else tensor.masked_fill(~mask[:, None, :, None], 0)


def prepare(tensor: Tensor, mask: Tensor | None) -> Tensor:
    return hide(widen(tensor), mask)


def take_rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """The tokens ``rows`` [R] of a tensor [B, H, N, D]; None takes all."""
    return tensor if rows is None else tensor.index_select(-2, rows)


def hide_rows(weights: Tensor, mask: Tensor | None, rows: Tensor | None) -> Tensor:
    """Zero the rows of masked queries in weights [B, H, R, N] of the tokens ``rows`` [R]; None stands for all."""
    return hide(weights, mask if mask is None or rows is None else mask.index_select(-1, rows))


def hide_scores(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Set the columns of masked keys to the lowest finite score: ``scores`` is [B, H, N, M], ``mask`` is [B, M].

    The score is finite so that a row without any real key has a softmax and a gradient; the caller zeroes such rows.
    """
    if mask is None:
        return scores
    return scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)


def finish(result: Tensor, dtype: torch.dtype, key_mask: Tensor | None) -> Tensor:
    """Zero the rows of masked tokens and convert to the caller's dtype."""
    return narrow(hide(result, key_mask), dtype)


def narrow(result: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to the caller's dtype, saturating in float16."""
    return saturate(result, dtype).to(dtype)


def saturate(result: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp a result that will become float16 to +-65504, so that it stays finite; no-op for other dtypes."""
    if dtype != torch.float16:
        return result
    limit = torch.finfo(dtype).max
    return result.clamp(-limit, limit)


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator``; 0 where the denominator is exactly 0, as for a token without any key."""
    empty = denominator == 0
    quotient = numerator / denominator.masked_fill(empty, 1)
    return quotient.masked_fill(empty, 0)


def count_tokens(tokens: int, key_mask: Tensor | None, dtype: torch.dtype) -> int | Tensor:
    """Number of real tokens: an int, or one per sample [B, 1, 1, 1] with a mask (at least 1, safe to divide by)."""
    if key_mask is None:
        return tokens
    return key_mask.sum(-1).clamp(min=1).to(dtype)[:, None, None, None]


def sum_tokens(x: Tensor) -> Tensor:
    """Sum over the tokens of x [..., N, D]: [..., 1, D], in float32 for half-precision inputs."""
    if needs_onnx_steps():
        # ONNX Runtime multiplies by ones faster than it adds rows
        wide = widen(x)
        return wide.new_ones(1, x.shape[-2]) @ wide
    return x.sum(-2, keepdim=True, dtype=torch.float32 if x.dtype in HALF else x.dtype)


def unit_range(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """x divided by a power of two, so that the largest magnitude over ``dims`` is about 1, and that power.

    Products and powers of the quotient neither overflow nor vanish, and no digit is lost. The power is a constant: if
    it cancels in the result, the gradient is exact although the power has none.
    """
    largest = x.detach().abs().amax(dims, keepdim=True)
    power = largest.masked_fill(largest == 0, 1).log2().floor().exp2()
    return x / power, power


def unit_length(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """x divided by its norm over ``dims``; a zero vector stays zero, with a zero gradient."""
    x, _ = unit_range(x, dims)
    square = x.square().sum(dims, keepdim=True)
    # the square root has no finite gradient at 0
    return x / square.masked_fill(square == 0, 1).sqrt()
