"""Windows of a token grid, as Swin cuts them (https://arxiv.org/abs/2103.14030)."""

import math
from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softline.checks import check_option
from softline.layers.grid import GridSize, always
from softline.ops.chunks import is_exported, is_traced, of_any_size

WindowMask = Literal["tokens", "pairs"]


class Windows:
    """A grid cut into windows of equal size, zero-padded at the bottom and the right to whole windows.

    window_size: (rows, columns); an axis of the grid that is not longer than this is a single window of its own length.
    shift: rows and columns by which the padded grid is rolled up and left before it is cut; ignored along an axis that
        is a single window. The last windows then hold tokens from both sides of the grid.

    Grids with a single window along an axis and grids with several are compiled as separate graphs, because a common
    one would mask where nothing is padded. In each case one graph serves all sizes, and always pads. An exported graph
    serves both cases: there the window and the shift are formulas of the sides.
    """

    def __init__(self, grid_size: GridSize, window_size: GridSize, shift: GridSize = (0, 0)) -> None:
        rows, columns = (_fit(*axis) for axis in zip(grid_size, window_size, shift, strict=True))
        self.is_shifted = not all(always(part == 0) for part in (rows[2], columns[2]))
        self.grid_size = grid_size
        self.window_size = (rows[0], columns[0])
        self.padding = (rows[1], columns[1])
        self.shift = (rows[2], columns[2])
        self.padded_size = (grid_size[0] + rows[1], grid_size[1] + columns[1])
        self.is_one = rows[3] and columns[3]
        self.is_padded = not all(always(padding == 0) for padding in self.padding)

    def split(self, x: Tensor) -> Tensor:
        """Tokens [B, H*W, C] -> windows [B * windows, rows*columns, C]; windows of a sample are consecutive."""
        if self.is_one:
            return x
        maps = x.unflatten(1, self.grid_size)
        if self.is_padded:
            maps = F.pad(maps, (0, 0, 0, self.padding[1], 0, self.padding[0]))
        return self._cut(maps)

    def join(self, windows: Tensor) -> Tensor:
        """The inverse of `split`, without the padding."""
        if self.is_one:
            return windows
        parts = windows.unflatten(0, (-1, *self._counts)).unflatten(-2, self.window_size)
        maps = _without_gaps(parts.transpose(2, 3)).flatten(3, 4).flatten(1, 2)  # [B, padded height, padded width, C]
        if self.is_shifted:
            maps = _roll(maps, self.shift)
        if self.is_padded:
            maps = _without_gaps(maps[:, : self.grid_size[0], : self.grid_size[1]])
        return maps.flatten(1, 2)

    def key_mask(self, batch: int, device: torch.device) -> Tensor | None:
        """Which tokens of the windows are real: bool [batch * windows, rows*columns]; None if all are."""
        if not self.is_padded:
            return None
        return self._cut(self._real(device)[None, ..., None])[..., 0].repeat(batch, 1)

    def pair_mask(self, device: torch.device) -> Tensor | None:
        """Which tokens of a window may attend to each other: bool [windows, rows*columns, rows*columns]; None if all.

        Tokens from opposite sides of the grid may not; padding attends to padding, so that no row is empty.
        """
        if not self.is_shifted and not self.is_padded:
            return None
        rows, columns = self._places(device)
        side = (rows < self.shift[0]).int() + 2 * (columns < self.shift[1]).int()
        side = side.masked_fill(~self._real(device), 4)
        side = self._cut(side[None, ..., None])[..., 0]  # [windows, rows*columns]
        return side[:, :, None] == side[:, None, :]

    def rows(self, inside: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Turn a function that computes weight rows inside windows into one that computes rows over the grid.

        inside: places in a window [r] -> their rows in all windows [B * windows, heads, r, n], n = rows*columns.

        The result maps tokens [R] to their rows [B, heads, R, H*W], which are 0 outside a token's window. It calls
        ``inside`` once with the distinct places of the tokens, and costs O(R H W) beyond that.
        """
        if self.is_one:
            return inside

        def read(tokens: Tensor) -> Tensor:
            window, place = self._where(tokens.device)
            own_window, own_place = window.index_select(0, tokens), place.index_select(0, tokens)
            needed, order = own_place.unique(return_inverse=True)
            found = inside(needed).unflatten(0, (-1, math.prod(self._counts)))  # [B, windows, heads, r, n]
            found = found[:, own_window, :, order].movedim(0, 2)  # [B, heads, R, n]
            return found.index_select(-1, place).masked_fill_(own_window[:, None] != window, 0)

        return read

    def weights(self, inside: Tensor) -> Tensor:
        """Weights over the grid [B, heads, H*W, H*W] from weights inside windows [B * windows, heads, n, n]."""
        if self.is_one:
            return inside
        tokens = torch.arange(self.grid_size[0] * self.grid_size[1], device=inside.device)
        return self.rows(lambda places: inside.index_select(-2, places))(tokens)

    def _where(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The window of each token of the grid [H*W], and its place in that window [H*W]."""
        length = self.window_size[0] * self.window_size[1]
        slots = torch.arange(math.prod(self._counts) * length, device=device).reshape(-1, length, 1)
        own_slots = self.join(slots).flatten()
        return own_slots // length, own_slots % length

    @property
    def _counts(self) -> GridSize:
        """Number of windows along each axis."""
        return self.padded_size[0] // self.window_size[0], self.padded_size[1] // self.window_size[1]

    def _cut(self, maps: Tensor) -> Tensor:
        """[B, padded height, padded width, C] -> [B * windows, rows*columns, C]."""
        if self.is_shifted:
            maps = _roll(maps, (-self.shift[0], -self.shift[1]))
        rows, columns = self._counts
        parts = maps.unflatten(2, (columns, self.window_size[1])).unflatten(1, (rows, self.window_size[0]))
        return _without_gaps(parts.transpose(2, 3)).flatten(3, 4).flatten(0, 2)

    def _places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows [H, 1] and columns [W] of the padded grid."""
        height, width = self.padded_size
        return torch.arange(height, device=device)[:, None], torch.arange(width, device=device)

    def _real(self, device: torch.device) -> Tensor:
        rows, columns = self._places(device)
        return (rows < self.grid_size[0]) & (columns < self.grid_size[1])


def _fit(side: int, window: int, shift: int) -> tuple[int, int, int, bool]:
    """Window, padding and shift along an axis, and whether the axis is a single window."""
    if of_any_size(side) and not always(side <= window):
        # 0 for a single window; not torch.sym_ite, which torch before 2.13 does not translate to ONNX
        shift = shift * cast(int, torch.sym_min(1, (side - 1) // window)) if shift else 0
        window = cast(int, torch.sym_min(side, window))
        return window, (side + window - 1) // window * window - side, shift, False
    if side <= window:
        return side, 0, 0, True
    # not -side % window: torch.compile cannot always trace the remainder of a negative size
    return window, (side + window - 1) // window * window - side, shift, False


def _roll(maps: Tensor, shift: GridSize) -> Tensor:
    """Roll maps [B, H, W, C] down and right by ``shift``."""
    if not is_exported():
        return maps.roll(shift, dims=(1, 2))
    # ONNX has no step for it
    for axis, distance in ((1, shift[0]), (2, shift[1])):
        length = maps.shape[axis]
        places = torch.arange(length, device=maps.device) - distance
        places = torch.where(places < 0, places + length, places)
        maps = maps.index_select(axis, torch.where(places < length, places, places - length))
    return maps


def _without_gaps(x: Tensor) -> Tensor:
    """Copy x in a graph, where `flatten` would otherwise depend on whether its sizes require a copy."""
    return x.clone(memory_format=torch.contiguous_format) if is_traced() else x


class WindowedAttention(nn.Module):
    """Attention inside windows: ``(x [B, N, C], grid_size) -> [B, N, C]``.

    attention: module ``(windows [B * windows, n, C], window_size, **masks)``, with `weights` and `rows`.
    window_size: rows and columns of a window; a map that is not larger is a single window.
    shifted: roll a map of several windows by half a window before it is cut.
    mask: "tokens" masks padding with ``key_mask`` [B * windows, n]; "pairs" also passes ``pair_mask`` [windows, n, n],
        which separates opposite sides of the map that a shift brings into one window.
    """

    num_prefix_tokens = 0

    def __init__(self, attention: nn.Module, window_size: int, *, shifted: bool, mask: WindowMask = "tokens") -> None:
        super().__init__()
        check_option("mask", mask, get_args(WindowMask))
        self.attention: Any = attention
        self.window_size = window_size
        self.shift = window_size // 2 if shifted else 0
        self.mask = mask

    def forward(self, x: Tensor, grid_size: GridSize) -> Tensor:
        windows = self._windows(grid_size)
        return windows.join(self.attention(windows.split(x), windows.window_size, **self._masks(windows, x)))

    def weights(self, x: Tensor, grid_size: GridSize) -> Tensor:
        """Explicit weights [B, heads, N, N], 0 outside a token's window."""
        windows = self._windows(grid_size)
        return windows.weights(
            self.attention.weights(windows.split(x), windows.window_size, **self._masks(windows, x, weights=True))
        )

    def rows(self, x: Tensor, grid_size: GridSize) -> Callable[[Tensor], Tensor]:
        """Return a function that computes single rows of `weights`: tokens [R] -> [B, heads, R, N]."""
        windows = self._windows(grid_size)
        return windows.rows(
            self.attention.rows(windows.split(x), windows.window_size, **self._masks(windows, x, weights=True))
        )

    @property
    def num_heads(self) -> int:
        return int(self.attention.num_heads)

    def _windows(self, grid_size: GridSize) -> Windows:
        return Windows(grid_size, (self.window_size, self.window_size), (self.shift, self.shift))

    def _masks(self, windows: Windows, x: Tensor, *, weights: bool = False) -> dict[str, Tensor | None]:
        """Masks of the attention inside windows; with pairs, the tokens' mask is only for what is not ``weights``."""
        key_mask = {"key_mask": windows.key_mask(x.shape[0], x.device)}
        if self.mask == "tokens":
            return key_mask
        return {"pair_mask": windows.pair_mask(x.device), **({} if weights else key_mask)}

    def extra_repr(self) -> str:
        return f"window_size={self.window_size}, shift={self.shift}, mask={self.mask}"
