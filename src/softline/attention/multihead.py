"""The module behind every registered attention: projections around one operator."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from softline.attention.bands import attend_each_query, attend_in_bands, is_large, project, wants_bands, wants_queries
from softline.errors import UserError
from softline.layers.grid import GridSize, check_grid
from softline.ops.chunks import is_exported
from softline.ops.inputs import check_mask, hide, narrow, saturate, widen

RowReader = Callable[[Tensor], Tensor]
"""Token indices [R] -> their rows of the weights [B, heads, R, N]."""
Override = Callable[[nn.Module, Tensor, Tensor, GridSize, Tensor | None], Tensor]
"""``(module, values [B, heads, N, D], x [B, N, C], grid_size, mask) -> attended values [B, heads, N, D]``."""


class Operator(NamedTuple):
    """The functions of one file in `softline.ops`, all called with the same keyword arguments.

    factors: low-rank factors of the weights; for operators without them ``weights`` also takes ``rows``.
    sums: begins the attention of tokens that come in parts, for cores with ``in_parts``: ``(core, queries, centre,
        grid_size) -> Sums``, see `softline.attention.bands`. The queries are None if keys have their own projection;
        the centre is about the mean of the values.
    reader: ``(core, k, v) -> (q -> attended)``, for cores with ``in_parts`` if queries do not depend on each other: the
        attended values of queries that come in parts, in evaluation without a mask.
    """

    name: str
    attention: Callable[..., Tensor]
    weights: Callable[..., Tensor]
    factors: Callable[..., tuple[Tensor, ...]] | None = None
    sums: Callable[..., "Sums"] | None = None
    reader: Callable[[Any, Tensor, Tensor], Callable[[Tensor], Tensor]] | None = None


class Sums(Protocol):
    """Sums over all tokens, which are added in parts before the attended values of any are read."""

    def add(self, k: Tensor, v: Tensor) -> None:
        """Add keys and values [B, H, n, D]."""

    def read(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the attended values of queries [B, H, n, D]."""
        ...


