"""``softline evaluate``: the metrics of a trained model on any data."""

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from softline.checks import check_integer
from softline.cli.arguments import Parser, add_checkpoint, integers, place
from softline.cli.outputs import check_outputs
from softline.cli.processes import told_once
from softline.cli.progress import Progress
from softline.cli.table import Table, format_table, is_loss, metric_text, percent, rate
from softline.cli.task_options import given_options
from softline.files import write_json

if TYPE_CHECKING:
    from softline.engine.trained import Measured

# options of `Trained.evaluate` that the help page lists; a task takes some of them, and may take others
TASK_OPTIONS = ("split", "root", "sizes", "uncapped", "annotations", "inference", "skip_corrupt")
# of the images that models of one channel see as well, before they are converted
CHANNELS = 3
# more metrics than these get a line each
MOST_COLUMNS = 4


def add_arguments(parser: Parser) -> None:
    parser.describe(
        """Measure a trained model. Classifiers: top-1 and top-5 accuracy. Detectors: COCO's average precision of boxes
        and masks. Segmenters: mIoU, and a line for each class. Sequence models: accuracy. All: samples per second.
        Under torchrun, the processes share the data, and every sample counts once.""",
        usage="softline evaluate CHECKPOINT [DATA] [--json PATH] [--OPTION VALUE ...]",
        epilog="""\
            examples:
              softline evaluate runs/softpp/best.pt /data/imagenet --sizes 224,384
              softline evaluate runs/retinanet/best.pt --json results.json

            A model refuses options that have no meaning for it. Tasks of other packages can have options that are not
            listed here; their values are YAML.
            """,
    )
    add_checkpoint(parser)
    parser.add_argument(
        "data",
        nargs="?",
        metavar="DATA",
        help="where the data is. Classifiers need it: embedded, fashion-mnist, a directory, a .tar file or a name that "
        "timm.data reads. For other models it is a directory as in their recipes (default: the data of the training)",
    )
    parser.add_argument("--split", metavar="NAME", help="part of the data (default: the validation split)")
    parser.add_argument(
        "--sizes", type=integers, metavar="PIXELS,...", help="image sides, for classifiers (default: as in training)"
    )
    parser.add_argument(
        "--uncapped",
        action="store_true",
        help="for SOFT classifiers: landmarks at the paper's fixed ratio, more of them for larger images",
    )
    parser.add_argument("--root", metavar="DIR", help="where the files of a timm.data name are, for classifiers")
    parser.add_argument(
        "--annotations", metavar="FILE", help="JSON file, for detectors (default: annotations/instances_SPLIT.json)"
    )
    parser.add_argument(
        "--inference",
        choices=("whole", "slide"),
        help="whole images or sliding windows, for segmenters (default: as in training)",
    )
    parser.add_argument("--skip-corrupt", action="store_true", help="find unreadable images first and leave them out")
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="samples at once in each process (default: 64; 32 for sequences, 1 for detectors and segmenters)",
    )
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="data loading processes (default: 0)")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="number format (default: fp32)"
    )
    parser.add_argument("--json", type=place, metavar="PATH", help="also write the results to this file")
    parser.take_overrides()
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    with told_once():
        _evaluate(options)


def _evaluate(options: argparse.Namespace) -> None:
    check_outputs(options.json)
    if options.batch_size is not None:
        check_integer("--batch-size", options.batch_size, 1)
    check_integer("--workers", options.workers, 0)

    from softline.deploy.loading import load
    from softline.engine import distributed
    from softline.engine.machine import check_input_memory, check_loaders
    from softline.engine.trained import Evaluator, check_options
    from softline.measure.environment import environment

    check_loaders("--workers", options.workers)
    for size in options.sizes or []:
        check_integer("--sizes", size, 1)
        check_input_memory(f"--sizes {size}", options.batch_size or 1, (CHANNELS, size, size))
    trained = load(options.checkpoint)
    given = given_options(options, TASK_OPTIONS)
    check_options(trained.evaluate, given, kind=trained.kind)
    accelerator = distributed.start(precision=options.precision)
    rows: list[dict[str, Any]] = []
    with Progress() as progress:

        def say(text: str) -> None:
            if accelerator.is_main_process:
                progress.say(text, sys.stdout)

        def show(done: int, total: int | None) -> None:
            if accelerator.is_main_process:
                of = "" if total is None else f" of {total:,}"
                progress.show("", f"{done:,}{of} {trained.unit}", done=done, total=total)

        evaluator = Evaluator(accelerator, options.batch_size, options.workers, say, show)
        for measured in trained.evaluate(options.data, evaluator, **given):
            say(_result_text(measured, trained.unit, with_head=not rows))
            rows.append({**measured.on, **dataclasses.asdict(measured.result)})
    if options.json is not None and accelerator.is_main_process:
        described = {"checkpoint": options.checkpoint, "model": trained.name, "data": options.data}
        write_json(options.json, {**described, "environment": environment(), "rows": rows})


def _result_text(measured: "Measured", unit: str, *, with_head: bool) -> str:
    """Format a result: a table of its classes, if there are any, then one line, or a line for each of many metrics."""
    metrics, classes = measured.result.metrics, measured.result.details.get("classes", [])
    parts = [f"{_class_table(classes)}\n"] if classes else []
    if len(metrics) <= MOST_COLUMNS:
        table, line = _row(measured, unit)
        parts += [table.head] if with_head or classes else []
        parts.append(line)
    else:
        parts.append(", ".join(f"{name} {value}" for name, value in measured.on.items()))
        parts.append(format_table(["metric", "value"], [[name, metric_text(name, metrics[name])] for name in metrics]))
        parts.append(f"{measured.result.samples:,} {unit}, {measured.result.per_second:,.2f} {unit}/s")
    return "\n".join(parts)


def _row(measured: "Measured", unit: str) -> tuple[Table, str]:
    result = measured.result
    names = sorted(result.metrics, key=is_loss)
    numbers = {_metric_name(name): metric_text(name, result.metrics[name]).removesuffix(" %") for name in names}
    cells = {**{name: str(value) for name, value in measured.on.items()}, **numbers}
    cells |= {f"{unit}/s": rate(result.per_second), unit: f"{result.samples:,}"}
    # wide enough for the numbers of further lines, at other sizes
    table = Table(list(cells), widths=[max(len(cell), 5) for cell in cells.values()], left=len(measured.on))
    return table, table.line(list(cells.values()))


def _metric_name(name: str) -> str:
    """Return the head of a metric's column, such as "top-1 %"."""
    shown = f"top-{name.removeprefix('top')}" if name.startswith("top") else name
    return shown if is_loss(name) else f"{shown} %"


def _class_table(rows: list[dict[str, Any]]) -> str:
    """Format a line for each class: its name, its metrics and what is counted of it."""
    columns = [name for name in rows[0] if name != "name"]
    cells = [[row["name"], *(_class_cell(row[column]) for column in columns)] for row in rows]
    return format_table(["class", *columns], cells)


def _class_cell(value: float | None) -> str:
    return f"{value:,}" if isinstance(value, int) else percent(value)
