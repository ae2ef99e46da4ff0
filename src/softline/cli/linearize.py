"""``softline linearize``: another attention in a pretrained model, trained to do what the old one did."""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softline.cli.arguments import Parser, add_source, integers, names, place
from softline.cli.outputs import check_outputs
from softline.cli.processes import told_once
from softline.cli.progress import Progress
from softline.cli.table import format_table, number
from softline.errors import UserError
from softline.files import write_json, write_text
from softline.linearizing.linearize import COST_SIZES, linearize

if TYPE_CHECKING:
    from softline.engine.events import Event
    from softline.linearizing.work import Linearized

REPORT = "report.html"
TITLES = {
    "transfer": "transfer: each new attention learns to return what the old one does",
    "finetune": "fine-tuning: the whole network learns from the original",
}


def add_arguments(parser: Parser) -> None:
    parser.describe(
        """Give a pretrained classifier of timm another attention, and train it to do what it did with its own: first
        each new attention by itself (transfer), then the whole network (finetune). Labels are not needed. Every key of
        the recipes linearize_transfer and linearize_finetune can be set, for both stages by --KEY, for one by
        --transfer.KEY or --finetune.KEY. A command that was interrupted continues when it is given again.""",
        usage="softline linearize SOURCE --attention NAME --data DATA [--output DIR] [--OPTION ...] [--KEY VALUE ...]",
        epilog="""\
            examples:
              softline linearize vit_small_patch16_224 --attention inline --data /data/imagenet --output runs/vit_inline
              softline linearize runs/teacher/best.pt --attention softpp --data photos --unlabelled
              softline linearize runs/teacher/best.pt --attention inline --data flowers --softmax-layers 2
              softline linearize runs/teacher/best.pt --attention inline --data flowers --stages transfer \\
                --transfer.schedule.epochs 4
              torchrun --standalone --nproc-per-node 8 -m softline.cli linearize deit_base_patch16_224 \\
                --attention inline --data /data/imagenet --precision bf16

            The linearised model is DIR/finetune/last.pt: softline evaluate, predict and export take it.
            """,
    )
    add_source(parser)
    parser.add_argument("--attention", required=True, metavar="NAME", help="the new attention: inline, softpp, ...")
    parser.add_argument(
        "--data",
        required=True,
        metavar="DATA",
        help="images to learn from and to measure on: a directory DATA/{train,val}/<class>/*.jpg, a .tar file, or a "
        "name that timm.data reads",
    )
    parser.add_argument("--root", metavar="DIR", help="where a timm.data name keeps its files")
    parser.add_argument(
        "--unlabelled", action="store_true", help="the images are not in class folders: DATA/{train,val}/*.jpg"
    )
    parser.add_argument(
        "--output",
        type=place,
        metavar="DIR",
        help="directory for the stages, numbers and report (default: runs/linearize/ATTENTION)",
    )
    parser.add_argument(
        "--layers",
        type=names,
        metavar="N,...",
        help="blocks whose attention is replaced, by index or pattern of names (default: all)",
    )
    parser.add_argument(
        "--softmax-layers",
        type=int,
        metavar="N",
        help="most layers that keep their attention: those whose replacement, measured one by one, hurts most",
    )
    parser.add_argument("--options", metavar="YAML", help="options of the attention, such as '{local_residual: false}'")
    parser.add_argument(
        "--queries",
        choices=("mean", "query", "key", "random"),
        default="mean",
        help="what SOFT's one projection for queries and keys inherits (default: the mean of both)",
    )
    parser.add_argument(
        "--drop-position-bias", action="store_true", help="give up Swin's position bias, which only softmax can have"
    )
    parser.add_argument(
        "--stages",
        type=names,
        default=list(TITLES),
        metavar="NAME,...",
        help="stages to run (default: transfer,finetune); finetune alone starts from a transfer that DIR has",
    )
    parser.add_argument(
        "--adapters", type=int, metavar="RANK", help="fine-tune low-rank changes of the projections (LoRA) only"
    )
    parser.add_argument(
        "--image-size", type=int, metavar="N", help="side of the images to learn from (default: the model's)"
    )
    parser.add_argument(
        "--sizes",
        type=integers,
        metavar="N,...",
        help="sides of the images to measure on (default: that of training, and with 2 and 4 times the pixels)",
    )
    parser.add_argument(
        "--cost-sizes",
        type=integers,
        default=list(COST_SIZES),
        metavar="N,...",
        help="sides of the images on which time and memory are measured "
        f"(default: {','.join(map(str, COST_SIZES))}; 0 for none)",
    )
    parser.add_argument(
        "--json", type=place, metavar="PATH", help="file for the numbers (default: linearized.json in the directory)"
    )
    parser.take_overrides()
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    # a missing package should be reported before the training
    import matplotlib  # noqa: F401

    check_outputs(options.json)
    with told_once():
        _linearize(options)


