"""``softline evaluate``: accuracy of a trained model, at one or several image sizes."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from softline.cli.arguments import Commands, check_parent, integers
from softline.cli.processes import told_once

# back to the start of the line, and empty it
CLEAR = "\r\033[K"


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="accuracy and speed of a trained model on any data, at one or several image sizes",
        description="Top-1 and top-5 accuracy and images per second. Works under torchrun as well: every image counts "
        "once.",
    )
    parser.add_argument(
        "checkpoint", help="a .pt file of `softline train`, a directory that timm saved, or a published model's name"
    )
    parser.add_argument(
        "data", help="embedded, fashion-mnist, a directory, a .tar file, or a name that timm.data reads"
    )
    parser.add_argument("--sizes", type=integers, metavar="PIXELS,...", help="image sides (default: as trained)")
    parser.add_argument("--split", default="val", help="default: val (or validation, or test)")
    parser.add_argument("--root", metavar="DIR", help="where a timm.data name keeps its files")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="in each process (default: 64)")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="loading processes (default: 0)")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--skip-corrupt", action="store_true", help="look for unreadable images and leave them out")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    with told_once():
        _evaluate(options)


def _evaluate(options: argparse.Namespace) -> None:
    from softline.bench.environment import environment
    from softline.engine import distributed
    from softline.engine.files import write_json
    from softline.engine.trained import evaluate_sizes, load_trained
    from softline.ops.inputs import check_integer

    check_parent(options.json)
    check_integer("--batch-size", options.batch_size, 1)
    check_integer("--workers", options.workers, 0)
    trained = load_trained(options.checkpoint)
    accelerator = distributed.start(precision=options.precision)
    speaks = accelerator.is_main_process

    shown = speaks and sys.stderr.isatty()

    def say(text: str) -> None:
        if speaks:
            print(f"{CLEAR if shown else ''}{text}", flush=True)

    def show(done: int, total: int | None) -> None:
        if shown:
            of = "" if total is None else f" of {total:,}"
            print(f"{CLEAR}{done:,}{of} images", end="", file=sys.stderr, flush=True)

    rows: list[dict[str, Any]] = []
    for size, result in evaluate_sizes(
        trained,
        options.data,
        accelerator,
        sizes=options.sizes,
        split=options.split,
        root=options.root,
        batch_size=options.batch_size,
        workers=options.workers,
        skip_corrupt=options.skip_corrupt,
        notify=say,
        progress=show,
    ):
        if not rows:
            say(f"{'size':>5}{'top-1 %':>10}{'top-5 %':>10}{'loss':>9}{'images/s':>11}{'images':>9}")
        metrics = result.metrics
        accuracy = f"{100 * metrics['top1']:>10.2f}{100 * metrics['top5']:>10.2f}{metrics['loss']:>9.4f}"
        say(f"{size:>5}{accuracy}{result.per_second:>11,.0f}{result.samples:>9,}")
        rows.append({"size": size, **dataclasses.asdict(result)})
    if options.json is not None and speaks:
        described = {"checkpoint": options.checkpoint, "model": trained.name, "data": options.data}
        write_json(options.json, {**described, "environment": environment(), "rows": rows})
