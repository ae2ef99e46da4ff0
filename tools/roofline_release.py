"""Measure where the released SOFT++-Tiny spends its time, and how much of what this machine can do each part reaches.

    python tools/roofline_release.py benchmarks/results/YYYY-MM-DD-roofline-release.json

The steps of a forward pass are timed by torch's profiler and added up by kind, beside a product of two 1024 x 1024
matrices and a copy of 256 MB in the same rounds. `tools/make_speed_table.py` makes the table ``roofline`` from the
file.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable
from math import prod
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import timm
import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

import softline  # noqa: F401 (registers the models)
from softline import process
from softline.files import write_json
from softline.measure.environment import environment

MODEL, BATCH, SIZE = "softpp_release_tiny", 8, 224
LANDMARKS = 49
FLOAT = 4
PRODUCT, COPY, WHOLE = "matrix product", "copy", "whole model"
LINEAR, CONVOLUTIONS, DEPTHWISE = "linear layers", "convolutions", "depthwise convolutions"
NEWTON, THIN, SOFTMAX = "Newton, products", "SOFT, other products", "stage 4, softmax"
NORMS, ELEMENTS, COPIES, REST = "LayerNorm and BatchNorm", "GELU, exponentials, sums", "copies", "the rest"
ORDER = (LINEAR, CONVOLUTIONS, DEPTHWISE, NEWTON, THIN, SOFTMAX, NORMS, ELEMENTS, COPIES, REST)

BY_NAME = {
    "aten::addmm": LINEAR,
    "aten::_scaled_dot_product_flash_attention_for_cpu": SOFTMAX,
    "aten::native_layer_norm": NORMS,
    "aten::native_batch_norm": NORMS,
    "aten::copy_": COPIES,
    "aten::cat": COPIES,
    **{
        f"aten::{name}": ELEMENTS
        for name in (
            *("add", "add_", "addcmul", "sub", "sub_", "mul", "mul_", "div", "pow", "sigmoid_", "exp2", "exp2_", "sum"),
            *("clamp", "clamp_max_", "clamp_min_", "abs", "amax", "le", "where", "neg", "mean", "rsqrt", "square"),
        )
    },
}
PRODUCTS = ("aten::bmm", "aten::baddbmm")


def kind_of(event: FunctionEvent) -> str:
    if event.name == "aten::conv2d":
        image, weight = event.input_shapes[:2]
        return DEPTHWISE if weight[1] == 1 and image[1] > 1 else CONVOLUTIONS
    if event.name in PRODUCTS:
        factors = [shape[-2:] for shape in event.input_shapes if len(shape) == 3]
        return NEWTON if all(sides == [LANDMARKS, LANDMARKS] for sides in factors) else THIN
    return BY_NAME.get(event.name, REST)


def operations_of(event: FunctionEvent) -> int:
    if event.name in PRODUCTS:
        left, right = [shape for shape in event.input_shapes if len(shape) == 3][-2:]
        return 2 * prod(left) * right[-1]
    if event.name == "aten::_scaled_dot_product_flash_attention_for_cpu":
        query, key = event.input_shapes[:2]
        return 4 * prod(query) * key[-2]
    return event.flops if event.name in ("aten::conv2d", "aten::addmm") else 0


def bytes_of(event: FunctionEvent) -> int:
    """Return the bytes of the inputs of a step that only reads and writes, and of a result as large as the largest."""
    sizes = [prod(shape) for shape in event.input_shapes if shape]
    if event.name in ("aten::copy_", "aten::cat"):
        return 2 * FLOAT * max(sizes, default=0)
    return FLOAT * (sum(sizes) + max(sizes, default=0))


def sums_of(run: Callable[[], object]) -> dict[str, list[float]]:
    """Return seconds, operations and bytes of each kind of step in one run."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as recorded:
        run()
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for event in recorded.events():
        inside = event.cpu_parent
        while inside is not None and inside.name != "aten::conv2d":
            inside = inside.cpu_parent
        if inside is not None:
            continue
        whole = event.cpu_time_total if event.name == "aten::conv2d" else event.self_cpu_time_total
        kind = kind_of(event)
        moved = bytes_of(event) if kind in (NORMS, ELEMENTS, COPIES) else 0
        for place, number in enumerate((whole * 1e-6, operations_of(event), moved)):
            sums[kind][place] += number
    return sums


def reference_runs() -> dict[str, tuple[Callable[[], object], int, int]]:
    """Return the functions that every round also times, with their operations and bytes."""
    big, copied = torch.randn(2, 1024, 1024), torch.randn(2**26)
    target = torch.empty_like(copied)
    return {
        PRODUCT: (lambda: big[0] @ big[1], 2 * 1024**3, 3 * 1024**2 * FLOAT),
        COPY: (lambda: target.copy_(copied), 0, 2 * 2**26 * FLOAT),
    }


@torch.no_grad()
def measure(rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model, images = timm.create_model(MODEL).eval(), torch.randn(BATCH, 3, SIZE, SIZE)
    references = reference_runs()
    model(images)
    found: dict[str, list[list[float]]] = defaultdict(list)
    for _ in range(rounds):
        for name, (run, operations, moved) in references.items():
            found[name].append([sum(seconds for seconds, *_ in sums_of(run).values()), operations, moved])
        parts = sums_of(lambda: model(images))
        for name, numbers in parts.items():
            found[name].append(numbers)
        found[WHOLE].append([sum(numbers[place] for numbers in parts.values()) for place in range(2)] + [0])
    return [_row(name, found[name]) for name in (PRODUCT, COPY, *ORDER, WHOLE) if name in found]


def _row(name: str, numbers: list[list[float]]) -> dict[str, Any]:
    seconds = [each[0] for each in numbers]
    low, _, high = quantiles(seconds, n=4, method="inclusive")
    return {
        "part": name,
        "milliseconds": 1e3 * median(seconds),
        "spread": 1e3 * (high - low) / 2,
        "operations": int(numbers[0][1]),
        "bytes": int(numbers[0][2]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="PATH", help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="how often the model runs (default: 15)")
    options = parser.parse_args()
    process.keep_memory()
    described = {
        "kind": "roofline",
        "command": f"python tools/roofline_release.py --rounds {options.rounds}",
        "options": {"dtype": "float32", "batch": BATCH, "compile": False},
        "environment": environment(),
    }
    write_json(options.output, {**described, "rows": measure(options.rounds), "finished": True})


if __name__ == "__main__":
    main()
