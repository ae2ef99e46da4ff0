"""Linearise a softmax classifier of flowers to several attentions, and compare with the same networks from scratch.

    softline train flowers_deit --data.source FLOWERS --output runs/flowers
    python tools/linearize_flowers.py runs/flowers/last.pt FLOWERS runs/linearized --jobs 2
    python tools/linearize_flowers.py --table docs/figures/linearize_flowers.json

Each run is one call of `softline`, in a process of its own; runs that are finished are not repeated. The networks from
scratch are trained by the teacher's recipe for as many image passes as transfer and fine-tuning took together. Time and
memory are measured last, when nothing else runs. The tables are printed, and the numbers behind them are written to
OUTPUT/linearize_flowers.json.
"""

import argparse
import dataclasses
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from softline.engine.checkpoint import load_checkpoint
from softline.engine.reading import read_recipe
from softline.engine.recipe import ReplaceRecipe
from softline.linearizing.cost import LINEARIZED, ORIGINAL, measure_cost
from softline.measure.environment import environment

RESULT = "linearize_flowers.json"
TITLES = {"inline": "InLine", "softpp": "SOFT++", "linear": "linear"}
TRANSFER_EPOCHS = 1
FINETUNE_EPOCHS = {"inline": 9, "softpp": 5, "linear": 5}
# the learning rate of both kinds of run, too
SAME = "--batch_size 32 --precision bf16 --workers 0"
LR = 7e-4
# that of training, and those with two and four times the pixels, at which the first seed is measured
SIZES = (96, 136, 192)
COST_SIZES = (*SIZES, 384)
STEPS = {"replaced": "replaced", "transferred": "transferred", "finetuned": "fine-tuned"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path, nargs="?")
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--attentions", default=",".join(TITLES))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, with one thread each if several")
    parser.add_argument("--table", type=Path, metavar="JSON", help="only print the tables of these results")
    options = parser.parse_args()
    if options.table is None and options.output is None:
        parser.error("name the teacher, the data and the output, or --table JSON")
    summary = json.loads(options.table.read_text()) if options.table else carry_out(options)
    sys.stdout.write(f"{accuracy_table(summary)}\n\n{cost_table(summary)}\n")


def carry_out(options: argparse.Namespace) -> dict[str, Any]:
    attentions, seeds = options.attentions.split(","), [int(seed) for seed in options.seeds.split(",")]
    runs = [(kind, name, seed) for name in attentions for seed in seeds for kind in (linearize, from_scratch)]
    with ThreadPoolExecutor(options.jobs) as pool:
        done = [pool.submit(run, options, *planned) for planned in runs]
        rows = [future.result() for future in done]
    summary = {"rows": rows, "cost": cost(options.teacher, attentions), "environment": dict(environment())}
    (options.output / RESULT).write_text(json.dumps(summary, indent=1))
    return summary


def run(options: argparse.Namespace, kind: Any, attention: str, seed: int) -> dict[str, Any]:
    place = options.output / f"{kind.__name__}-{attention}-{seed}"
    result = place / "result.json"
    if not result.exists():
        place.mkdir(parents=True, exist_ok=True)
        for command in kind(options, place, attention, seed):
            softline(command, place / "output.txt", alone=options.jobs == 1)
        result.write_text(json.dumps(read(place)))
    passes = TRANSFER_EPOCHS + FINETUNE_EPOCHS[attention]
    return {"kind": kind.__name__, "attention": attention, "seed": seed, "passes": passes} | json.loads(
        result.read_text()
    )


def linearize(options: argparse.Namespace, place: Path, attention: str, seed: int) -> list[str]:
    return [
        f"linearize {options.teacher} --attention {attention} --data {options.data} --output {place} "
        f"--sizes {sizes_of(seed)} --cost-sizes 0 "
        f"--transfer.schedule.epochs {TRANSFER_EPOCHS} --finetune.schedule.epochs {FINETUNE_EPOCHS[attention]} "
        f"--finetune.optimizer.lr {LR} --seed {seed} {SAME}"
    ]


def sizes_of(seed: int) -> str:
    return ",".join(map(str, SIZES if seed == 0 else SIZES[:1]))


