"""Boxes and masks drawn on photographs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from softline.heads.masks import ObjectMasks
from softline.tasks.drawing import cover, pillow_font

# length of an image's long side for which text and lines have their usual size
USUAL_SIDE = 640


def draw_detections(
    image: Image.Image,
    found: dict[str, Tensor],
    classes: Sequence[str],
    colours: NDArray[np.uint8],
    *,
    masks: ObjectMasks | None = None,
) -> Image.Image:
    """Draw boxes with class and score, and masks if there are any, the best object on top.

    found: boxes [n, 4] as x1, y1, x2, y2 in the image's pixels, labels [n], scores [n].
    colours: [K, 3] by label; they repeat if there are more classes.
    """
    names = [tuple(int(part) for part in colours[label % len(colours)]) for label in found["labels"].tolist()]
    # what is drawn last covers the rest
    order = list(reversed(range(len(names))))
    drawn = image.convert("RGB")
    if masks is not None and order:
        pixels = np.array(drawn)
        coloured = pixels.copy()
        for place in order:
            coloured[masks[place].numpy()] = names[place]
        cover(pixels, coloured.__getitem__)
        drawn = Image.fromarray(pixels)
    canvas, size = ImageDraw.Draw(drawn), _text_size(drawn)
    for place in order:
        label, score = int(found["labels"][place]), float(found["scores"][place])
        box = found["boxes"][place].tolist()
        canvas.rectangle(box, outline=names[place], width=max(size // 7, 2))
        _write(canvas, box[0], box[1] - 1, f"{classes[label]} {100 * score:.0f} %", names[place], size, drawn.size)
    return drawn


def _write(
    canvas: ImageDraw.ImageDraw,
    x: float,
    y: float,
    text: str,
    colour: tuple[int, ...],
    size: int,
    bounds: tuple[int, int],
) -> None:
    """Write a text on a coloured ground, above (x, y) if there is room."""
    font: Any = pillow_font(size)
    left, top, right, bottom = canvas.textbbox((0, 0), text, font=font)
    width, height = right - left + 4, bottom - top + 4
    x = min(max(x, 0), max(bounds[0] - width, 0))
    y = y - height if y >= height else y + 1
    canvas.rectangle((x, y, x + width, y + height), fill=colour)
    # black or white, whichever has more contrast to the colour
    bright = 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] > 140
    canvas.text((x + 2 - left, y + 2 - top), text, fill="black" if bright else "white", font=font)


def _text_size(image: Image.Image) -> int:
    return max(round(14 * max(image.size) / USUAL_SIDE), 10)
