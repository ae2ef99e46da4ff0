"""Trained segmenters: evaluate them, colour the pixels of images by their class."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from PIL import Image

from softline.checks import check_option
from softline.data.images.single import read_image
from softline.data.semantic.classes import palette
from softline.engine.trained import Evaluator, ImageView, Measured, Prediction, Trained
from softline.tasks.images import backbone_view, check_trained_classes
from softline.tasks.segmentation.build import segmentation_eval_transform, segmentation_val_set, windows_of
from softline.tasks.segmentation.drawing import draw_labels
from softline.tasks.segmentation.recipe import SegmentationRecipe
from softline.tasks.segmentation.task import Segmentation, predict_labels

# the classes that a line of text names
NAMED_CLASSES = 6


class TrainedSegmenter(Trained):
    """A model that gives each pixel one of its classes."""

    kind = "a segmenter"
    unit = "images"
    drawings = ("", "_labels")
    recipe: SegmentationRecipe

    def evaluate(
        self,
        data: str | None,
        evaluator: Evaluator,
        *,
        split: str | None = None,
        inference: Literal["whole", "slide"] | None = None,
        skip_corrupt: bool = False,
    ) -> Iterator[Measured]:
        """Measure mIoU, with a row for each class.

        data: a directory in the recipe's layout.
        inference: on whole images, or in windows; defaults to the recipe's.
        """
        given = self.recipe.data
        check_option("--inference", inference or given.inference, ("whole", "slide"))
        given = dataclasses.replace(
            given,
            source=data or given.source,
            val_split=split or given.val_split,
            inference=inference or given.inference,
            skip_corrupt=skip_corrupt,
        )
        val_set = segmentation_val_set(self.recipe.replace(data=given), self.model, notify=evaluator.notify)
        check_trained_classes(self.classes, val_set.source.classes, given.source)
        task = Segmentation(self.model, self.classes, val_set=val_set, windows=windows_of(given))
        yield Measured({"source": given.source, "split": given.val_split}, evaluator.run(task, batch_size=1))

    def predict(self, paths: Sequence[str]) -> Iterator[Prediction]:
        """Find the class of each pixel; draw the classes over the image, and the labels as grey values."""
        self.model.eval()
        return (self._predict(path, read_image(path, "RGB")) for path in paths)

    def _predict(self, path: str, image: Image.Image) -> Prediction:
        data, size = self.recipe.data, (image.height, image.width)
        # the transform wants labels, and returns them unused
        pixels, _ = segmentation_eval_transform(self.model, data)(image, np.zeros(size, np.uint8))
        pixels = pixels.to(self.device)
        labels = predict_labels(self.model, pixels, size, windows=windows_of(data)).cpu()
        counts = torch.bincount(labels.flatten(), minlength=len(self.classes)).tolist()
        shares = {name: count / labels.numel() for name, count in zip(self.classes, counts, strict=True) if count}
        colours = palette("cityscapes" if data.layout == "cityscapes" else len(self.classes))
        drawn = draw_labels(image, labels, self.classes, colours)
        largest = sorted(shares.items(), key=lambda item: -item[1])[:NAMED_CLASSES]
        text = ", ".join(f"{name} {100 * share:.0f} %" for name, share in largest)
        grey = Image.fromarray(labels.numpy().astype(np.uint8))
        return Prediction(path, {"pixels": shares}, text, {"": drawn, "_labels": grey})

    def view(self) -> ImageView:
        return backbone_view(self.model, self.name)
