"""Use a trained detector or segmenter: evaluate it, and draw what it finds on images."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import nn

from softline.data.semantic.sources import palette
from softline.tasks.dense import Drawn
from softline.tasks.segmentation.build import segmentation_eval_transform, windows_of
from softline.tasks.segmentation.drawing import draw_labels
from softline.tasks.segmentation.recipe import SegmentationRecipe
from softline.tasks.segmentation.task import predict_labels


def _segment(
    model: nn.Module, classes: Sequence[str], path: str, image: Image.Image, recipe: SegmentationRecipe
) -> Drawn:
    size = (image.height, image.width)
    # labels are not looked at
    pixels, _ = segmentation_eval_transform(model, recipe.data)(image, torch.zeros(size, dtype=torch.uint8).numpy())
    pixels = pixels.to(next(model.parameters()).device)
    labels = predict_labels(model, pixels, size, windows=windows_of(recipe.data)).cpu()
    counts = torch.bincount(labels.flatten(), minlength=len(classes)).tolist()
    shares = {name: count / labels.numel() for name, count in zip(classes, counts, strict=True) if count}
    colours = palette("cityscapes" if recipe.data.layout == "cityscapes" else len(classes))
    grey = Image.fromarray(labels.numpy().astype(np.uint8))
    return Drawn(path, {"pixels": shares}, draw_labels(image, labels, classes, colours), grey)
