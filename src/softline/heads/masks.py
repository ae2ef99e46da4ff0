"""Masks of objects, pasted into their image one at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torchvision.models.detection.roi_heads import paste_masks_in_image


class ObjectMasks:
    """The masks of n objects in an image, [H, W] bool each, pasted whenever they are asked for.

    100 masks of an image of 24 megapixels would need 2.4 GB, and torchvision's probabilities four times as much.

    cut_outs: probabilities inside the boxes [n, 1, S, S].
    boxes: x1, y1, x2, y2 in the image's pixels [n, 4].
    size: rows and columns of the image.
    """

    def __init__(self, cut_outs: Tensor, boxes: Tensor, size: tuple[int, int]) -> None:
        self.cut_outs, self.boxes, self.size = cut_outs, boxes, size

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, place: int) -> Tensor:
        one = range(len(self))[place]
        return paste_masks_in_image(self.cut_outs[one, None], self.boxes[one, None], self.size)[0, 0] >= 0.5

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.__getitem__, range(len(self)))

    def select(self, kept: Tensor) -> "ObjectMasks":
        """Return the masks of some objects, on the CPU; kept is bool [n] or their numbers."""
        return ObjectMasks(self.cut_outs[kept].cpu(), self.boxes[kept].cpu(), self.size)

    def whole(self) -> Tensor:
        """Return all masks as one tensor [n, H, W]."""
        masks = torch.empty(len(self), *self.size, dtype=torch.bool, device=self.boxes.device)
        for place, mask in enumerate(self):
            masks[place] = mask
        return masks
