"""Detection and segmentation runs that take seconds: a tiny backbone on a few generated images."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from softline.engine.reading import parse_recipe
from softline.engine.recipe import Recipe

MODEL = """
model:
  name: softpp_micro
  options: {embed_dims: [8, 8, 16, 16], num_heads: [1, 1, 2, 2], depths: [1, 1, 1, 1]}
"""

DETECTION = """
task: detection
output: ROOT/run
batch_size: 2
data:
  {source: ROOT/coco, train_split: train, val_split: val, train_short_sides: [48, 64], short_side: 64, long_side: 96}
head: {name: retinanet, options: {width: 8, anchor_sizes: [8, 16, 32, 64, 128], score_threshold: 0.001}}
optimizer: {lr: 1.0e-3, clip_norm: 1.0}
schedule: {epochs: 2}
log_every: 1
"""

SEGMENTATION = """
task: segmentation
output: ROOT/run
batch_size: 2
data: {source: ROOT/scenes, layout: folder, classes: [ground, thing], ignore_index: 2, crop: [32, 48]}
head: {name: upernet, options: {channels: 16}}
optimizer: {lr: 1.0e-2, clip_norm: 1.0}
schedule: {epochs: 2}
log_every: 1
"""


def write_coco(root: Path) -> Path:
    """``root/coco``: rectangles on noise, wide and tall images, in COCO's format."""
    numbers = np.random.default_rng(0)
    folder = root / "coco"
    (folder / "annotations").mkdir(parents=True)
    for split, count in (("train", 8), ("val", 3)):
        (folder / split).mkdir()
        images, annotations = [], []
        for index in range(count):
            height, width = ((40, 60), (60, 40))[index % 2]
            x, y, w, h = 5 + index, 6, 20, 18
            pixels = numbers.integers(0, 80, (height, width, 3), dtype=np.uint8)
            pixels[y : y + h, x : x + w] += np.array([150, 40 * (index % 2), 0], np.uint8)
            Image.fromarray(pixels).save(folder / split / f"{index}.png")
            images.append({"id": 100 + index, "file_name": f"{index}.png", "height": height, "width": width})
            corners = [x, y, x + w, y, x + w, y + h, x, y + h]
            box = {"bbox": [x, y, w, h], "area": w * h, "iscrowd": 0, "segmentation": [corners]}
            annotations.append({"id": index + 1, "image_id": 100 + index, "category_id": 3 + 4 * (index % 2), **box})
        categories = [{"id": 3, "name": "brick"}, {"id": 7, "name": "leaf"}]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return folder


def write_scenes(root: Path) -> Path:
    """``root/scenes``: a bright rectangle on dark ground, with masks; one column has no label."""
    numbers = np.random.default_rng(0)
    folder = root / "scenes"
    for split, count in (("train", 6), ("val", 3)):
        (folder / split).mkdir(parents=True)
        (folder / f"{split}annot").mkdir()
        for index in range(count):
            size = (40, 56 + 4 * index)
            labels = np.zeros(size, np.uint8)
            labels[10:30, 8 + index : 40] = 1
            pixels = numbers.integers(0, 60, (*size, 3), dtype=np.uint8) + 150 * labels[..., None]
            labels[:, -1] = 2
            Image.fromarray(pixels).save(folder / split / f"{index}.png")
            Image.fromarray(labels).save(folder / f"{split}annot" / f"{index}.png")
    return folder


def dense_recipe(text: str, root: Path, *overrides: str) -> Recipe:
    return parse_recipe((text + MODEL).replace("ROOT", str(root)), overrides)
