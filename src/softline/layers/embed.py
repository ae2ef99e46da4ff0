"""Patch embeddings (from images or maps to tokens) and position embeddings."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softline.checks import check_integer
from softline.layers.bands import Band, ImageRows, for_each_band, row_bands
from softline.layers.grid import GridSize, always, map_tokens, pad_to_whole, token_map
from softline.layers.rows import resized, rows_of
from softline.ops.inputs import widen, without_autocast


def channels_last(maps: Tensor) -> Tensor:
    """Maps with channels last in memory: convolutions are fastest on them, and their tokens need no copy."""
    # by permuting axes: torch.func.vmap cannot batch memory formats
    return maps.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


class PatchEmbed(nn.Module):
    """One convolution: maps [B, C, H, W] -> tokens [B, N, dim] and their grid.

    Maps are zero-padded at the bottom and the right to a multiple of the stride, so that every pixel is used.
    """

    reads_rows = True

    def __init__(
        self,
        in_chans: int,
        dim: int,
        *,
        kernel_size: int,
        stride: int,
        padding: int = 0,
        norm_layer: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        check_integer("in_chans", in_chans, 1)
        self.proj = nn.Conv2d(in_chans, dim, kernel_size, stride=stride, padding=padding)
        self.norm = nn.Identity() if norm_layer is None else norm_layer(dim)
        self.stride = stride

    def forward(self, maps: Tensor | ImageRows) -> tuple[Tensor, GridSize]:
        # kernels that overlap need rows of their neighbours
        reach = int(self.proj.kernel_size[0] > self.stride)
        columns = -(-maps.shape[3] // self.stride)
        maps = for_each_band(
            self, self._embed, maps, stride=self.stride, row_numbers=self.proj.out_channels * columns, reach=reach
        )
        return map_tokens(maps), (maps.shape[2], maps.shape[3])

    def _embed(self, maps: Tensor) -> Tensor:
        maps = self.proj(channels_last(pad_to_whole(maps, self.stride)))
        return token_map(self.norm(map_tokens(maps)), (maps.shape[2], maps.shape[3]))


class ConvEmbed(nn.Module):
    """SOFT's embedding: 3x3 convolutions with BatchNorm and ReLU; maps [B, C, H, W] -> tokens [B, N, dim] and grid.

    widths, strides: output channels and stride of each convolution.
    overlap: False uses one convolution with kernel = stride instead, as in PVT (Table 11b of the SOFT paper).
    """

    reads_rows = True

    def __init__(self, in_chans: int, widths: list[int], strides: list[int], *, overlap: bool = True) -> None:
        super().__init__()
        check_integer("in_chans", in_chans, 1)
        if not overlap:
            widths, strides = widths[-1:], [math.prod(strides)]
        layers: list[nn.Module] = []
        for before, width, stride in zip([in_chans, *widths], widths, strides, strict=False):
            kernel, padding = (3, 1) if overlap else (stride, 0)
            layers += [nn.Conv2d(before, width, kernel, stride=stride, padding=padding), nn.BatchNorm2d(width)]
            layers += [nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers)
        self.whole_patches = 1 if overlap else strides[0]
        self.stride = math.prod(strides)
        # a convolution with stride 2 needs one row above; two before it need as much as one more row of the result
        self.reach = min(len(widths), 2) if overlap else 0
        # the largest map is that of the first convolution
        self.first_width, self.first_stride = widths[0], strides[0]

    def forward(self, maps: Tensor | ImageRows) -> tuple[Tensor, GridSize]:
        pixels = self.stride * maps.shape[3] // self.first_stride**2
        row_numbers = self.first_width * max(pixels, 1)
        maps = for_each_band(self, self._embed, maps, stride=self.stride, row_numbers=row_numbers, reach=self.reach)
        return map_tokens(maps), (maps.shape[2], maps.shape[3])

    def _embed(self, maps: Tensor) -> Tensor:
        out: Tensor = self.layers(channels_last(pad_to_whole(maps, self.whole_patches)))
        return out


class PositionEmbed(nn.Module):
    """A learned embedding per grid position (and prefix token), resized to the grid of the input.

    grid_size: grid of the learned positions.
    mode: interpolation for other grids, "bilinear" or "bicubic".
    """

    def __init__(self, dim: int, grid_size: GridSize, *, num_prefix_tokens: int = 0, mode: str = "bilinear") -> None:
        super().__init__()
        self.grid_size = grid_size
        self.num_prefix_tokens = num_prefix_tokens
        self.mode = mode
        self.weight = nn.Parameter(torch.empty(1, num_prefix_tokens + grid_size[0] * grid_size[1], dim))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, x: Tensor, grid_size: GridSize, *, fresh: bool = False) -> Tensor:
        """Add the embedding to tokens [B, N, dim].

        fresh: x may be overwritten, because nobody else needs it. On a large grid that is done in bands of rows, so
            that the embedding of the whole grid is never made.
        """
        bands = row_bands(grid_size[0], grid_size[1] * x.shape[2], x.device) if fresh else []
        # under autocast the sum may have a wider dtype
        if len(bands) <= 1 or self.mode != "bilinear" or x.dtype != torch.result_type(x, self.weight):
            return x + self.resized(grid_size)
        return self._add_in_bands(x, grid_size, bands)

    def _add_in_bands(self, x: Tensor, grid_size: GridSize, bands: Sequence[Band]) -> Tensor:
        first, width = self.num_prefix_tokens, grid_size[1]
        maps = widen(token_map(self.weight[:, first:], self.grid_size))
        places_dtype = np.float64 if maps.dtype == torch.float64 else np.float32
        rows = resized(rows_of(maps), grid_size, places_dtype=places_dtype)
        x[:, :first] += self.weight[:, :first]
        for band in bands:
            part = map_tokens(rows.read(band.first, band.last)).to(self.weight.dtype)
            x[:, first + band.first * width : first + band.last * width] += part
        return x

    def resized(self, grid_size: GridSize) -> Tensor:
        """The embedding for another grid [1, num_prefix_tokens + H*W, dim]."""
        if all(always(new == old) for new, old in zip(grid_size, self.grid_size, strict=True)):
            return self.weight
        return self.resize(self.weight, self.grid_size, grid_size)

    def resize(self, weight: Tensor, old: GridSize, new: GridSize) -> Tensor:
        """Interpolate embeddings of one grid to another; those of prefix tokens are unchanged."""
        prefix, positions = weight[:, : self.num_prefix_tokens], weight[:, self.num_prefix_tokens :]
        maps = widen(token_map(positions, old))
        if self.mode == "bicubic" and torch.compiler.is_compiling():
            maps = _bicubic(maps, new)
        else:
            # as timm's resample_abs_pos_embed, which however resizes float64 weights in float32
            antialias = self.mode == "bicubic"
            maps = F.interpolate(maps, size=new, mode=self.mode, align_corners=False, antialias=antialias)
        resized = map_tokens(maps).to(weight.dtype)
        return torch.cat([prefix, resized], dim=1) if self.num_prefix_tokens else resized

    @torch.no_grad()
    def set_grid(self, grid_size: GridSize) -> None:
        """Replace the learned positions by those interpolated to another grid."""
        self.weight = nn.Parameter(self.resized(grid_size).detach().clone())
        self.grid_size = grid_size


@without_autocast
def _bicubic(maps: Tensor, size: GridSize) -> Tensor:
    """The antialiased bicubic `F.interpolate` as two matrix products.

    Used in compiled graphs, because torch cannot trace the gradient of `F.interpolate` for varying sizes.
    """
    rows, columns = (_cubic_weights(old, new, maps) for old, new in zip(maps.shape[-2:], size, strict=True))
    return rows @ maps @ columns.mT


def _cubic_weights(old: int, new: int, like: Tensor) -> Tensor:
    """Interpolation weights from ``old`` to ``new`` positions [new, old]; rows sum to 1."""
    scale = old / torch.full((1,), new, dtype=like.dtype, device=like.device)
    places, targets = (torch.arange(count, dtype=like.dtype, device=like.device) + 0.5 for count in (old, new))
    x = ((places - (targets * scale)[:, None]) / scale.clamp(min=1)).abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((2.5 - 0.5 * x) * x - 4) * x + 2
    weights = torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    return weights / weights.sum(1, keepdim=True)
