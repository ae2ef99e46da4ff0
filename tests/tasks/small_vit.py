"""A vision transformer of timm that trains in a second, on a folder of generated images."""

from pathlib import Path

from softline.engine.reading import load_recipe, parse_recipe
from softline.engine.recipe import Recipe
from softline.engine.train import train
from tests.engine.small import write_images

VIT = """
task: classification
output: {root}/teacher
batch_size: 8
model:
  name: vit_tiny_patch16_224
  options: {{patch_size: 4, embed_dim: 32, depth: 3, num_heads: 2, drop_path_rate: 0.1}}
data: {{source: {root}/data, image_size: 16, crop_pct: 1.0}}
augment: {{scale: [0.6, 1.0]}}
optimizer: {{lr: 3.0e-3, clip_norm: 1.0}}
schedule: {{epochs: 6, warmup_epochs: 1}}
log_every: 1
"""
STAGES = ("--batch_size=8", "--schedule.epochs=2", "--log_every=1")


def train_teacher(root: Path) -> Path:
    """Write images, train on them, and return the checkpoint."""
    write_images(root)
    return train(vit_recipe(root)).output / "last.pt"


def vit_recipe(root: Path, *overrides: str) -> Recipe:
    return parse_recipe(VIT.format(root=root), overrides)


def stage_recipe(root: Path, stage: str, *overrides: str) -> Recipe:
    """The recipe of a stage, for the teacher in ``root`` and InLine attention."""
    own = vit_recipe(root)
    changes = {
        "teacher": f"{root}/teacher/last.pt",
        "output": f"{root}/{stage}",
        "model": {"name": own.model.name, "options": own.model.options},
        "data": {"source": f"{root}/data", "image_size": 16, "crop_pct": 1.0},
    }
    return load_recipe(f"linearize_{stage}", [*STAGES, *overrides], changes=changes)
