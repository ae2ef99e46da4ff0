"""Large maps computed in bands of rows in evaluation, so that nothing but inputs and results has their size."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor, nn

from softline.layers.tokenwise import runs_in_parts
from softline.ops.chunks import may_overwrite

# numbers in the largest tensor of a band: 16 MB in float32; other devices run fastest with few and large kernels
CPU_BAND_NUMBERS = 2**22
OTHER_BAND_NUMBERS = 2**27

_SHARE: ContextVar[float] = ContextVar("share of a band", default=1.0)


def band_numbers(device: torch.device) -> int:
    """Numbers in the largest tensor of a band on a device."""
    return int(_SHARE.get() * (CPU_BAND_NUMBERS if device.type == "cpu" else OTHER_BAND_NUMBERS))


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


def for_each_band(
    module: nn.Module,
    function: Callable[[Tensor], Tensor],
    maps: Tensor,
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
        return function(maps)
    total = -(-maps.shape[2] // stride)
    bands = row_bands(total, len(maps) * row_numbers, maps.device, reach=reach)
    if len(bands) <= 1:
        return function(maps)
    out: Tensor | None = None
    for band in bands:
        found = function(maps[:, :, stride * band.around.start : stride * band.around.stop])[:, :, band.inside]
        if out is None:
            batch, channels, _, width = found.shape
            out = found.new_empty(batch, total, width, channels).permute(0, 3, 1, 2)
        out[:, :, band.rows] = found
    assert out is not None, "there are several bands"
    return out