def from_scratch(options: argparse.Namespace, place: Path, attention: str, seed: int) -> list[str]:
    epochs = TRANSFER_EPOCHS + FINETUNE_EPOCHS[attention]
    return [
        f"train flowers_deit --data.source {options.data} --output {place}/run --resume --seed {seed} {SAME} "
        f"--model.replace.attention {attention} --schedule.epochs {epochs} --schedule.warmup_epochs 1 --eval_every 100 "
        f"--optimizer.lr {LR}",
        f"evaluate {place}/run/last.pt {options.data} --sizes {sizes_of(seed)} --json {place}/sizes.json",
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
    """Return the scores of a run, by step and size."""
    if (place / "linearized.json").exists():
        content = json.loads((place / "linearized.json").read_text())
        return {
            "images": content["images"],
            "steps": {step["name"]: {"scores": step["scores"], "errors": step["errors"]} for step in content["steps"]},
        }
    rows = json.loads((place / "sizes.json").read_text())["rows"]
    return {"scores": [{"size": row["size"], "top1": row["metrics"]["top1"]} for row in rows]}


def cost(teacher: Path, attentions: list[str]) -> list[dict[str, Any]]:
    """Measure one image in the teacher and in each linearised model, in turns."""
    model = read_recipe(load_checkpoint(teacher)["recipe"], where=str(teacher)).model
    rows = []
    for attention in attentions:
        replaced = dataclasses.replace(model, replace=ReplaceRecipe(attention=attention))
        for row in measure_cost(replaced, COST_SIZES, num_classes=5, rounds=15):
            rows.append({"attention": attention, **dataclasses.asdict(row)})
    return rows


def accuracy_table(summary: dict[str, Any]) -> str:
    rows = summary["rows"]
    lines = ["| top-1 % | passes | " + " | ".join(f"{size} x {size}" for size in SIZES) + " | agreement at 96 x 96 |"]
    lines.append("|---|" + "--:|" * (len(SIZES) + 2))
    linearized = [row for row in rows if row["kind"] == "linearize"]
    original = linearized[0]["steps"]["original"]["scores"]
    lines.append("| teacher, softmax | | " + " | ".join(f"{100 * entry['top1']:.1f}" for entry in original) + " | |")
    for attention in dict.fromkeys(row["attention"] for row in rows):
        of_it = [row for row in rows if row["attention"] == attention]
        for step, title in STEPS.items():
            scores = [row["steps"][step]["scores"] for row in of_it if row["kind"] == "linearize"]
            lines.append(line(f"{TITLES[attention]}, {title}", of_it[0]["passes"], scores))
        scratch = [row["scores"] for row in of_it if row["kind"] == "from_scratch"]
        lines.append(line(f"{TITLES[attention]}, from scratch", of_it[0]["passes"], scratch))
    return "\n".join(lines)


def line(title: str, passes: int, runs: list[list[dict[str, Any]]]) -> str:
    """Return the row of a table: mean and standard deviation over the runs that were measured at a size."""
    found = [[score["top1"] for scores in runs for score in scores if score["size"] == size] for size in SIZES]
    cells = [spread(values) for values in found]
    cells.append(spread([scores[0]["agreement"] for scores in runs]) if "agreement" in runs[0][0] else "")
    shown = {"replaced": "0", "transferred": str(TRANSFER_EPOCHS)}.get(title.split(", ")[1], str(passes))
    return f"| {title} | {shown} | {' | '.join(cells)} |"


def spread(values: list[float]) -> str:
    around = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.1f}{around}"


def cost_table(summary: dict[str, Any]) -> str:
    """Return milliseconds, and MiB beside the weights, of one image; the teacher's are those of the first pair."""
    rows = summary["cost"]
    lines = ["| ms, MiB | " + " | ".join(f"{size} x {size}" for size in COST_SIZES) + " |"]
    lines.append("|---|" + "--:|" * len(COST_SIZES))
    first = rows[0]["attention"]
    models = [(first, ORIGINAL, "teacher, softmax")]
    models += [(name, LINEARIZED, TITLES[name]) for name in dict.fromkeys(row["attention"] for row in rows)]
    for attention, case, title in models:
        found = [row for row in rows if row["attention"] == attention and row["case"] == case]
        cells = [f"{row['milliseconds']:.1f}, {row['peak_bytes'] / 2**20:.1f}" for row in found]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
