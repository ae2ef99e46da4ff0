"""The class of each pixel drawn on photographs, with a legend."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from softline.tasks.drawing import beside, cover, pillow_font


def draw_labels(image: Image.Image, labels: Tensor, classes: Sequence[str], colours: NDArray[np.uint8]) -> Image.Image:
    """Colour each pixel by its class, and add a legend of the classes that occur.

    labels: [H, W], 0 to K - 1.
    """
    pixels = np.array(image.convert("RGB"))
    cover(pixels, lambda rows: colours[labels[rows].numpy()])
    covered = Image.fromarray(pixels)
    counts = torch.bincount(labels.flatten(), minlength=len(classes))
    shares = [(label, int(counts[label]) / labels.numel()) for label in counts.argsort(descending=True).tolist()]
    return beside(covered, _legend([row for row in shares if row[1] > 0], classes, colours, covered.height))


def _legend(
    shares: Sequence[tuple[int, float]], classes: Sequence[str], colours: NDArray[np.uint8], height: int
) -> Image.Image:
    """Draw a line for each class with its colour, name and share of the pixels, the largest first, as many as fit."""
    size = max(min(height // 24, 18), 10)
    line, font = size + size // 2, pillow_font(size)
    fitting = max((height - size) // line, 1)
    if len(shares) > fitting:
        shares, hidden = shares[: fitting - 1], len(shares) - fitting + 1
    else:
        hidden = 0
    texts = [f"{classes[label]}  {100 * share:.0f} %" for label, share in shares]
    texts += [f"and {hidden} more"] if hidden else []
    width = round(max(font.getlength(text) for text in texts)) + 3 * size
    legend = Image.new("RGB", (width, max(height, line * len(texts) + size)), "white")
    canvas = ImageDraw.Draw(legend)
    for row, text in enumerate(texts):
        top = size // 2 + row * line
        if row < len(shares):
            colour = tuple(int(part) for part in colours[shares[row][0]])
            canvas.rectangle((size // 2, top, size // 2 + size, top + size), fill=colour, outline="black")
        canvas.text((2 * size, top + size / 2), text, fill="black", font=font, anchor="lm")
    return legend
