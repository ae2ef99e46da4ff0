"""The files that the examples of the documentation use: a run of the quick start's recipe, and images."""

from pathlib import Path

from softline.data.images import open_source
from softline.engine.reading import load_recipe
from softline.engine.train import train


def write_documented_run(root: Path) -> Path:
    """Write runs/clothes, runs/inline, shoe.png and bag.png below ``root``."""
    short = ["--schedule.epochs=0.02", "--schedule.warmup_epochs=0", "--device=cpu"]
    train(load_recipe("quickstart", [*short, f"--output={root}/runs/clothes"]))
    (root / "runs" / "inline").symlink_to(root / "runs" / "clothes")
    images = open_source("embedded", "val")
    wanted = {"Ankle boot": "shoe.png", "Bag": "bag.png"}
    for index in range(len(images)):
        image, label = images.load(index)
        name = wanted.pop(images.classes[label], None)
        if name is not None:
            image.save(root / name)
        if not wanted:
            return root
    raise AssertionError(f"no image of {', '.join(wanted)}")
