"""Conversions between tokens [..., N, D], N = prefix + H * W, and maps, and the checks of a token grid."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from softline.checks import check_integer
from softline.errors import UserError
from softline.ops.inputs import sum_tokens

GridSize = tuple[int, int]


def as_pair(name: str, value: int | GridSize) -> GridSize:
    """Return (rows, columns); an int stands for both, as in torch's convolutions. Both must be at least 1."""
    pair = (value, value) if isinstance(value, int) else value
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise UserError(f"{name} must be an int or (rows, columns), got {value!r}")
    for side in pair:
        check_integer(name, side, 1)
    return pair[0], pair[1]


def always(condition: bool) -> bool:
    """Whether a condition on sizes holds; in a graph compiled for many sizes, whether it holds for all of them.

    It tells whether a step that is a no-op under the condition can be skipped. An ordinary ``if`` would specialise the
    graph to the sizes of the first image and recompile it for others.
    """
    return statically_known_true(condition) if torch.compiler.is_compiling() else condition


def pad_to_whole(maps: Tensor, patch: int | GridSize) -> Tensor:
    """Zero-pad maps [..., H, W] at the bottom and the right to whole patches."""
    sides, patches = maps.shape[-2:], as_pair("patch", patch)
    if all(always(side % length == 0) for side, length in zip(sides, patches, strict=True)):
        return maps
    # not -side % length: torch.compile cannot trace the remainder of a negative size
    below, right = ((side + length - 1) // length * length - side for side, length in zip(sides, patches, strict=True))
    return F.pad(maps, (0, right, 0, below))


def check_grid(tokens: int, grid_size: GridSize, num_prefix_tokens: int) -> None:
    if not isinstance(grid_size, (tuple, list)) or len(grid_size) != 2:
        raise UserError(f"grid_size must be (H, W), got {grid_size!r}")
    height, width = grid_size
    if not all(isinstance(side, (int, torch.SymInt)) for side in grid_size):
        raise UserError(f"grid_size must be two whole numbers, got {grid_size!r}")
    if height < 1 or width < 1:
        raise UserError(f"grid_size must be at least 1x1, got {height}x{width}")
    if tokens != num_prefix_tokens + height * width:
        raise UserError(
            f"N must be num_prefix_tokens + H*W = {num_prefix_tokens} + {height}*{width}, got {tokens} tokens"
        )


def spatial_map(x: Tensor, grid_size: GridSize, num_prefix_tokens: int = 0) -> Tensor:
    """Map with the heads as groups of channels, without prefix tokens: [B, H, N, D] -> [B, H * D, height, width].

    Channels are last in memory, as in tokens; convolutions on a CPU are fastest that way.
    """
    return token_map(x[:, :, num_prefix_tokens:].transpose(1, 2).flatten(2), grid_size)


def token_map(x: Tensor, grid_size: GridSize) -> Tensor:
    """Tokens [B, H*W, C] as maps [B, C, H, W] with channels last in memory; makes no copy."""
    return x.unflatten(1, grid_size).permute(0, 3, 1, 2)


def map_tokens(x: Tensor) -> Tensor:
    """Maps [B, C, H, W] as tokens [B, H*W, C]; makes no copy if channels are last in memory."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def spatial_tokens(x: Tensor, num_heads: int, num_prefix_tokens: int = 0) -> Tensor:
    """The inverse of `spatial_map`, with zeros for the prefix tokens: [B, C, height, width] -> [B, H, N, D]."""
    x = map_tokens(x).unflatten(-1, (num_heads, -1)).transpose(1, 2)
    return F.pad(x, (0, 0, num_prefix_tokens, 0)) if num_prefix_tokens else x


def mean_token(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Mean [B, C] over the real tokens of x [B, N, C], whose masked rows are zero; accumulates in float32."""
    total = sum_tokens(x).squeeze(-2)
    count = x.shape[1] if key_mask is None else key_mask.sum(1, keepdim=True).clamp(min=1)
    return total / count
