"""Linearise a softmax classifier of flowers to several attentions, and compare with the same networks from scratch.

    softline train flowers_deit --data.source FLOWERS --output runs/flowers
    python tools/linearize_flowers.py runs/flowers/last.pt FLOWERS runs/linearized --jobs 2

Each run is one call of `softline`, in a process of its own; runs that are finished are not repeated. The networks from
scratch are trained by the teacher's recipe for as many image passes as transfer and fine-tuning took together. The
table, and the numbers behind it, are printed and written to OUTPUT/flowers.json.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

TRANSFER_EPOCHS, FINETUNE_EPOCHS = 1, 5
# of both kinds of run
SAME = "--batch_size 32 --precision bf16 --workers 0"
# of the first seed; the others are measured at the first size
SIZES = (96, 136, 192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--attentions", default="inline,softpp,linear")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, with one thread each if several")
    options = parser.parse_args()
    attentions, seeds = options.attentions.split(","), [int(seed) for seed in options.seeds.split(",")]
    runs = [(kind, name, seed) for seed in seeds for name in attentions for kind in (linearize, from_scratch)]
    with ThreadPoolExecutor(options.jobs) as pool:
        done = [pool.submit(run, options, *planned) for planned in runs]
        rows = [future.result() for future in done]
    summary = {"rows": rows, "table": table(rows, attentions)}
    (options.output / "flowers.json").write_text(json.dumps(summary, indent=2))
    sys.stdout.write(f"{summary['table']}\n")


def run(options: argparse.Namespace, kind: Any, attention: str, seed: int) -> dict[str, Any]:
    place = options.output / f"{kind.__name__}-{attention}-{seed}"
    result = place / "result.json"
    if not result.exists():
        place.mkdir(parents=True, exist_ok=True)
        for command in kind(options, place, attention, seed):
            softline(command, place / "output.txt", alone=options.jobs == 1)
        result.write_text(json.dumps(read(place)))
    return {"kind": kind.__name__, "attention": attention, "seed": seed, **json.loads(result.read_text())}


def linearize(options: argparse.Namespace, place: Path, attention: str, seed: int) -> list[str]:
    sizes = listed(seed)
    return [
        f"linearize {options.teacher} --attention {attention} --data {options.data} --output {place} "
        f"--sizes {sizes} --cost-sizes {sizes if seed == 0 else 0} "
        f"--transfer.schedule.epochs {TRANSFER_EPOCHS} --finetune.schedule.epochs {FINETUNE_EPOCHS} "
        f"--finetune.optimizer.lr 7e-4 --seed {seed} {SAME}"
    ]


def listed(seed: int) -> str:
    return ",".join(map(str, SIZES if seed == 0 else SIZES[:1]))


def from_scratch(options: argparse.Namespace, place: Path, attention: str, seed: int) -> list[str]:
    epochs = TRANSFER_EPOCHS + FINETUNE_EPOCHS
    return [
        f"train flowers_deit --data.source {options.data} --output {place}/run --resume --seed {seed} {SAME} "
        f"--model.replace.attention {attention} --schedule.epochs {epochs} --schedule.warmup_epochs 1 --eval_every 100 "
        "--optimizer.lr 7e-4",
        f"evaluate {place}/run/last.pt {options.data} --sizes {listed(seed)} --json {place}/sizes.json",
    ]


def softline(command: str, log: Path, *, alone: bool) -> None:
    threads = {} if alone else {"OMP_NUM_THREADS": "1"}
    with log.open("a") as file:
        done = subprocess.run(
            [sys.executable, "-m", "softline.cli", *shlex.split(command)],
            env={**os.environ, **threads},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"softline {command} failed: see {log}")


def read(place: Path) -> dict[str, Any]:
    if (place / "linearized.json").exists():
        return {"linearized": json.loads((place / "linearized.json").read_text())}
    rows = json.loads((place / "sizes.json").read_text())["rows"]
    return {"top1": {str(row["size"]): row["metrics"]["top1"] for row in rows}}


def table(rows: list[dict[str, Any]], attentions: list[str]) -> str:
    lines = ["| model | " + " | ".join(f"{size} pixels" for size in SIZES) + " | agreement at 96 |"]
    lines.append("|---|" + "--:|" * (len(SIZES) + 1))
    first = next(row["linearized"] for row in rows if row["kind"] == "linearize")
    original = first["steps"][0]["scores"]
    lines.append("| teacher, softmax | " + " | ".join(f"{100 * entry['top1']:.1f}" for entry in original) + " | |")
    for attention in attentions:
        for step in ("replaced", "transferred", "finetuned"):
            steps = [
                found
                for row in rows
                if row["kind"] == "linearize" and row["attention"] == attention
                for found in row["linearized"]["steps"]
                if found["name"] == step
            ]
            scores = [
                [scores["top1"] for found in steps for scores in found["scores"] if scores["size"] == size]
                for size in SIZES
            ]
            agreement = [found["scores"][0]["agreement"] for found in steps]
            lines.append(f"| {attention}, {step} | {' | '.join(map(spread, [*scores, agreement]))} |")
        scratch = [row["top1"] for row in rows if row["kind"] == "from_scratch" and row["attention"] == attention]
        scores = [[found[str(size)] for found in scratch if str(size) in found] for size in SIZES]
        lines.append(f"| {attention}, from scratch | {' | '.join(map(spread, scores))} | |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    around = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.1f}{around}"


if __name__ == "__main__":
    main()
