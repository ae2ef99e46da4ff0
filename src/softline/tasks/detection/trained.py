"""Trained detectors: evaluate them, find objects on images."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torchvision.transforms.v2.functional import pil_to_tensor

from softline.checks import check_range
from softline.engine.footprint import check_image_memory
from softline.engine.graph import Description, Graph, Sizes, image_graph
from softline.engine.shipping import describe_recipe
from softline.engine.trained import Evaluator, ImageView, Measured, Trained
from softline.errors import UserError
from softline.heads.detection_graph import detection_graph
from softline.heads.detectors import Detector
from softline.tasks.detection.build import detection_val_set
from softline.tasks.detection.recipe import DetectionRecipe
from softline.tasks.detection.results import Detections
from softline.tasks.detection.task import Detection
from softline.tasks.images import backbone_view, check_trained_classes
from softline.tasks.predicting import Photograph, predict_images

# one pixel of the coarsest map
LEAST_SIDE = 32


class TrainedDetector(Trained):
    """A model that finds the boxes, and with Mask R-CNN and its cascade the masks, of objects."""

    kind = "a detector"
    unit = "images"
    drawings = ("",)
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

    def predict(self, inputs: Any, *, score: float = 0.5, batch_size: int = 8) -> Any:
        """Find objects: return `Detections` for an image, a list of them for a list of images.

        inputs: paths, Pillow images, arrays or tensors; see `softline.data.images.single.to_image`.
        score: only objects with a higher score are kept.
        batch_size: the largest number of images that are on the model's device at once; each runs on its own.
        """
        check_range("score", score, 0, 1, open_high=True)
        self.model.eval()
        with _score_threshold(self.model, score):
            return predict_images(inputs, partial(self._find, score=score), mode="RGB", batch_size=batch_size)

    def _find(self, photographs: Sequence[Photograph], *, score: float) -> list[Detections]:
        if isinstance(self.model, Detector):
            for each in photographs:
                self._check_memory(self.model, each.image.height, each.image.width)
        with torch.no_grad():
            results = self.model([pil_to_tensor(each.image).to(self.device) for each in photographs])
        return [self._detections(each, found, score) for each, found in zip(photographs, results, strict=True)]

    def _check_memory(self, model: Detector, height: int, width: int) -> None:
        size = model.resized((height, width))
        instead = f"lower data.short_side and data.long_side of the recipe, which make it {size[1]} x {size[0]}"
        check_image_memory(model, model.features, size, what="an image", instead=instead)

    def _detections(self, photograph: Photograph, found: dict[str, Any], score: float) -> Detections:
        kept = found["scores"] > score
        boxes, labels, scores = (found[name][kept].cpu() for name in ("boxes", "labels", "scores"))
        return Detections(
            image=photograph.image,
            class_names=self.classes,
            boxes=boxes,
            labels=labels,
            scores=scores,
            object_masks=found["masks"].select(kept) if "masks" in found else None,
            name=photograph.name,
        )

    def graph(self) -> Graph:
        data, detector = self.recipe.data, self._detector()
        outputs = {"boxes": ("found", None), "scores": ("found",), "labels": ("found",)}
        if detector.masks:
            outputs["masks"] = ("found", None, None)
        side = min(data.short_side, data.long_side)
        described = image_graph(
            detection_graph(detector), outputs, size=(side, side), least=LEAST_SIDE, mean=None, std=None
        )
        # one image at a time: each has a number of objects of its own
        return dataclasses.replace(described, axes=(None, *described.axes[1:]))

    def describe(self, fixed: Sizes) -> Description:
        facts = {"classes": list(self.classes), "score_threshold": self._detector().score_threshold}
        return describe_recipe(self.recipe, facts)

    def _detector(self) -> Detector:
        assert isinstance(self.model, Detector), "only checkpoints are exported"
        return self.model

    def view(self) -> ImageView:
        return backbone_view(self.model, self.name)


@contextmanager
def _score_threshold(model: nn.Module, score: float) -> Iterator[None]:
    """Let a detector find all objects with a higher score; afterwards it has its own threshold again."""
    own = getattr(model, "score_threshold", 0.0)
    if not isinstance(model, Detector):
        # the threshold of other networks, such as exported ones, is fixed
        if score < own:
            raise UserError(f"score must be at least {own:g}, which this detector was made with, got {score:g}")
        yield
        return
    model.score_threshold = score
    try:
        yield
    finally:
        model.score_threshold = own
