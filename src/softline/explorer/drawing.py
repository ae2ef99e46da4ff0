"""Pictures of the page: the photograph with the query, and heat maps over the image."""

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from softline.layers.grid import GridSize
from softline.plotting.colors import COOL, WARM

SIDE = 560
"""Side of every picture in pixels; clicks are counted in them."""
STRENGTH = 0.9
"""Opacity of the strongest weight's colour over the image."""
Pixels = npt.NDArray[np.float32]


def draw_photograph(image: Image.Image, query: tuple[float, float]) -> Image.Image:
    """Draw a ring around the query (x, y), each coordinate from 0 to 1, on a square image."""
    picture = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(picture)
    x, y = (part * SIDE for part in query)
    for radius, width, color in ((13, 5, "black"), (12, 3, "white")):
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), outline=color, width=width)
    return picture


def draw_map(image: Tensor, contrast: Tensor, cell: tuple[int, int]) -> Image.Image:
    """Draw the weights of a query over the image in grey: orange above their mean, blue below.

    image: [C, H, W] with values from 0 to 1.
    contrast: [height, width] with values from -1 to 1.
    cell: row and column of the query in the grid.
    """
    ground = _enlarged(image.mean(0))[..., None]  # [SIDE, SIDE, 1]
    weights = _enlarged(contrast)[..., None]
    color = np.where(weights > 0, np.array(WARM, np.float32), np.array(COOL, np.float32)) / 255
    # the power makes weak differences visible
    part = STRENGTH * np.abs(weights) ** 0.7
    mixed = (1 - part) * (0.15 + 0.7 * ground) + part * color
    picture = Image.fromarray((mixed * 255).round().astype(np.uint8))
    _mark(picture, cell, (contrast.shape[0], contrast.shape[1]))
    return picture


def _enlarged(values: Tensor) -> Pixels:
    """Enlarge [height, width] to [SIDE, SIDE] by repetition, so that patches keep their edges."""
    rows, columns = (torch.arange(SIDE) * count // SIDE for count in values.shape)
    pixels: Pixels = values.float()[rows][:, columns].numpy()
    return pixels


def _mark(picture: Image.Image, cell: tuple[int, int], grid_size: GridSize) -> None:
    """Draw a frame around the query's patch, outside of it so that its own weight stays visible."""
    (row, column), (height, width) = cell, grid_size
    top, left = row * SIDE // height, column * SIDE // width
    bottom, right = (row + 1) * SIDE // height, (column + 1) * SIDE // width
    pen = ImageDraw.Draw(picture)
    for distance, color in ((5, "black"), (3, "white")):
        frame = (left - distance, top - distance, right - 1 + distance, bottom - 1 + distance)
        inside = tuple(min(max(edge, 0), SIDE - 1) for edge in frame)
        pen.rectangle(inside, outline=color, width=3 if color == "white" else 5)
