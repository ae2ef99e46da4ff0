"""The objects that a detector finds in an image."""

from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import Tensor

from softline.data.coco.source import encode_mask
from softline.data.semantic.classes import palette
from softline.engine.trained import Result
from softline.heads.masks import ObjectMasks
from softline.tasks.detection.drawing import draw_detections

# colours that can be told apart; they repeat
MOST_COLOURS = 255


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Detections(Result):
    """The n objects in an image, the one with the highest score first."""

    image: Image.Image
    class_names: tuple[str, ...]
    """Names by label."""
    boxes: Tensor
    """[n, 4]: x1, y1, x2, y2 in the image's pixels."""
    labels: Tensor
    """[n], int64."""
    scores: Tensor
    """[n], from 0 to 1."""
    object_masks: ObjectMasks | None = None
    """The masks one at a time, [H, W] bool each; None if the detector finds boxes only."""
    name: str | None = None

    @property
    def masks(self) -> Tensor | None:
        """All masks as one tensor [n, H, W], bool, made anew each time; None if the detector finds boxes only."""
        return None if self.object_masks is None else self.object_masks.whole()

    @property
    def names(self) -> list[str]:
        """Class name of each object."""
        return [self.class_names[label] for label in self.labels.tolist()]

    def __str__(self) -> str:
        names = self.names
        return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)) or "no objects"

    def to_dict(self) -> dict[str, Any]:
        """Return the name and a dictionary for each object; masks are in COCO's run-length encoding."""
        objects: list[dict[str, Any]] = [
            {"class": name, "score": score, "box": box}
            for name, score, box in zip(self.names, self.scores.tolist(), self.boxes.tolist(), strict=True)
        ]
        if self.object_masks is not None:
            for each, mask in zip(objects, self.object_masks, strict=True):
                each["mask"] = encode_mask(mask.numpy())
        return {"name": self.name, "objects": objects}

    def draw(self) -> Image.Image:
        """Draw the boxes with class and score, and the masks, on the image."""
        found = {"boxes": self.boxes, "labels": self.labels, "scores": self.scores}
        colours = palette(min(len(self.class_names), MOST_COLOURS))
        return draw_detections(self.image, found, self.class_names, colours, masks=self.object_masks)
