"""Trained detectors: evaluate them, draw what they find on images."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor

from softline.checks import check_range
from softline.data.coco.source import encode_mask
from softline.data.images.single import read_image
from softline.data.semantic.classes import palette
from softline.engine.trained import Evaluator, ImageView, Measured, Prediction, Trained
from softline.heads.detectors import Detector
from softline.tasks.detection.build import detection_val_set
from softline.tasks.detection.drawing import draw_detections
from softline.tasks.detection.recipe import DetectionRecipe
from softline.tasks.detection.task import Detection
from softline.tasks.images import backbone_view, check_trained_classes


class TrainedDetector(Trained):
    """A model that finds the boxes, and with Mask R-CNN and its cascade the masks, of objects."""

    kind = "a detector"
    unit = "images"
    drawings = ("",)
    model: Detector
    recipe: DetectionRecipe

    def evaluate(
        self,
        data: str | None,
        evaluator: Evaluator,
        *,
        split: str | None = None,
        annotations: str | None = None,
        skip_corrupt: bool = False,
    ) -> Iterator[Measured]:
        """Measure COCO's average precision.

        data: a directory in COCO's layout.
        annotations: the JSON file; defaults to its place in COCO's layout.
        """
        given = self.recipe.data
        # a file named in the recipe belongs to the recipe's images
        moved = data is not None or split is not None
        given = dataclasses.replace(
            given,
            source=data or given.source,
            val_split=split or given.val_split,
            val_annotations=annotations if moved or annotations is not None else given.val_annotations,
            skip_corrupt=skip_corrupt,
        )
        val_set = detection_val_set(self.recipe.replace(data=given), notify=evaluator.notify)
        check_trained_classes(self.classes, val_set.source.classes, given.source)
        task = Detection(self.model, self.classes, val_set=val_set, masks=val_set.masks)
        yield Measured({"source": given.source, "split": given.val_split}, evaluator.run(task, batch_size=1))

    def predict(self, paths: Sequence[str], *, score: float = 0.5) -> Iterator[Prediction]:
        """Find objects and draw them.

        score: only objects with a higher score are kept.
        """
        check_range("--score", score, 0, 1, open_high=True)
        self.model.eval()
        self.model.score_threshold = score
        return (self._predict(path, read_image(path, "RGB")) for path in paths)

    def _predict(self, path: str, image: Image.Image) -> Prediction:
        pixels = (pil_to_tensor(image).float() / 255).to(self.device)
        with torch.no_grad():
            (found,) = self.model([pixels])
        found = {name: value.cpu() for name, value in found.items()}
        names = [self.classes[label] for label in found["labels"].tolist()]
        objects: list[dict[str, Any]] = [
            {"class": name, "score": score, "box": box}
            for name, score, box in zip(names, found["scores"].tolist(), found["boxes"].tolist(), strict=True)
        ]
        if "masks" in found:
            for each, mask in zip(objects, found["masks"].numpy(), strict=True):
                each["mask"] = encode_mask(mask)
        drawn = draw_detections(image, found, self.classes, palette(min(len(self.classes), 255)))
        text = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)) or "no objects"
        return Prediction(path, {"objects": objects}, text, {"": drawn})

    def view(self) -> ImageView:
        return backbone_view(self.model, self.name)
