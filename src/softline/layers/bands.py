"""Large maps computed in bands of rows in evaluation, so that nothing but inputs and results has their size."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softline.layers.tokenwise import runs_in_parts
from softline.ops.chunks import may_overwrite
from softline.process import return_memory

# numbers in the largest tensor of a band: 8 MB in float32; other devices run fastest with few and large kernels
CPU_BAND_NUMBERS = 2**21
OTHER_BAND_NUMBERS = 2**26
# bands in a tensor whose computation takes far longer than it takes to fault their memory in again
RETURNING_BANDS = 8

_SHARE: ContextVar[float] = ContextVar("share of a band", default=1.0)


def band_numbers(device: torch.device) -> int:
    """Numbers in the largest tensor of a band on a device."""
    return int(_SHARE.get() * (CPU_BAND_NUMBERS if device.type == "cpu" else OTHER_BAND_NUMBERS))


def return_bands(numbers: int, device: torch.device) -> None:
    """Return the memory of the bands of a large tensor with so many numbers: what follows has blocks of other sizes."""
    if numbers >= RETURNING_BANDS * band_numbers(device):
        return_memory()


@contextmanager
def shrunk_bands(share: float) -> Iterator[None]:
    """Let bands have this share of their size: a model of large images in small ones."""
    token = _SHARE.set(share)
    try:
        yield
    finally:
        _SHARE.reset(token)


class Band(NamedTuple):
    """Some rows of a map, and the rows around them that they depend on."""

    first: int
    last: int
    """The row after the last one."""
    before: int
    """Rows that are needed above the first one."""
    after: int
    """Rows that are needed from the last one on."""

    @property
    def rows(self) -> slice:
        return slice(self.first, self.last)

    @property
    def around(self) -> slice:
        return slice(self.first - self.before, self.last + self.after)

    @property
    def inside(self) -> slice:
        """The rows themselves among those of `around`."""
        return slice(self.before, self.before + self.last - self.first)


def row_bands(rows: int, row_numbers: int, device: torch.device, *, reach: int = 0, least: int = 1) -> list[Band]:
    """Cut ``rows`` into bands of equal height, the last one excepted.

    row_numbers: numbers in one row of the largest tensor that belongs to a band.
    reach: rows above and below that a row depends on.
    least: rows that a band has at least, if there are so many.
    """
    height = max(band_numbers(device) // max(row_numbers, 1), 4 * reach, least)
    starts = range(0, rows, height)
    ends = (min(first + height, rows) for first in starts)
    return [
        Band(first, last, min(reach, first), min(reach, rows - last)) for first, last in zip(starts, ends, strict=True)
    ]


@dataclass(frozen=True)
class ImageRows:
    """Images [B, C, H, W] whose rows are made when an embedding reads them, so that they need not exist as a whole."""

    shape: tuple[int, int, int, int]
    device: torch.device
    read: Callable[[int, int], Tensor]
    """Returns the rows from the first number up to the second [B, C, rows, W], both at most H."""

    @classmethod
    def of(cls, images: Tensor) -> "ImageRows":
        """The rows of images [B, C, H, W] that exist."""
        batch, channels, height, width = images.shape
        return cls((batch, channels, height, width), images.device, lambda first, last: images[:, :, first:last])

    @classmethod
    def stacked(cls, images: Sequence["ImageRows"]) -> "ImageRows":
        """Several images of one size as one batch."""
        if len(images) == 1:
            # not copied
            return images[0]
        batch = sum(each.shape[0] for each in images)
        read = [each.read for each in images]
        shape = (batch, *images[0].shape[1:])
        return cls(shape, images[0].device, lambda first, last: torch.cat([each(first, last) for each in read]))

    def padded(self, patch: int) -> "ImageRows":
        """Zero-pad at the bottom and the right to whole patches."""
        batch, channels, height, width = self.shape
        below, right = -height % patch, -width % patch
        if not below and not right:
            return self

        def read(first: int, last: int) -> Tensor:
            part = self.read(min(first, height), min(last, height))
            return F.pad(part, (0, right, 0, last - first - part.shape[2]))

        return ImageRows((batch, channels, height + below, width + right), self.device, read)

    def whole(self) -> Tensor:
        return self.read(0, self.shape[2])


def whole(maps: Tensor | ImageRows) -> Tensor:
    return maps.whole() if isinstance(maps, ImageRows) else maps


def _rows(maps: Tensor | ImageRows, first: int, last: int) -> Tensor:
    """Rows of maps [B, C, H, W], as far as there are any."""
    return maps.read(first, min(last, maps.shape[2])) if isinstance(maps, ImageRows) else maps[:, :, first:last]


def for_each_band(
    module: nn.Module,
    function: Callable[[Tensor], Tensor],
    maps: Tensor | ImageRows,
    *,
    stride: int,
    row_numbers: int,
    reach: int = 0,
) -> Tensor:
    """Return ``function(maps)`` for maps [B, C, H, W]; it is a step of ``module`` that is local, as convolutions are.

    In evaluation without gradients it is called with bands of rows if the maps are large. Its results have channels
    last in memory.

    stride: rows of the maps for each row of the result, which has ceil(H / stride) of them.
    row_numbers: numbers in the largest tensor that ``function`` makes for one row of the result.
    reach: rows of the result, above and below, whose part of the maps a row depends on; zeros beyond the borders of the
        maps are the function's own.
    """
    if not may_overwrite() or not runs_in_parts(module):
        return function(whole(maps))
    total = -(-maps.shape[2] // stride)
    bands = row_bands(total, maps.shape[0] * row_numbers, maps.device, reach=reach)
    if len(bands) <= 1:
        return function(whole(maps))
    out: Tensor | None = None
    for band in bands:
        found = function(_rows(maps, stride * band.around.start, stride * band.around.stop))[:, :, band.inside]
        if out is None:
            batch, channels, _, width = found.shape
            out = found.new_empty(batch, total, width, channels).permute(0, 3, 1, 2)
        assert found.shape[2] == band.last - band.first, "the function makes ceil(H / stride) rows"
        out[:, :, band.rows] = found
    assert out is not None, "there are several bands"
    del found
    return_bands(math.prod(maps.shape), maps.device)
    return out
