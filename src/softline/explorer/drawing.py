"""Pictures for the page: an image with a map of weights over it, the query's patch marked."""

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from softline.layers.grid import GridSize
from softline.plotting.colors import COOL, WARM

# pixels of every picture's side; clicks are counted in them
SIDE = 560
# of the strongest weight's colour over the image
STRENGTH = 0.9
Pixels = npt.NDArray[np.float32]


def draw_photograph(image: Image.Image, query: tuple[float, float]) -> Image.Image:
    """A square image with a ring around the query (x, y), each from 0 to 1."""
    picture = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(picture)
    x, y = (part * SIDE for part in query)
    for radius, width, color in ((13, 5, "black"), (12, 3, "white")):
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), outline=color, width=width)
    return picture


def draw_map(image: Tensor, contrast: Tensor, cell: tuple[int, int]) -> Image.Image:
    """The weights of a query over what the model saw, in grey: orange above their mean, blue below.

    image: [C, H, W] of 0 to 1.
    contrast: [height, width] of -1 to 1.
    cell: row and column of the query in the grid.
    """
    ground = _enlarged(image.mean(0))[..., None]  # [SIDE, SIDE, 1]
    weights = _enlarged(contrast)[..., None]
    color = np.where(weights > 0, np.array(WARM, np.float32), np.array(COOL, np.float32)) / 255
    # weak differences are to be seen too
    part = STRENGTH * np.abs(weights) ** 0.7
    mixed = (1 - part) * (0.15 + 0.7 * ground) + part * color
    picture = Image.fromarray((mixed * 255).round().astype(np.uint8))
    _mark(picture, cell, (contrast.shape[0], contrast.shape[1]))
    return picture


def _enlarged(values: Tensor) -> Pixels:
    """[height, width] -> [SIDE, SIDE] by repeating: a patch stays a patch."""
    rows, columns = (torch.arange(SIDE) * count // SIDE for count in values.shape)
    pixels: Pixels = values.float()[rows][:, columns].numpy()
    return pixels


def _mark(picture: Image.Image, cell: tuple[int, int], grid_size: GridSize) -> None:
    """A frame around the query's patch, outside of it so that its own weight is seen."""
    (row, column), (height, width) = cell, grid_size
    top, left = row * SIDE // height, column * SIDE // width
    bottom, right = (row + 1) * SIDE // height, (column + 1) * SIDE // width
    pen = ImageDraw.Draw(picture)
    for distance, color in ((5, "black"), (3, "white")):
        frame = (left - distance, top - distance, right - 1 + distance, bottom - 1 + distance)
        inside = tuple(min(max(edge, 0), SIDE - 1) for edge in frame)
        pen.rectangle(inside, outline=color, width=3 if color == "white" else 5)
