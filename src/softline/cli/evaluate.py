"""``softline evaluate``: the metrics of a trained model on any data."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from softline.cli.arguments import Commands, check_parent, integers
from softline.cli.processes import told_once
from softline.cli.progress import metrics_text, percent
from softline.errors import UserError

# back to the start of the line, and empty it
CLEAR = "\r\033[K"


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="accuracy and speed of a trained model on any data, at one or several image sizes",
        description="Classifiers: top-1 and top-5 accuracy and images per second. Detectors: COCO's AP of boxes and "
        "masks. Segmenters: mIoU, and a line for each class. Models of sequences: accuracy. Works under torchrun as "
        "well: every sample counts once.",
    )
    parser.add_argument(
        "checkpoint", help="a .pt file of `softline train`, a directory that timm saved, or a published model's name"
    )
    parser.add_argument(
        "data",
        nargs="?",
        help="embedded, fashion-mnist, a directory, a .tar file, or a name that timm.data reads; for detectors, "
        "segmenters and models of sequences a directory as in their recipes (default: where they were trained)",
    )
    parser.add_argument(
        "--sizes", type=integers, metavar="PIXELS,...", help="image sides, of classifiers (default: as trained)"
    )
    parser.add_argument("--split", help="default: val (or validation, or test); for all but classifiers the recipe's")
    parser.add_argument("--annotations", metavar="FILE", help="COCO's JSON, if it is not annotations/instances_SPLIT")
    parser.add_argument(
        "--inference",
        choices=("whole", "slide"),
        help="images at once or in windows, of segmenters (default: as trained)",
    )
    parser.add_argument("--root", metavar="DIR", help="where a timm.data name keeps its files")
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="in each process (default: 64; 32 for sequences, 1 for detectors and segmenters)",
    )
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="loading processes (default: 0)")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--skip-corrupt", action="store_true", help="look for unreadable images and leave them out")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    with told_once():
        _evaluate(options)


def _evaluate(options: argparse.Namespace) -> None:
    from softline.checks import check_integer
    from softline.engine import distributed
    from softline.files import write_json
    from softline.measure.environment import environment
    from softline.tasks.loading import load_trained

    check_parent(options.json)
    if options.batch_size is not None:
        check_integer("--batch-size", options.batch_size, 1)
    check_integer("--workers", options.workers, 0)
    trained = load_trained(options.checkpoint)
    measure = {"classification": _classes, "sequence": _sequences}.get(trained.task, _dense)
    accelerator = distributed.start(precision=options.precision)
    teller = _Teller(accelerator.is_main_process)
    rows = measure(options, trained, accelerator, teller)
    if options.json is not None and accelerator.is_main_process:
        described = {"checkpoint": options.checkpoint, "model": trained.name, "data": options.data}
        write_json(options.json, {**described, "environment": environment(), "rows": rows})


def _classes(options: argparse.Namespace, trained: Any, accelerator: Any, teller: "_Teller") -> list[dict[str, Any]]:
    from softline.tasks.classification.trained import evaluate_sizes

    if options.data is None:
        raise UserError("name the data to evaluate on, such as a directory")
    for name, whose in (("annotations", "detectors"), ("inference", "segmenters")):
        if getattr(options, name) is not None:
            raise UserError(f"--{name} is for {whose}; {options.checkpoint} is a classifier")
    rows: list[dict[str, Any]] = []
    for size, result in evaluate_sizes(
        trained,
        options.data,
        accelerator,
        sizes=options.sizes,
        split=options.split or "val",
        root=options.root,
        batch_size=options.batch_size or 64,
        workers=options.workers,
        skip_corrupt=options.skip_corrupt,
        notify=teller.say,
        progress=teller.show,
    ):
        if not rows:
            teller.say(f"{'size':>5}{'top-1 %':>10}{'top-5 %':>10}{'loss':>9}{'images/s':>11}{'images':>9}")
        metrics = result.metrics
        accuracy = f"{100 * metrics['top1']:>10.2f}{100 * metrics['top5']:>10.2f}{metrics['loss']:>9.4f}"
        teller.say(f"{size:>5}{accuracy}{result.per_second:>11,.0f}{result.samples:>9,}")
        rows.append({"size": size, **dataclasses.asdict(result)})
    return rows


def _dense(options: argparse.Namespace, trained: Any, accelerator: Any, teller: "_Teller") -> list[dict[str, Any]]:
    from softline.tasks.dense import evaluate_dense

    for name in ("sizes", "root"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name} is for classifiers; {options.checkpoint} was trained for {trained.task}")
    if options.inference is not None and trained.task != "segmentation":
        raise UserError(f"--inference is for segmenters; {options.checkpoint} was trained for {trained.task}")
    if options.annotations is not None and trained.task != "detection":
        raise UserError(f"--annotations is for detectors; {options.checkpoint} was trained for {trained.task}")
    changes: dict[str, Any] = {"skip_corrupt": options.skip_corrupt}
    changes |= {"source": options.data} if options.data is not None else {}
    changes |= {"val_split": options.split} if options.split is not None else {}
    changes |= {"inference": options.inference} if options.inference is not None else {}
    if trained.task == "detection":
        # a file named in the recipe belongs to the recipe's images
        moved = options.data is not None or options.split is not None
        changes |= {"val_annotations": options.annotations} if moved or options.annotations is not None else {}
    recipe = trained.recipe.replace(data=dataclasses.replace(trained.recipe.data, **changes))
    result = evaluate_dense(
        trained.model,
        trained.classes,
        recipe,
        accelerator,
        batch_size=options.batch_size or 1,
        workers=options.workers,
        notify=teller.say,
        progress=teller.show,
    )
    for line in _class_table(result.details.get("classes", [])):
        teller.say(line)
    for name, value in result.metrics.items():
        teller.say(f"{name:<16}{percent(value):>8}")
    teller.say(f"{result.samples:,} images, {result.per_second:,.2f} a second")
    measured_on = {"source": recipe.data.source, "split": recipe.data.val_split}
    return [{**measured_on, **dataclasses.asdict(result)}]


def _sequences(options: argparse.Namespace, trained: Any, accelerator: Any, teller: "_Teller") -> list[dict[str, Any]]:
    from softline.checks import check_option
    from softline.data.sequences.lra import has_listops_files
    from softline.tasks.sequence.trained import evaluate_sequence

    for name in ("sizes", "root", "annotations", "inference"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name} is for images; {options.checkpoint} was trained for sequences")
    if options.skip_corrupt:
        raise UserError(f"--skip-corrupt is for images; {options.checkpoint} was trained for sequences")
    changes: dict[str, Any] = {}
    if options.data is not None:
        # the benchmark's own expressions instead of generated ones
        generated = {"generate": None} if has_listops_files(Path(options.data)) else {}
        changes |= {"source": options.data, **generated}
    if options.split is not None:
        check_option("--split", options.split, ("train", "val", "test"))
        changes["val_split"] = options.split
    recipe = trained.recipe.replace(data=dataclasses.replace(trained.recipe.data, **changes))
    result = evaluate_sequence(
        trained.model,
        trained.settings,
        recipe,
        accelerator,
        batch_size=options.batch_size or 32,
        workers=options.workers,
        notify=teller.say,
        progress=teller.show,
    )
    teller.say(f"{metrics_text(result.metrics)}\n{result.samples:,} sequences, {result.per_second:,.2f} a second")
    measured_on = {"source": recipe.data.source, "split": recipe.data.val_split}
    return [{**measured_on, **dataclasses.asdict(result)}]


def _class_table(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each class, as wide as its longest name."""
    if not rows:
        return []
    numbers = [name for name in rows[0] if name not in ("name", "pixels")]
    width = max(len("class"), *(len(row["name"]) for row in rows)) + 2
    lines = [f"{'class':<{width}}" + "".join(f"{name:>12}" for name in numbers)]
    for row in rows:
        lines.append(f"{row['name']:<{width}}" + "".join(f"{percent(row[name]):>12}" for name in numbers))
    return [*lines, ""]


class _Teller:
    """Prints on one process: lines, and on a terminal how far it is."""

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks
        self.shown = speaks and sys.stderr.isatty()

    def say(self, text: str) -> None:
        if self.speaks:
            print(f"{CLEAR if self.shown else ''}{text}", flush=True)

    def show(self, done: int, total: int | None) -> None:
        if self.shown:
            of = "" if total is None else f" of {total:,}"
            print(f"{CLEAR}{done:,}{of} done", end="", file=sys.stderr, flush=True)
