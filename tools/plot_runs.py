"""Draw the training losses of several runs in one figure: python tools/plot_runs.py out.png LABEL=runs/NAME ...

Reads log.jsonl of each run's directory.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WINDOW = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figure", type=Path, help="the file to write, such as docs/losses.png")
    parser.add_argument(
        "runs", nargs="+", metavar="LABEL=DIR", help="directories of `softline train`, with their names"
    )
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    figure, axis = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for run in options.runs:
        label, equals, directory = run.partition("=")
        if not equals:
            raise SystemExit(f"runs are given as LABEL=DIR, got {run}")
        steps, losses = read_losses(Path(directory) / "log.jsonl")
        smooth = running_mean(losses)
        (line,) = axis.plot(steps, smooth, label=f"{label}: {smooth[-1]:.2f} at the end")
        axis.plot(steps, losses, color=line.get_color(), alpha=0.2, linewidth=0.8)
    axis.set_xlabel("step")
    axis.set_ylabel("training loss")
    axis.set_title(options.title, loc="left", fontsize=11)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(options.figure, dpi=150)


def read_losses(path: Path) -> tuple[list[int], list[float]]:
    """Steps and their losses, of the log lines that have one."""
    if not path.exists():
        raise SystemExit(f"no such file: {path}; runs are directories of `softline train`")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    pairs = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    if not pairs:
        raise SystemExit(f"{path} has no step with a loss yet")
    steps, losses = zip(*pairs, strict=True)
    return list(steps), list(losses)


def running_mean(values: list[float]) -> list[float]:
    """Of the last few values, fewer at the beginning."""
    return [
        sum(values[max(i - WINDOW + 1, 0) : i + 1]) / len(values[max(i - WINDOW + 1, 0) : i + 1])
        for i in range(len(values))
    ]


if __name__ == "__main__":
    main()
