"""The part of a trained model that can be exported: a network with one input, and what is known about it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from softline.data.images.photographs import PHOTOGRAPHS, open_photograph

BATCH, HEIGHT, WIDTH, LENGTH = "batch", "height", "width", "length"
IMAGE_AXES = (BATCH, None, HEIGHT, WIDTH)

Sizes = Mapping[str, int]
"""Length of each axis that has a name."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A network to export."""

    network: nn.Module
    """Takes one tensor, and returns one or a tuple of them."""
    input: str
    """Name of the input."""
    axes: tuple[str | None, ...]
    """Names of the input's axes that may have any length; None for the others."""
    outputs: Mapping[str, tuple[str | None, ...]]
    """Names of the outputs, each with the names of its axes."""
    usual: Sizes
    """Lengths that the network is used with, other than the batch's."""
    least: Sizes = field(default_factory=dict)
    """Smallest length of each axis; 1 for those that are left out."""
    most: Sizes = field(default_factory=dict)
    """Largest length of each axis that has one."""
    sample: Callable[..., Tensor]
    """Makes a realistic input of given lengths; networks of images also take the images that it is made of."""
    mean: tuple[float, ...] | None = None
    """Mean of each channel, for networks that take normalised images."""
    std: tuple[float, ...] | None = None


def image_graph(
    network: nn.Module,
    outputs: Mapping[str, tuple[str | None, ...]],
    *,
    size: tuple[int, int],
    least: int = 1,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    mode: str = "RGB",
) -> Graph:
    """Describe a network of images [B, C, H, W].

    size: rows and columns that it is used with.
    least: smallest side of an image.
    mean, std: of each channel, if it takes normalised images; otherwise their values are 0 to 1.
    """

    def sample(sizes: Sizes, images: Sequence[Image.Image] = ()) -> Tensor:
        pixels = photographs(sizes, mode=mode, images=images)
        if mean is None or std is None:
            return pixels
        of_each = (1, -1, 1, 1)
        return (pixels - torch.tensor(mean).reshape(of_each)) / torch.tensor(std).reshape(of_each)

    return Graph(
        network=network,
        input="images",
        axes=IMAGE_AXES,
        outputs=outputs,
        usual={HEIGHT: size[0], WIDTH: size[1]},
        least={HEIGHT: least, WIDTH: least},
        sample=sample,
        mean=None if mean is None else tuple(mean),
        std=None if std is None else tuple(std),
    )


def photographs(sizes: Sizes, *, mode: str = "RGB", images: Sequence[Image.Image] = ()) -> Tensor:
    """Return a batch of images [B, C, H, W] with values in 0 to 1, by default of the package's photographs.

    Images that repeat are mirrored.
    """
    known = list(images) or [open_photograph(name) for name in PHOTOGRAPHS]
    size = (sizes[WIDTH], sizes[HEIGHT])
    batch = []
    for place in range(sizes[BATCH]):
        image = known[place % len(known)].convert(mode).resize(size, Image.Resampling.BICUBIC)
        if place // len(known) % 2:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        values = torch.from_numpy(np.array(image)).float() / 255
        batch.append(values[None] if mode == "L" else values.permute(2, 0, 1))
    return torch.stack(batch)


Description = dict[str, Any]
"""What an exported file must know to be used again, as plain values; see `softline.engine.trained.Trained.describe`."""