def _linearize(options: argparse.Namespace) -> None:
    from softline.engine.distributed import place as place_of_process
    from softline.linearizing.work import RESULT

    begin = time.monotonic()
    output = options.output or Path("runs") / "linearize" / options.attention
    with Progress(sys.stdout) as progress:
        result = linearize(
            options.source,
            options.attention,
            data=options.data,
            output=output,
            sizes=options.sizes,
            cost_sizes=[size for size in options.cost_sizes if size],
            progress=_Teller(progress),
            **_plan(options),
        )
    if place_of_process()[0]:
        return
    if options.json is not None:
        write_json(options.json, result.to_dict())
    print(f"\n{steps_table(result)}\n")
    if result.cost:
        print(f"{cost_table(result)}\n")
    _report(result, output / REPORT, options.command_line, time.monotonic() - begin)
    numbers = options.json or output / RESULT
    print(f"linearised model: {result.checkpoint}\nnumbers: {numbers}")
    print(f"open in a browser: {(output / REPORT).resolve()}")


def _plan(options: argparse.Namespace) -> dict[str, Any]:
    from softline.plain import read_yaml, short

    overrides = list(options.overrides)
    if options.adapters is not None:
        overrides += ["--finetune.adapters", str(options.adapters)]
    given = {} if options.options is None else read_yaml(options.options, "--options")
    if not isinstance(given, dict):
        raise UserError(f"--options must hold keys and values, got {short(given)}")
    return {
        "root": options.root,
        "labelled": not options.unlabelled,
        "layers": None if options.layers is None else tuple(_layer(text) for text in options.layers),
        "softmax_layers": options.softmax_layers,
        "options": given,
        "queries": options.queries,
        "drop_position_bias": options.drop_position_bias,
        "stages": tuple(options.stages),
        "image_size": options.image_size,
        "overrides": tuple(overrides),
    }


def _layer(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text


class _Teller:
    """Shows what happens in the stages."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.begun: set[str] = set()

    def __call__(self, stage: str, event: "Event") -> None:
        from softline.engine.events import Notice

        if stage in TITLES and stage not in self.begun:
            self.begun.add(stage)
            self.progress.say(f"\n{TITLES[stage]}")
        if isinstance(event, Notice) and event.routine:
            self.progress.show("", event.text)
        else:
            self.progress.hear(event)


def _report(result: "Linearized", path: Path, command: str, seconds: float) -> None:
    from softline.report.linearization import render_linearization
    from softline.report.linearization_maps import compare_maps, some_pictures

    original = result.load_original()
    maps = compare_maps(original, result.load(), some_pictures(result, original))
    write_text(path, render_linearization(result, maps, command=command, seconds=seconds))


def steps_table(result: "Linearized") -> str:
    """Format the scores of each step at each size."""
    labelled = any(scores.top1 is not None for step in result.steps for scores in step.scores)
    header, cells = ["model"], [[step.name] for step in result.steps]
    for index, first in enumerate(result.steps[0].scores):
        header += [f"top-1 % at {first.size}"] if labelled else []
        header.append(f"agreement % at {first.size}")
        for row, step in zip(cells, result.steps, strict=True):
            scores = step.scores[index]
            row += [number(scores.top1, ".2f", unit=0.01)] if labelled else []
            row.append(number(scores.agreement, ".2f", unit=0.01))
    return format_table(header, cells)


def cost_table(result: "Linearized") -> str:
    """Format time and memory of the original and the linearised model."""
    rows = [
        [
            row.label,
            row.case,
            number(row.milliseconds, ",.1f"),
            number(row.speedup, ".2f", "x"),
            number(row.peak_bytes, ",.1f", unit=2**20),
            row.failure or "",
        ]
        for row in result.cost
    ]
    return format_table(["image", "model", "ms", "speed", "MiB", ""], rows, left=2)
