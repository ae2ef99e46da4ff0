"""Predictions drawn on photographs: boxes and masks with names, or a colour for each pixel with a legend."""

from typing import Any

from PIL import ImageFont

# of the colour that covers a pixel
OPACITY = 0.55


def _font(size: int) -> Any:
    return ImageFont.load_default(size)