class Plain(nn.Module):
    """Core of an operator that takes only queries, keys and fixed options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, grid_size: GridSize, key_mask: Tensor | None) -> dict[str, Any]:
        return {"q": q, "k": k, **self.options}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class MultiHeadAttention(nn.Module):
    """Query, key and value projections, an operator, an optional local term, and an output projection.

    operator: the attention operator.
    core: module ``(q, k, grid_size, key_mask) -> keyword arguments of the operator`` for q, k [B, H, N, D]; it holds
        the operator's parameters and buffers (landmarks, random features, ...).
    shared_qk: one projection serves as queries and keys.
    local: module of `softline.layers.local` whose output is added to the attended values.

    The attribute ``override`` is a function that computes the attended values in place of the operator; None, the
    default, leaves them to the operator. The context managers of `softline.attention.hooks` set and restore it.
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
        self.override: Override | None = None
        self.qkv = nn.Linear(dim, (2 if shared_qk else 3) * dim, bias=qkv_bias)
        self.proj: nn.Module = nn.Linear(dim, dim)

    def forward(
        self, x: Tensor, grid_size: GridSize, key_mask: Tensor | None = None, *, context: Tensor | None = None
    ) -> Tensor:
        """[B, N, C] -> [B, N, C].

        context: tokens [B, N, C] for the local term, instead of x (their mean predicts InLine's kernels).
        """
        if key_mask is None and wants_bands(self, x):
            self._check(x, grid_size, key_mask)
            return attend_in_bands(self, x, grid_size, _context(context, x, key_mask))
        if key_mask is None and wants_queries(self, x):
            self._check(x, grid_size, key_mask)
            return attend_each_query(self, x)
        x, q, k, v = self._project(x, grid_size, key_mask)
        if self.override is None:
            attended = self.operator.attention(**self.core(q, k, grid_size, key_mask), v=v, key_mask=key_mask)
        else:
            attended = self.override(self, v, x, grid_size, key_mask)
        return self._finish(attended, _context(context, x, key_mask), v, grid_size, key_mask)

    def weights(self, x: Tensor, grid_size: GridSize, key_mask: Tensor | None = None) -> Tensor:
        """The operator's explicit weights [B, heads, N, N]; the local term is not part of them."""
        return self.operator.weights(**self.operands(x, grid_size, key_mask))

    def rows(self, x: Tensor, grid_size: GridSize, key_mask: Tensor | None = None) -> RowReader:
        """Return a function that computes single rows of `weights` in O(N) each, if all N x N do not fit in memory."""
        given = self.operands(x, grid_size, key_mask)
        if self.operator.factors is None:
            return lambda tokens: self.operator.weights(**given, rows=tokens)
        left, *others = self.operator.factors(**given)
        # the last factors are multiplied first: their product has the length of a row
        right = functools.reduce(torch.matmul, others)
        return lambda tokens: narrow(left.index_select(-2, tokens) @ right, x.dtype)

    def factors(self, x: Tensor, grid_size: GridSize, key_mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Low-rank matrices whose product is the weights, for N too large to multiply them."""
        if self.operator.factors is None:
            raise UserError(f"{self.operator.name} attention has no low-rank factors; use weights()")
        return self.operator.factors(**self.operands(x, grid_size, key_mask))

    def operands(self, x: Tensor, grid_size: GridSize, key_mask: Tensor | None = None) -> dict[str, Any]:
        """Keyword arguments of the operator for x, except the values: q [B, H, N, D] and the other operands."""
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
        """Return the output [B, N, C] for given weights [B, heads, N, N]."""
        x, _, _, v = self._project(x, grid_size, key_mask)
        attended = apply_weights(weights, v)
        return self._finish(attended, _context(context, x, key_mask), v, grid_size, key_mask)

    def _check(self, x: Tensor, grid_size: GridSize, key_mask: Tensor | None) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise UserError(f"x must be a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise UserError(f"x must have shape [B, N, {self.dim}], got {tuple(x.shape)}")
        check_grid(x.shape[1], grid_size, self.num_prefix_tokens)
        check_mask("key_mask", key_mask, x.shape[0], x.shape[1], x.device)

    def _project(
        self, x: Tensor, grid_size: GridSize, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The checked and masked input [B, N, C], and queries, keys and values [B, H, N, D]."""
        self._check(x, grid_size, key_mask)
        if key_mask is not None:
            x = x.masked_fill(~key_mask[..., None], 0)
        q, *k, v = (hide(part, key_mask) for part in self._parts(x))
        return x, q, k[0] if k else q, v

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys if they have a projection of their own, and values [B, H, N, D]."""
        if is_large(self, x):
            # one after the other: side by side they would have to be copied
            return tuple(project(self, x, part) for part in range(self.qkv.out_features // self.dim))
        parts = self.qkv(x)
        return self._heads(saturate(parts, parts.dtype))

    def _heads(self, parts: Tensor) -> tuple[Tensor, ...]:
        """Two or three parts side by side [B, N, parts * C] as tensors [B, H, N, D]."""
        head_dim = self.dim // self.num_heads
        if is_exported():
            # one copy, of which the parts are slices
            return parts.unflatten(-1, (-1, head_dim)).transpose(1, 2).split(self.num_heads, dim=1)
        split = parts.unflatten(-1, (-1, self.num_heads, head_dim))
        # contiguous parts, which convolutions and matrix products read fastest: [parts, B, H, N, D]
        return split.permute(2, 0, 1, 3, 4).contiguous().transpose(2, 3).unbind(0)

    def _finish(self, attended: Tensor, x: Tensor, v: Tensor, grid_size: GridSize, key_mask: Tensor | None) -> Tensor:
        if self.local is not None:
            # in this order, so that the sum has the memory layout of the local term, which the projection reads
            attended = self.local(x, v, grid_size, key_mask) + attended
        out = self.mixed(attended)
        return out if key_mask is None else out.masked_fill(~key_mask[..., None], 0)

    def mixed(self, attended: Tensor) -> Tensor:
        """The output projection of attended values, local term included: [B, H, N, D] -> [B, N, C]."""
        attended = saturate(attended, attended.dtype)
        out = self.proj(attended.transpose(1, 2).flatten(2))
        return saturate(out, out.dtype)

    def extra_repr(self) -> str:
        return f"{self.operator.name}, num_heads={self.num_heads}"


def apply_weights(weights: Tensor, values: Tensor) -> Tensor:
    """The attended values that explicit weights produce, in float32 for half-precision inputs: [B, H, N, D].

    weights: [B, heads, N, N], where heads is H, or H * D if every channel is a head of its own (Hydra).
    values: [B, H, N, D].
    """
    batch, heads, tokens, head_dim = values.shape
    if weights.shape not in ((batch, heads, tokens, tokens), (batch, heads * head_dim, tokens, tokens)):
        raise UserError(
            f"weights must have shape [B, heads, N, N] = {(batch, heads, tokens, tokens)}, got {tuple(weights.shape)}"
        )
    split = values.transpose(2, 3).flatten(1, 2).unflatten(1, (weights.shape[1], -1)).mT  # [B, heads, N, D or 1]
    attended = (widen(weights) @ widen(split)).mT.flatten(1, 2).unflatten(1, (heads, -1)).mT
    return narrow(attended, values.dtype)


def _context(context: Tensor | None, x: Tensor, key_mask: Tensor | None) -> Tensor:
    """The input [B, N, C] of the local term: ``context`` if given, else x."""
    if context is None:
        return x
    if context.shape != x.shape:
        raise UserError(f"context must have the shape of x {tuple(x.shape)}, got {tuple(context.shape)}")
    return context if key_mask is None else context.masked_fill(~key_mask[..., None], 0)
