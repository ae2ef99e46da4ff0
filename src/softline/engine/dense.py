"""Use a trained detector or segmenter: evaluate it, and draw what it finds on images."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from torch import nn
from torchvision.transforms.v2.functional import pil_to_tensor

from softline.data.coco import encode_mask
from softline.data.semantic import palette
from softline.engine.build import Notify, log
from softline.engine.build_dense import (
    build_detector,
    build_segmenter,
    detection_val_set,
    segmentation_eval_transform,
    segmentation_val_set,
    windows_of,
)
from softline.engine.drawing import draw_detections, draw_labels
from softline.engine.evaluate import Evaluation, evaluate
from softline.engine.images import read_image
from softline.engine.recipe import DetectionRecipe, Recipe, SegmentationRecipe
from softline.heads.detectors import Detector
from softline.tasks import Task
from softline.tasks.detection import Detection
from softline.tasks.segmentation import Segmentation, predict_labels


@dataclass(frozen=True)
class Drawn:
    name: str
    """The image's file."""
    found: dict[str, Any]
    """Objects with class, score, box and, where there are masks, COCO's runs of it; or classes with their share of the
    pixels: plain numbers and text."""
    image: Image.Image
    """With what was found drawn on it."""
    labels: Image.Image | None = None
    """Of segmenters: the label of each pixel as a grey value."""


def dense_model(recipe: Recipe, num_classes: int) -> nn.Module:
    """The network of a recipe, which loads no weights."""
    bare: Any = recipe.without_weights()
    if isinstance(recipe, DetectionRecipe):
        return build_detector(bare, num_classes)
    assert isinstance(recipe, SegmentationRecipe), "classification has its own"
    return build_segmenter(bare, num_classes)


def evaluate_dense(
    model: nn.Module,
    classes: Sequence[str],
    recipe: Recipe,
    accelerator: Accelerator,
    *,
    batch_size: int = 1,
    workers: int = 0,
    notify: Notify = log.info,
    progress: Callable[[int, int | None], None] = lambda *_: None,
) -> Evaluation:
    """On the validation data that the recipe names, which must have the model's classes."""
    task: Task
    if isinstance(recipe, DetectionRecipe):
        boxes = detection_val_set(recipe, notify=notify)
        found, task = boxes.source.classes, Detection(model, classes, val_set=boxes, masks=boxes.masks)
    else:
        assert isinstance(recipe, SegmentationRecipe), "classification has its own"
        pixels = segmentation_val_set(recipe, model, notify=notify)
        found = pixels.source.classes
        task = Segmentation(model, classes, val_set=pixels, windows=windows_of(recipe.data))
    if tuple(found) != tuple(classes):
        differ = sorted(set(found) ^ set(classes))
        names = f": {', '.join(differ[:10])} in one of them only" if differ else ", but in another order"
        raise ValueError(f"the classes of {recipe.data.source} are not those the model was trained for{names}")
    model.to(accelerator.device)
    result = evaluate(task, model, accelerator, batch_size=batch_size, workers=workers, progress=progress)
    assert result is not None, "nothing stops it"
    return result


def predict_dense(
    model: nn.Module, classes: Sequence[str], recipe: Recipe, paths: Sequence[str], *, score: float = 0.5
) -> Iterator[Drawn]:
    """What is on each image; objects with a higher score than ``score``."""
    model.eval()
    if isinstance(model, Detector):
        # whatever it was trained with
        model.score_threshold = score
    for path in paths:
        image = read_image(path, "RGB")
        if isinstance(recipe, DetectionRecipe):
            yield _detect(model, classes, path, image)
        else:
            assert isinstance(recipe, SegmentationRecipe), "classification has its own"
            yield _segment(model, classes, path, image, recipe)


def _detect(model: nn.Module, classes: Sequence[str], path: str, image: Image.Image) -> Drawn:
    pixels = (pil_to_tensor(image).float() / 255).to(next(model.parameters()).device)
    with torch.no_grad():
        (found,) = model([pixels])
    found = {name: value.cpu() for name, value in found.items()}
    objects: list[dict[str, Any]] = [
        {"class": classes[label], "score": score, "box": box}
        for label, score, box in zip(
            found["labels"].tolist(), found["scores"].tolist(), found["boxes"].tolist(), strict=True
        )
    ]
    if "masks" in found:
        for each, mask in zip(objects, found["masks"].numpy(), strict=True):
            each["mask"] = encode_mask(mask)
    return Drawn(path, {"objects": objects}, draw_detections(image, found, classes, palette(min(len(classes), 255))))


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
