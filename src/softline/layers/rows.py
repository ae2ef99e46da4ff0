"""Maps whose rows are computed when they are read, so that the decoder of a large image needs little memory.

A `RowMap` is a recipe for rows of a map [B, C, H, W]. Convolutions, resizing and sums of such maps are again recipes,
and nothing is computed before rows of the last one are read. Rows that several bands need are computed several times.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softline.errors import UserError
from softline.layers.bands import RETURNING_BANDS, row_bands
from softline.layers.grid import GridSize
from softline.process import return_memory

LABEL_DTYPES = (torch.uint8, torch.int16, torch.int32)


class RowMap(NamedTuple):
    size: GridSize
    """Rows and columns of the whole map."""
    read: Callable[[int, int], Tensor]
    """Returns the rows from the first number up to the second [B, C, rows, W]."""

    def whole(self) -> Tensor:
        return self.read(0, self.size[0])

    def stored(self, row_numbers: int, device: torch.device) -> "RowMap":
        """The same map, which is computed once in bands, see `bands`, and kept, with channels last in memory."""
        kept: Tensor | None = None
        for rows, band in self.bands(row_numbers, device):
            if kept is None:
                kept = band.new_empty(len(band), *self.size, band.shape[1]).permute(0, 3, 1, 2)
            kept[:, :, rows] = band
        assert kept is not None, "a map has rows"
        return rows_of(kept)

    def bands(self, row_numbers: int, device: torch.device, *, least: int = 1) -> Iterator[tuple[slice, Tensor]]:
        """Yield the map in bands of rows, with their places.

        row_numbers: numbers in one row of the largest tensor that a band needs.
        least: rows that a band has at least.
        """
        for count, band in enumerate(row_bands(self.size[0], row_numbers, device, least=least), 1):
            yield band.rows, self.read(band.first, band.last)
            # a band has blocks of many sizes, which do not always fit those that were kept
            if count % RETURNING_BANDS == 0:
                return_memory()


def rows_of(maps: Tensor) -> RowMap:
    """The rows of a map [B, C, H, W] that exists."""
    return RowMap((maps.shape[2], maps.shape[3]), lambda first, last: maps[:, :, first:last])


def each_pixel(function: Callable[[Tensor], Tensor], maps: RowMap) -> RowMap:
    """A function that treats pixels independently."""
    return RowMap(maps.size, lambda first, last: function(maps.read(first, last)))


def each_neighbourhood(function: Callable[[Tensor], Tensor], maps: RowMap, reach: int = 1) -> RowMap:
    """A function that keeps the size and depends on ``reach`` rows around, as padded convolutions do."""

    def read(first: int, last: int) -> Tensor:
        begin, end = max(first - reach, 0), min(last + reach, maps.size[0])
        # what the function pads inside the map reaches only rows that are cut off
        return function(maps.read(begin, end))[:, :, first - begin : last - begin]

    return RowMap(maps.size, read)


def resized(
    maps: RowMap, size: GridSize, *, align_corners: bool = False, places_dtype: type[np.floating[Any]] = np.float32
) -> RowMap:
    """``F.interpolate(maps, size, mode="bilinear", align_corners=align_corners)``.

    places_dtype: dtype in which places are computed; torch's kernel has float32, and float64 for maps in float64.
    """
    size = (size[0], size[1])
    if size == maps.size:
        return maps
    rows = maps.size[0]

    def read(first: int, last: int) -> Tensor:
        # by numpy: tensors without values, by which memory is estimated, cannot say which rows are needed
        places = np.arange(first, last).astype(places_dtype)
        if align_corners:
            places = places * places_dtype((rows - 1) / max(size[0] - 1, 1))
        else:
            places = ((places + places_dtype(0.5)) * places_dtype(rows / size[0]) - places_dtype(0.5)).clip(min=0)
        above = places.astype(np.int64).clip(max=rows - 1)
        below = (above + 1).clip(max=rows - 1)
        begin, end = int(above[0]), int(below[-1]) + 1
        near = maps.read(begin, end)
        share = torch.from_numpy(places - above).to(near)[:, None]
        upper, lower = (torch.from_numpy(index - begin).to(near.device) for index in (above, below))
        mixed = near.index_select(2, upper).lerp_(near.index_select(2, lower), share)
        return F.interpolate(mixed, size=(last - first, size[1]), mode="bilinear", align_corners=align_corners)

    return RowMap(size, read)


def doubled(maps: RowMap) -> RowMap:
    """Every pixel four times: ``F.interpolate(maps, scale_factor=2, mode="nearest")``."""

    def read(first: int, last: int) -> Tensor:
        begin = first // 2
        twice = F.interpolate(maps.read(begin, (last + 1) // 2), scale_factor=2.0, mode="nearest")
        return twice[:, :, first - 2 * begin : last - 2 * begin]

    return RowMap((2 * maps.size[0], 2 * maps.size[1]), read)


def group_normed(norm: nn.GroupNorm, maps: RowMap, device: torch.device) -> RowMap:
    """GroupNorm, whose statistics are those of the whole map: it is read once to compute them."""
    sums: list[Tensor] = []
    for _, band in maps.bands(norm.num_channels * maps.size[1], device):
        groups = band.unflatten(1, (norm.num_groups, -1)).flatten(2).double()
        sums.append(torch.stack([groups.sum(2), groups.square().sum(2)]))
    total, square = torch.stack(sums).sum(0) / (maps.size[0] * maps.size[1] * norm.num_channels // norm.num_groups)
    deviation = (square - total.square() + norm.eps).sqrt()
    mean, factor = (part.repeat_interleave(norm.num_channels // norm.num_groups, 1) for part in (total, 1 / deviation))
    factor = factor * norm.weight
    shift = norm.bias - mean * factor

    def normalise(part: Tensor) -> Tensor:
        return torch.addcmul(shift.to(part.dtype)[..., None, None], part, factor.to(part.dtype)[..., None, None])

    return each_pixel(normalise, maps)


def added(maps: Sequence[RowMap]) -> RowMap:
    """The sum of at least two maps of one size."""

    def read(first: int, last: int) -> Tensor:
        # what a map returns may be a part of it, which must not be overwritten; the first sum is new
        total = maps[0].read(first, last) + maps[1].read(first, last)
        for part in maps[2:]:
            total += part.read(first, last)
        return total

    return RowMap(maps[0].size, read)


def joined(maps: Sequence[RowMap]) -> RowMap:
    """The channels of several maps of one size, one after the other."""
    return RowMap(maps[0].size, lambda first, last: torch.cat([part.read(first, last) for part in maps], dim=1))


def rows_likeliest(logits: RowMap, row_numbers: int, device: torch.device, *, least: int = 1) -> Tensor:
    """The most probable class of each pixel [B, H, W] of logits that are reduced to classes in bands.

    There are as many labels as pixels, so their dtype is the smallest one that has all classes.

    row_numbers, least: see `RowMap.bands`.
    """
    labels: Tensor | None = None
    for rows, band in logits.bands(row_numbers, device, least=least):
        best, found = band.max(1)
        if best.isnan().any():
            raise UserError("the model's logits are not numbers (NaN)")
        if labels is None:
            dtype = next(each for each in LABEL_DTYPES if band.shape[1] - 1 <= torch.iinfo(each).max)
            labels = found.new_empty(len(found), *logits.size, dtype=dtype)
        labels[:, rows] = found
    assert labels is not None, "a map has rows"
    return labels
