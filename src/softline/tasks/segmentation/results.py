"""The class of each pixel of an image."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from softline.engine.trained import Result
from softline.tasks.segmentation.drawing import draw_labels

# the classes that a line of text names
NAMED_CLASSES = 6


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LabelMap(Result):
    """The class of each pixel, at the size of the image."""

    image: Image.Image
    class_names: tuple[str, ...]
    """Names by label."""
    labels: Tensor
    """[H, W], int64, from 0 to the number of classes - 1."""
    colours: NDArray[np.uint8]
    """Colours by label [K, 3]."""
    name: str | None = None

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the pixels by the names of the classes that occur, in the order of the labels."""
        counts = torch.bincount(self.labels.flatten(), minlength=len(self.class_names)).tolist()
        named = zip(self.class_names, counts, strict=True)
        return {name: count / self.labels.numel() for name, count in named if count}

    def __str__(self) -> str:
        largest = sorted(self.shares.items(), key=lambda item: -item[1])[:NAMED_CLASSES]
        return ", ".join(f"{name} {100 * share:.0f} %" for name, share in largest)

    def to_dict(self) -> dict[str, Any]:
        """Return the name and the shares of the pixels; `label_image` has the labels themselves."""
        return {"name": self.name, "pixels": self.shares}

    def draw(self) -> Image.Image:
        """Draw a colour for each class over the image, with a legend on the right."""
        return draw_labels(self.image, self.labels, self.class_names, self.colours)

    def label_image(self) -> Image.Image:
        """Return the labels as the grey values of an image."""
        return Image.fromarray(self.labels.numpy().astype(np.uint8))

    def drawings(self) -> dict[str, Image.Image]:
        return {"": self.draw(), "_labels": self.label_image()}
