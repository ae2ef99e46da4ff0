"""Trained segmenters: evaluate them, find the class of each pixel of images."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from softline.checks import check_option
from softline.data.semantic.classes import palette
from softline.data.semantic.transforms import eval_pixels
from softline.engine.graph import BATCH, HEIGHT, WIDTH, Description, Graph, Sizes, image_graph
from softline.engine.shipping import describe_recipe
from softline.engine.trained import Evaluator, ImageView, Measured, Trained
from softline.layers.bands import ImageRows
from softline.tasks.images import backbone_view, check_trained_classes
from softline.tasks.networks import channel_statistics
from softline.tasks.predicting import Photograph, predict_images
from softline.tasks.segmentation.build import normalization_of, segmentation_val_set, windows_of
from softline.tasks.segmentation.recipe import SegmentationRecipe, SemanticData
from softline.tasks.segmentation.results import LabelMap
from softline.tasks.segmentation.task import (
    Segmentation,
    batch_labels,
    check_whole_image,
    image_labels,
    normalised_rows,
)

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
        val_set = segmentation_val_set(given, notify=evaluator.notify)
        check_trained_classes(self.classes, val_set.source.classes, given.source)
        task = Segmentation(
            self.model,
            self.classes,
            val_set=val_set,
            normalize=normalization_of(self.model, given),
            windows=windows_of(given),
        )
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
        found: dict[int, Tensor] = {}
        with torch.no_grad():
            for size in dict.fromkeys(sizes):
                places = [place for place, each in enumerate(sizes) if each == size]
                images = [photographs[place].image for place in places]
                found |= zip(places, self._labels(data, images, size), strict=True)
        colours = palette("cityscapes" if data.layout == "cityscapes" else len(self.classes))
        return [
            LabelMap(
                image=each.image, class_names=self.classes, labels=found[place].cpu(), colours=colours, name=each.name
            )
            for place, each in enumerate(photographs)
        ]

    def _labels(self, data: SemanticData, images: Sequence[Image.Image], size: tuple[int, int]) -> list[Tensor]:
        """The classes of images that all have the same size."""
        windows, normalize = windows_of(data), normalization_of(self.model, data)
        if windows is None and data.short_side is None:
            rows = ImageRows.stacked([self._rows(image, normalize) for image in images])
            return batch_labels(self.model, rows, size)
        pixels = [
            eval_pixels(image, short_side=data.short_side, long_side=data.long_side).to(self.device) for image in images
        ]
        if windows is None:
            check_whole_image(self.model, (pixels[0].shape[1], pixels[0].shape[2]))
            return batch_labels(self.model, normalised_rows(torch.stack(pixels), normalize), size)
        return [image_labels(self.model, each, size, windows=windows, normalize=normalize) for each in pixels]

    def _rows(self, image: Image.Image, normalize: Callable[[Tensor], Tensor]) -> ImageRows:
        """An image [1, 3, H, W] whose pixels are read from Pillow's row by row."""

        def read(first: int, last: int) -> Tensor:
            return normalize(eval_pixels(image.crop((0, first, image.width, last)))[None].to(self.device))

        return ImageRows((1, 3, image.height, image.width), self.device, read)

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
