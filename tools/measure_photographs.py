"""Measure `softline predict` and `softline evaluate` on a photograph of 6000 x 4000 pixels: time and peak memory.

Writes a JSON file from which tools/make_speed_table.py makes the table ``photographs`` of the documentation:

    python tools/measure_photographs.py benchmarks/results/YYYY-MM-DD-photographs.json

The photograph is an enlarged one of softline's own; two of them are evaluated. The models are trained for one step,
since their weights change neither time nor memory. Each command runs in a process of its own, all of whose memory is
counted: that of Python, torch and the weights too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from softline.data.images.photographs import open_photograph
from softline.files import write_json
from softline.measure.environment import environment

SIZE = (6000, 4000)
# photographs of the training
SMALL = (240, 160)
SOFTLINE = [str(Path(sys.executable).with_name("softline"))]
ONE_STEP = ["--schedule.epochs", "1", "--schedule.warmup_epochs", "0", "--batch_size", "2", "--eval_batch_size", "1"]
MODEL = ["--model.name", "softpp_tiny"]
COCO = ["--head.options", "{}", "--data.val_split", "val", "--data.train_split", "train", "--data.short_side", "800"]
COCO += ["--data.long_side", "1333"]
SEGMENTS = ["--head.options", "{}", "--data.crop", "[64, 64]"]
# kind of data, base recipe and overrides
MODELS: dict[str, tuple[str, str, list[str]]] = {
    "classifier at 224 x 224": ("classes", "cifar10_small", ["--data.image_size", "224", "--data.val_split", "val"]),
    "`retinanet_lite` at 1200 x 800": ("coco", "coco128_retinanet", ["--head.name", "retinanet_lite", *COCO]),
    "`mask_rcnn` at 1200 x 800": ("coco", "coco128_mask_rcnn", COCO),
    "`segformer` at 6000 x 4000": ("semantic", "camvid_small", ["--head.name", "segformer", *SEGMENTS]),
    "`semantic_fpn` at 6000 x 4000": ("semantic", "camvid_small", ["--head.name", "semantic_fpn", *SEGMENTS]),
}


def write_photograph(path: Path, size: tuple[int, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    open_photograph("coffee").resize(size, Image.Resampling.BICUBIC).save(path, quality=90)


def write_classes(folder: Path, split: str, size: tuple[int, int]) -> None:
    for name in ("coffee", "tea"):
        write_photograph(folder / split / name / "1.jpg", size)


def write_coco(folder: Path, split: str, size: tuple[int, int]) -> None:
    images, objects = [], []
    for number in (1, 2):
        write_photograph(folder / split / f"{number}.jpg", size)
        images.append({"id": number, "file_name": f"{number}.jpg", "width": size[0], "height": size[1]})
        x, y, width, height = size[0] // 4, size[1] // 4, size[0] // 2, size[1] // 2
        outline = [x, y, x + width, y, x + width, y + height, x, y + height]
        shape = {"bbox": [x, y, width, height], "segmentation": [outline], "area": width * height}
        objects.append({"id": number, "image_id": number, "category_id": 1, "iscrowd": 0, **shape})
    content = {"images": images, "annotations": objects, "categories": [{"id": 1, "name": "cup"}]}
    path = folder / "annotations" / f"instances_{split}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def write_semantic(folder: Path, split: str, size: tuple[int, int]) -> None:
    (folder / f"{split}annot").mkdir(parents=True)
    for number in (1, 2):
        write_photograph(folder / split / f"{number}.jpg", size)
        labels = np.random.default_rng(number).integers(0, 11, (size[1] // 40, size[0] // 40), dtype=np.uint8)
        enlarged = Image.fromarray(labels).resize(size, Image.Resampling.NEAREST)
        enlarged.save(folder / f"{split}annot" / f"{number}.png")


WRITERS = {"classes": write_classes, "coco": write_coco, "semantic": write_semantic}


def run(command: list[str]) -> dict[str, Any]:
    """Run a command and return its seconds and the largest amount of memory that it had."""
    started = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{output.read().decode(errors='replace')}")
    # Linux counts in units of 1,024 bytes
    return {"seconds": time.perf_counter() - started, "peak_bytes": usage.ru_maxrss * 1024}


def measure(name: str, folder: Path) -> list[dict[str, Any]]:
    kind, recipe, overrides = MODELS[name]
    small, large, trained = folder / f"{kind}-small", folder / f"{kind}-large", folder / "run"
    for place, size in ((small, SMALL), (large, SIZE)):
        if not place.exists():
            WRITERS[kind](place, "train", SMALL)
            WRITERS[kind](place, "val", size)
    source = ["--data.source", str(small)]
    run([*SOFTLINE, "train", recipe, *MODEL, *ONE_STEP, *overrides, *source, "--output", str(trained / name)])
    checkpoint = str(trained / name / "last.pt")
    photograph = next(large.glob("val/**/*.jpg"))
    commands = {
        "predict": [*SOFTLINE, "predict", checkpoint, str(photograph)],
        "evaluate": [*SOFTLINE, "evaluate", checkpoint, str(large), "--batch-size", "1"],
    }
    return [{"model": name, "command": command, **run(words)} for command, words in commands.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="PATH", help="JSON file to write")
    parser.add_argument("--only", default="", metavar="WORD", help="measure only models with this word in their name")
    options = parser.parse_args()
    described = {
        "kind": "photographs",
        "command": "python tools/measure_photographs.py",
        "options": {"dtype": "float32", "batch": 1, "compile": False},
        "environment": environment(),
    }
    names = [name for name in MODELS if options.only in name]
    if not names:
        parser.error(f"--only {options.only}: no model has this word in its name: {', '.join(MODELS)}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            sys.stderr.write(f"{name}\n")
            rows += measure(name, Path(folder))
            finished = name == names[-1] and not options.only
            write_json(options.output, {**described, "rows": rows, "finished": finished})


if __name__ == "__main__":
    main()
