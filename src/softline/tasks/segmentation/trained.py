"""Trained segmenters: evaluate them, find the class of each pixel of images."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from softline.checks import check_option
from softline.data.semantic.classes import palette
from softline.engine.graph import BATCH, HEIGHT, WIDTH, Description, Graph, Sizes, image_graph
from softline.engine.shipping import describe_recipe
from softline.engine.trained import Evaluator, ImageView, Measured, Trained
from softline.layers.bands import ImageRows
from softline.tasks.images import backbone_view, check_trained_classes
from softline.tasks.networks import channel_statistics
from softline.tasks.predicting import Photograph, predict_images
from softline.tasks.segmentation.build import segmentation_eval_transform, segmentation_val_set, windows_of
from softline.tasks.segmentation.recipe import SegmentationRecipe, SemanticData
from softline.tasks.segmentation.results import LabelMap
from softline.tasks.segmentation.task import Segmentation, batch_labels, check_whole_image, image_labels

# one pixel of the coarsest map
LEAST_SIDE = 32


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

    def predict(self, inputs: Any, *, inference: Literal["whole", "slide"] | None = None, batch_size: int = 4) -> Any:
        """Find the class of each pixel: return a `LabelMap` for an image, a list of them for a list of images.

        inputs: paths, Pillow images, arrays or tensors; see `softline.data.images.single.to_image`.
        inference: on whole images, or in windows; defaults to the recipe's.
        batch_size: the largest number of images at once; those of other sizes run on their own, and so does each image
            in windows.
        """
        data = self.recipe.data
        check_option("inference", inference or data.inference, ("whole", "slide"))
        data = dataclasses.replace(data, inference=inference or data.inference)
        self.model.eval()
        return predict_images(inputs, partial(self._label, data), mode="RGB", batch_size=batch_size)

    def _label(self, data: SemanticData, photographs: Sequence[Photograph]) -> list[LabelMap]:
        windows = windows_of(data)
        if windows is None and data.short_side is None:
            for each in photographs:
                check_whole_image(self.model, (each.image.height, each.image.width))
        sizes = [(each.image.height, each.image.width) for each in photographs]
        with torch.no_grad():
            found: dict[int, Tensor] = {}
            for size in dict.fromkeys(sizes):
                places = [place for place, each in enumerate(sizes) if each == size]
                images = [self._pixels(photographs[place].image, data) for place in places]
                if windows is None:
                    labels = batch_labels(self.model, ImageRows.stacked(images), size)
                else:
                    labels = [image_labels(self.model, each.whole()[0], size, windows=windows) for each in images]
                found |= zip(places, labels, strict=True)
        colours = palette("cityscapes" if data.layout == "cityscapes" else len(self.classes))
        return [
            LabelMap(
                image=each.image, class_names=self.classes, labels=found[place].cpu(), colours=colours, name=each.name
            )
            for place, each in enumerate(photographs)
        ]

    def _pixels(self, image: Image.Image, data: SemanticData) -> ImageRows:
        """The normalised image [1, 3, H, W]; if it keeps its size, rows are normalised when they are read."""
        transform = segmentation_eval_transform(self.model, data)

        def normalised(part: Image.Image) -> Tensor:
            # the transform wants labels, and returns them unused
            return transform(part, np.zeros((part.height, part.width), np.uint8))[0][None].to(self.device)

        if data.short_side is not None:
            return ImageRows.of(normalised(image))
        shape = (1, 3, image.height, image.width)
        return ImageRows(shape, self.device, lambda first, last: normalised(image.crop((0, first, image.width, last))))

    def graph(self) -> Graph:
        mean, std = channel_statistics(self.model, self.recipe.data)
        return image_graph(
            self.model,
            {"logits": (BATCH, None, HEIGHT, WIDTH)},
            size=self.recipe.data.crop,
            least=LEAST_SIDE,
            mean=mean,
            std=std,
        )

    def describe(self, fixed: Sizes) -> Description:
        mean, std = channel_statistics(self.model, self.recipe.data)
        data = dataclasses.replace(self.recipe.data, mean=tuple(mean), std=tuple(std))
        return describe_recipe(self.recipe.replace(data=data), {"classes": list(self.classes)})

    def view(self) -> ImageView:
        return backbone_view(self.model, self.name)
