"""Predictions drawn on photographs: boxes and masks with names, or a colour for each pixel with a legend."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.utils import draw_segmentation_masks

# of the colour that covers a pixel
OPACITY = 0.55
# what an image's long side has for text and lines of their usual size
USUAL_SIDE = 640


def draw_detections(
    image: Image.Image, found: dict[str, Tensor], classes: Sequence[str], colours: NDArray[np.uint8]
) -> Image.Image:
    """Boxes with their class and score and, where there are any, masks; the best on top.

    found: boxes [n, 4] as x1, y1, x2, y2 in the image's pixels, labels [n], scores [n], masks [n, H, W] bool.
    colours: by label, [K, 3]; they begin again if there are more classes.
    """
    names = [tuple(int(part) for part in colours[label % len(colours)]) for label in found["labels"].tolist()]
    # the last drawn covers the others
    order = list(reversed(range(len(names))))
    drawn = image.convert("RGB")
    if "masks" in found and order:
        pixels = torch.from_numpy(np.array(drawn)).permute(2, 0, 1)
        masks = draw_segmentation_masks(pixels, found["masks"][order], OPACITY, [names[place] for place in order])
        drawn = Image.fromarray(masks.permute(1, 2, 0).numpy())
    canvas, size = ImageDraw.Draw(drawn), _text_size(drawn)
    for place in order:
        label, score = int(found["labels"][place]), float(found["scores"][place])
        box = found["boxes"][place].tolist()
        canvas.rectangle(box, outline=names[place], width=max(size // 7, 2))
        _write(canvas, box[0], box[1] - 1, f"{classes[label]} {100 * score:.0f} %", names[place], size, drawn.size)
    return drawn


def draw_labels(image: Image.Image, labels: Tensor, classes: Sequence[str], colours: NDArray[np.uint8]) -> Image.Image:
    """A class for each pixel as a colour over the image, and beside it a legend of the classes that occur.

    labels: [H, W], 0 to K - 1.
    """
    pixels = np.asarray(image.convert("RGB"), np.float32)
    overlay = (1 - OPACITY) * pixels + OPACITY * colours[labels.numpy()]
    covered = Image.fromarray(overlay.round().astype(np.uint8))
    counts = torch.bincount(labels.flatten(), minlength=len(classes))
    shares = [(label, int(counts[label]) / labels.numel()) for label in counts.argsort(descending=True).tolist()]
    return _beside(covered, _legend([row for row in shares if row[1] > 0], classes, colours, covered.height))


def _legend(
    shares: Sequence[tuple[int, float]], classes: Sequence[str], colours: NDArray[np.uint8], height: int
) -> Image.Image:
    """A line for each class: its colour, its name, its share of the pixels; as many as fit, the largest first."""
    size = max(min(height // 24, 18), 10)
    line, font = size + size // 2, _font(size)
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


def _beside(left: Image.Image, right: Image.Image) -> Image.Image:
    both = Image.new("RGB", (left.width + right.width, max(left.height, right.height)), "white")
    both.paste(left, (0, 0))
    both.paste(right, (left.width, 0))
    return both


def _write(
    canvas: ImageDraw.ImageDraw,
    x: float,
    y: float,
    text: str,
    colour: tuple[int, ...],
    size: int,
    bounds: tuple[int, int],
) -> None:
    """A text on its colour, above (x, y) where there is room."""
    font: Any = _font(size)
    left, top, right, bottom = canvas.textbbox((0, 0), text, font=font)
    width, height = right - left + 4, bottom - top + 4
    x = min(max(x, 0), max(bounds[0] - width, 0))
    y = y - height if y >= height else y + 1
    canvas.rectangle((x, y, x + width, y + height), fill=colour)
    # black or white, whichever is farther from the colour as the eye sees it
    bright = 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] > 140
    canvas.text((x + 2 - left, y + 2 - top), text, fill="black" if bright else "white", font=font)


def _text_size(image: Image.Image) -> int:
    return max(round(14 * max(image.size) / USUAL_SIDE), 10)


def _font(size: int) -> Any:
    return ImageFont.load_default(size)
