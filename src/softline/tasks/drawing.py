"""What pictures of predictions have in common."""

from typing import Any

from PIL import ImageFont

# opacity of a colour that covers a pixel
OPACITY = 0.55


def pillow_font(size: int) -> Any:
    """Return Pillow's own font at a size in pixels."""
    return ImageFont.load_default(size)
