"""Use a trained detector or segmenter: evaluate it, and draw what it finds on images."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import nn
from torchvision.transforms.v2.functional import pil_to_tensor

from softline.data.coco.source import encode_mask
from softline.data.semantic.sources import palette
from softline.tasks.dense import Drawn
from softline.tasks.detection.drawing import draw_detections


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
