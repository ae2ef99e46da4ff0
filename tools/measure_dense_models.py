"""Measure whole segmenters or detectors: backbone, head and total, time and memory, softline's backbones beside timm's.

Writes a JSON file from which tools/make_speed_table.py makes the tables ``dense`` of the documentation:

    python tools/measure_dense_models.py benchmarks/results/YYYY-MM-DD-dense.json
    python tools/measure_dense_models.py benchmarks/results/YYYY-MM-DD-detectors.json --task detection

The images are random, and so are the weights. A head takes the time of the whole model, which ends with the class of
each pixel or with boxes, without that of its backbone. Every round runs every case once.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch

import softline  # noqa: F401, registers its models
from softline import process
from softline.files import write_json
from softline.heads.detectors import retinanet, retinanet_lite
from softline.heads.segmenters import segformer, semantic_fpn, upernet
from softline.measure.counting import peak_bytes
from softline.measure.environment import environment
from softline.measure.turns import take_turns

SIZES = ((512, 1024), (1024, 2048))
CLASSES = 19
BACKBONES: dict[str, dict[str, Any]] = {
    "softpp_tiny": {"stage4": "soft"},
    "inline_pvt_tiny": {},
    "swin_tiny_patch4_window7_224": {"strict_img_size": False},
    "pvt_v2_b1": {},
    "resnet50": {"out_indices": (1, 2, 3, 4)},
}
HEADS: dict[str, dict[str, Callable[..., Any]]] = {
    "segmentation": {"segformer": segformer, "semantic_fpn": semantic_fpn, "upernet": upernet},
    "detection": {"retinanet_lite": retinanet_lite, "retinanet": retinanet},
}


def cases(task: str, size: tuple[int, int], image: torch.Tensor) -> dict[tuple[str, str], Callable[[], object]]:
    """Return what to run, by the names of backbone and head; "" is the backbone alone."""
    found: dict[tuple[str, str], Callable[[], object]] = {}
    for backbone, options in BACKBONES.items():
        for head, build in HEADS[task].items():
            body = timm.create_model(backbone, features_only=True, **options).eval()
            found.setdefault((backbone, ""), lambda body=body: body(image))
            found[backbone, head] = whole(task, build, body, size, image)
    return found


def whole(
    task: str, build: Callable[..., Any], body: torch.nn.Module, size: tuple[int, int], image: torch.Tensor
) -> Callable[[], object]:
    """Return a run of a segmenter or detector."""
    if task == "segmentation":
        model = build(body, CLASSES).eval()
        return lambda: model(image, size)
    detector = build(body, CLASSES, short_side=size[0], long_side=size[1]).eval()
    return lambda: detector([image[0]])


@torch.no_grad()
def measure(task: str, size: tuple[int, int], rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    runs = cases(task, size, torch.rand(1, 3, *size))
    # these runs are the warm-up too
    memory = {key: peak_bytes(run) for key, run in runs.items()}
    timings = take_turns(runs, rounds, warm_ups=0)
    return [
        {
            "height": size[0],
            "width": size[1],
            "backbone": backbone,
            "head": head or None,
            "seconds": timing.median,
            "spread": timing.spread,
            "peak_bytes": memory[backbone, head],
        }
        for (backbone, head), timing in timings.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="PATH", help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often each case is timed (default: 3)")
    parser.add_argument("--task", choices=HEADS, default="segmentation", help="default: segmentation")
    options = parser.parse_args()
    # as the commands do
    process.keep_memory()
    described = {
        "kind": "dense",
        "command": f"python tools/measure_dense_models.py --task {options.task} --rounds {options.rounds}",
        "options": {"dtype": "float32", "batch": 1, "compile": False},
        "environment": environment(),
        "classes": CLASSES,
    }
    rows: list[dict[str, Any]] = []
    for size in SIZES:
        sys.stderr.write(f"{size[0]} x {size[1]}\n")
        rows += measure(options.task, size, options.rounds)
        write_json(options.output, {**described, "rows": rows, "finished": size == SIZES[-1]})


if __name__ == "__main__":
    main()
