"""Overlapping windows of large images."""

from dataclasses import dataclass

from softline.checks import check_integer
from softline.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SlidingWindows:
    """Overlapping windows into which an image is cut for inference.

    The last windows end at the border, as in mmsegmentation; an image smaller than a window is one window.
    """

    crop: tuple[int, int]
    """Rows and columns of a window."""
    stride: tuple[int, int]
    """Rows and columns from one window to the next."""
    batch: int = 8
    """Windows in one batch."""

    def __post_init__(self) -> None:
        for crop, stride in zip(self.crop, self.stride, strict=True):
            check_integer("crop", crop, 1)
            check_integer("stride", stride, 1)
            if stride > crop:
                raise UserError(f"stride {self.stride} must not exceed crop {self.crop}: it would leave gaps")
        check_integer("batch", self.batch, 1)

    def places(self, height: int, width: int) -> list[tuple[slice, slice]]:
        """Return rows and columns of each window; all windows have the same size."""
        return [
            (rows, columns)
            for rows in _spans(height, self.crop[0], self.stride[0])
            for columns in _spans(width, self.crop[1], self.stride[1])
        ]


def _spans(length: int, crop: int, stride: int) -> list[slice]:
    size = min(crop, length)
    starts = [*range(0, length - size, stride), length - size]
    return [slice(start, start + size) for start in starts]
