"""Projections around one operator: the module behind every registered attention."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from softline.errors import UserError
from softline.layers.grid import GridSize, check_grid
from softline.ops.inputs import check_mask, hide, narrow, saturate, widen

RowReader = Callable[[Tensor], Tensor]
"""Token indices [R] -> these rows of the weights [B, heads, R, N]."""


class Operator(NamedTuple):
    """The functions of one file in `softline.ops`, all called with the same keyword arguments.

    factors: low-rank factors of the weights; without them ``weights`` also takes ``rows``.
    """

    name: str
    attention: Callable[..., Tensor]
    weights: Callable[..., Tensor]
    factors: Callable[..., tuple[Tensor, ...]] | None = None


class Plain(nn.Module):
    """The core of an operator that takes queries, keys and fixed options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, grid_size: GridSize, key_mask: Tensor | None) -> dict[str, Any]:
        return {"q": q, "k": k, **self.options}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class MultiHeadAttention(nn.Module):
    """Query, key and value projections, an operator, an optional local term, an output projection.

    operator: what attends.
    core: module ``(q, k, grid_size, key_mask) -> keyword arguments of the operator`` for q, k [B, H, N, D]; it holds
        whatever the operator learns or draws (landmarks, random features, ...).
    shared_qk: one projection serves queries and keys.
    local: module of `softline.layers.local` whose result is added to the attended values.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        operator: Operator,
        core: nn.Module,
        *,
        num_prefix_tokens: int = 0,
        qkv_bias: bool = True,
        shared_qk: bool = False,
        local: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.num_heads = num_heads
        self.num_prefix_tokens = num_prefix_tokens
        self.operator = operator
        self.core = core
        self.local = local
        self.qkv = nn.Linear(dim, (2 if shared_qk else 3) * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(
        self, x: Tensor, grid_size: GridSize, key_mask: Tensor | None = None, *, context: Tensor | None = None
    ) -> Tensor:
        """[B, N, C] -> [B, N, C].

        context: tokens [B, N, C] that the local term takes instead of x (their mean predicts InLine's kernels).
        """
        x, q, k, v = self._project(x, grid_size, key_mask)
        attended = self.operator.attention(**self.core(q, k, grid_size, key_mask), v=v, key_mask=key_mask)
        return self._finish(attended, _context(context, x, key_mask), v, grid_size, key_mask)

    def weights(self, x: Tensor, grid_size: GridSize, key_mask: Tensor | None = None) -> Tensor:
        """The operator's explicit weights [B, heads, N, N]; the local term is not part of them."""
        return self.operator.weights(**self.operands(x, grid_size, key_mask))

    def rows(self, x: Tensor, grid_size: GridSize, key_mask: Tensor | None = None) -> RowReader:
        """What reads single rows of `weights`, for N x N that do not fit in memory: O(N) for each row."""
        given = self.operands(x, grid_size, key_mask)
        if self.operator.factors is None:
            return lambda tokens: self.operator.weights(**given, rows=tokens)
        left, *others = self.operator.factors(**given)
        # from the right: the last factor alone is as long as a row
        right = functools.reduce(torch.matmul, others)
        return lambda tokens: narrow(left.index_select(-2, tokens) @ right, x.dtype)

    def factors(self, x: Tensor, grid_size: GridSize, key_mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Matrices of low rank whose product is the weights, for N too large to multiply them."""
        if self.operator.factors is None:
            raise UserError(f"{self.operator.name} attention has no low-rank factors; use weights()")
        return self.operator.factors(**self.operands(x, grid_size, key_mask))

    def operands(self, x: Tensor, grid_size: GridSize, key_mask: Tensor | None = None) -> dict[str, Any]:
        """What the operator is given for x, except the values: queries q [B, H, N, D] and whatever it takes beside."""
        _, q, k, _ = self._project(x, grid_size, key_mask)
        return {**self.core(q, k, grid_size, key_mask), "key_mask": key_mask}

    def mix(
        self,
        weights: Tensor,
        x: Tensor,
        grid_size: GridSize,
        key_mask: Tensor | None = None,
        *,
        context: Tensor | None = None,
    ) -> Tensor:
        """The output [B, N, C] that given weights [B, heads, N, N] produce."""
        x, _, _, v = self._project(x, grid_size, key_mask)
        expected = (x.shape[0], weights.shape[1], x.shape[1], x.shape[1])
        if weights.shape != expected or weights.shape[1] not in (self.num_heads, self.dim):
            raise UserError(
                f"weights must have shape [B, heads, N, N] = {(expected[0], self.num_heads, *expected[2:])}, "
                f"got {tuple(weights.shape)}"
            )
        # as many heads as the weights have: Hydra's are the channels
        heads = v.transpose(2, 3).flatten(1, 2).unflatten(1, (weights.shape[1], -1)).mT
        attended = (widen(weights) @ widen(heads)).mT.flatten(1, 2).unflatten(1, (self.num_heads, -1)).mT
        return self._finish(narrow(attended, v.dtype), _context(context, x, key_mask), v, grid_size, key_mask)

    def _project(
        self, x: Tensor, grid_size: GridSize, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Checked and masked input [B, N, C], and queries, keys and values [B, H, N, D]."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise UserError(f"x must be a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise UserError(f"x must have shape [B, N, {self.dim}], got {tuple(x.shape)}")
        check_grid(x.shape[1], grid_size, self.num_prefix_tokens)
        check_mask("key_mask", key_mask, x.shape[0], x.shape[1], x.device)
        if key_mask is not None:
            x = x.masked_fill(~key_mask[..., None], 0)
        parts = self.qkv(x)
        parts = saturate(parts, parts.dtype).unflatten(
            -1, (-1, self.num_heads, self.dim // self.num_heads)
        )  # [B, N, 2 or 3, H, D]
        # each part without gaps, as convolutions and products read them best: [2 or 3, B, H, N, D]
        parts = parts.permute(2, 0, 1, 3, 4).contiguous().transpose(2, 3)
        q, *k, v = (hide(part, key_mask) for part in parts.unbind(0))
        return x, q, k[0] if k else q, v

    def _finish(self, attended: Tensor, x: Tensor, v: Tensor, grid_size: GridSize, key_mask: Tensor | None) -> Tensor:
        if self.local is not None:
            # this way round, because the local term has heads side by side, as the projection reads them
            attended = self.local(x, v, grid_size, key_mask) + attended
        attended = saturate(attended, attended.dtype)
        out = self.proj(attended.transpose(1, 2).flatten(2))
        out = saturate(out, out.dtype)
        return out if key_mask is None else out.masked_fill(~key_mask[..., None], 0)

    def extra_repr(self) -> str:
        return f"{self.operator.name}, num_heads={self.num_heads}"


def _context(context: Tensor | None, x: Tensor, key_mask: Tensor | None) -> Tensor:
    """The tokens [B, N, C] that a local term sees: x unless others are given."""
    if context is None:
        return x
    if context.shape != x.shape:
        raise UserError(f"context must have the shape of x {tuple(x.shape)}, got {tuple(context.shape)}")
    return context if key_mask is None else context.masked_fill(~key_mask[..., None], 0)
