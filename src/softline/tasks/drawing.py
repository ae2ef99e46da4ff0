"""What pictures of predictions have in common."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

# opacity of a colour that covers a pixel
OPACITY = 0.55
# rows that are coloured at once: as floating-point numbers a whole photograph would take a gigabyte
BAND = 256
# colours of a bar and of the ground that it grows on
BAR, GROUND = (11, 110, 153), (232, 232, 232)
MOST_BARS = 10


def pillow_font(size: int) -> Any:
    """Return Pillow's own font at a size in pixels."""
    return ImageFont.load_default(size)


def cover(pixels: NDArray[np.uint8], colours: Callable[[slice], NDArray[np.uint8]]) -> None:
    """Cover an image [H, W, 3] with colours that it shines through, in place.

    colours: returns the colours [rows, W, 3] of a band of rows.
    """
    for first in range(0, len(pixels), BAND):
        rows = slice(first, first + BAND)
        covered = (1 - OPACITY) * pixels[rows].astype(np.float32) + OPACITY * colours(rows)
        pixels[rows] = covered.round()


def beside(left: Image.Image, right: Image.Image) -> Image.Image:
    """Put two images side by side on white, at the top."""
    both = Image.new("RGB", (left.width + right.width, max(left.height, right.height)), "white")
    both.paste(left, (0, 0))
    both.paste(right, (left.width, 0))
    return both


def enlarge(image: Image.Image, height: int) -> Image.Image:
    """Enlarge an image by a whole number, so that it is about as high as ``height``; larger ones keep their size."""
    factor = max(round(height / image.height), 1)
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def draw_bars(rows: Sequence[tuple[str, float]], size: int) -> Image.Image:
    """Draw a name, a percentage and a bar for each share from 0 to 1, in their order; at most `MOST_BARS` of them.

    size: size of the text in pixels.
    """
    font, line, thick = pillow_font(size), round(2.2 * size), max(size // 4, 3)
    shown = [(name.replace("\n", "\\n"), f"{100 * share:.1f} %", share) for name, share in rows[:MOST_BARS]]
    texts = max(font.getlength(name) + font.getlength(percent) for name, percent, _ in shown)
    inner = max(round(texts) + 2 * size, 12 * size)
    panel = Image.new("RGB", (inner + 2 * size, line * len(shown) + size), "white")
    canvas = ImageDraw.Draw(panel)
    for row, (name, percent, share) in enumerate(shown):
        middle = row * line + size + size // 4
        canvas.text((size, middle), name, fill="black", font=font, anchor="lm")
        canvas.text((size + inner, middle), percent, fill="black", font=font, anchor="rm")
        top = middle + round(0.7 * size)
        canvas.rectangle((size, top, size + inner - 1, top + thick - 1), fill=GROUND)
        if (filled := round(share * inner)) > 0:
            canvas.rectangle((size, top, size + filled - 1, top + thick - 1), fill=BAR)
    return panel
