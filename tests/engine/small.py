"""A training run that takes a second: a tiny network on a folder of generated images."""

from pathlib import Path

import numpy as np
from PIL import Image

from softline.engine import distributed
from softline.engine.evaluate import Evaluation
from softline.engine.reading import parse_recipe
from softline.engine.recipe import Recipe
from softline.engine.trained import Evaluator, Trained

RECIPE = """
task: classification
output: {root}/run
batch_size: 8
model:
  name: softpp_micro
  options:
    attention: inline
    embed_dims: [8, 8, 16, 16]
    num_heads: [1, 1, 2, 2]
    depths: [1, 1, 1, 1]
    drop_path_rate: 0.1
data: {{source: {root}/data, image_size: 16, crop_pct: 1.0}}
augment: {{scale: [0.6, 1.0], smoothing: 0.1}}
optimizer: {{lr: 3.0e-3, clip_norm: 1.0}}
schedule: {{epochs: 2, warmup_epochs: 0.5}}
log_every: 1
"""


def write_images(root: Path, *, train: int = 20, val: int = 9, classes: tuple[str, ...] = ("dark", "light")) -> Path:
    """``root/data/{train,val}/<class>/*.png``: noise around another grey for each class."""
    numbers = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for label, name in enumerate(classes):
            folder = root / "data" / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                grey = 60 + 120 * label / max(len(classes) - 1, 1)
                pixels = np.clip(numbers.normal(grey, 40, (16, 16, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{index:03}.png")
    return root / "data"


def small_recipe(root: Path, *overrides: str) -> Recipe:
    """40 training images in steps of 8: 5 steps an epoch, 10 in all."""
    return parse_recipe(RECIPE.format(root=root), overrides)


def evaluated(
    trained: Trained, data: str | None = None, *, batch_size: int | None = None, **options: object
) -> list[tuple[dict[str, object], Evaluation]]:
    """What a model was measured on, and the results."""
    evaluator = Evaluator(distributed.start(), batch_size=batch_size)
    return [(measured.on, measured.result) for measured in trained.evaluate(data, evaluator, **options)]
