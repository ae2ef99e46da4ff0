"""Measure the parts of SOFT++'s operator against what this machine can do: operations and bytes per second.

    python tools/roofline_soft.py benchmarks/results/YYYY-MM-DD-roofline.json

Each part is timed alone, in rounds that run every part once, beside a product of two 1024 x 1024 matrices and a copy of
256 MB. `tools/make_speed_table.py` makes the table ``roofline`` from the file.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from softline import ops, process
from softline.files import write_json
from softline.measure.environment import environment
from softline.measure.measuring import LEAST_SECONDS
from softline.measure.turns import take_turns
from softline.ops.gaussian import centre_of, left_factor, right_factor

HEADS, TOKENS, DIM, LANDMARKS, STEPS = 16, 3136, 32, 49, 20
FLOAT = 4


class Part(NamedTuple):
    name: str
    run: Callable[[], object]
    operations: int
    """Multiply-adds count as two."""
    moved: int
    """Bytes that have to be read and written at least once."""


def parts() -> list[Part]:
    torch.manual_seed(0)
    q, v = torch.randn(2, 1, HEADS, TOKENS, DIM)
    landmarks = q[:, :, :: TOKENS // LANDMARKS][:, :, :LANDMARKS].contiguous()
    scale, centre = DIM**-0.5, centre_of(landmarks, None)
    left, right = left_factor(landmarks, centre, scale), right_factor(q, centre, scale)
    exponents = left @ right.mT
    kernel = exponents.exp2()
    A = ops.soft_kernel(landmarks)
    inverse = ops.newton_inverse(A).inverse
    summary = kernel @ v
    mixed = inverse @ summary
    large, small = HEADS * LANDMARKS * TOKENS, HEADS * TOKENS * DIM
    square, width = HEADS * LANDMARKS**2, right.shape[-1]
    big, copied = torch.randn(2, 1024, 1024), torch.randn(2**26)
    target = torch.empty_like(copied)
    out, made = torch.empty_like(kernel), torch.empty(1, HEADS, TOKENS, DIM)
    return [
        Part("matrix product", lambda: big[0] @ big[1], 2 * 1024**3, 3 * 1024**2 * FLOAT),
        Part("copy", lambda: target.copy_(copied), 0, 2 * 2**26 * FLOAT),
        Part("queries", lambda: right_factor(q, centre, scale), 0, (small + HEADS * TOKENS * width) * FLOAT),
        Part("distances", lambda: torch.matmul(left, right.mT, out=out), 2 * large * width, (large + small) * FLOAT),
        Part("exponential", lambda: torch.exp2(exponents, out=out), 0, 2 * large * FLOAT),
        Part("P v", lambda: kernel @ v, 2 * large * DIM, (large + small) * FLOAT),
        Part("Newton, 20 steps", lambda: ops.newton_inverse(A), (4 * STEPS + 6) * square * LANDMARKS, 0),
        Part("A^+ (P v)", lambda: inverse @ summary, 2 * square * DIM, 0),
        Part(
            "P^T (A^+ P v)", lambda: torch.matmul(kernel.mT, mixed, out=made), 2 * large * DIM, (large + small) * FLOAT
        ),
        Part("whole operator", lambda: ops.soft_attention(q, landmarks, v, normalize=True), 0, 0),
        Part("softmax (SDPA)", lambda: ops.softmax_attention(q, q, v), 4 * HEADS * TOKENS**2 * DIM, 0),
    ]


@torch.no_grad()
def measure(rounds: int) -> list[dict[str, Any]]:
    all_parts = parts()
    timings = take_turns({part.name: part.run for part in all_parts}, rounds, least_seconds=LEAST_SECONDS)
    return [
        {
            "part": part.name,
            "milliseconds": 1e3 * timings[part.name].median,
            "spread": 1e3 * timings[part.name].spread,
            "operations": part.operations,
            "bytes": part.moved,
        }
        for part in all_parts
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="PATH", help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=25, metavar="N", help="how often each is timed (default: 25)")
    options = parser.parse_args()
    # as the commands do
    process.keep_memory()
    described = {
        "kind": "roofline",
        "command": f"python tools/roofline_soft.py --rounds {options.rounds}",
        "options": {"dtype": "float32", "batch": 1, "compile": False},
        "environment": environment(),
    }
    write_json(options.output, {**described, "rows": measure(options.rounds), "finished": True})


if __name__ == "__main__":
    main()
