"""``softline export``: trained models as files that run without softline."""

import argparse
from typing import TYPE_CHECKING, Any

from softline.checks import check_integer
from softline.cli.arguments import Parser, add_source, place
from softline.cli.outputs import check_outputs, held_outputs
from softline.cli.progress import Progress
from softline.cli.table import format_table
from softline.errors import UserError
from softline.files import write_json

if TYPE_CHECKING:
    from softline.deploy.export import ExportReport

CALIBRATION_IMAGES = 64


def add_arguments(parser: Parser) -> None:
    parser.describe(
        """Write a trained model as a file that runs without softline, and compare it with the original on photographs:
        .onnx for ONNX Runtime, .pt2 for torch.export.load. Batch, height and width of the images may be anything unless
        they are fixed. A file that differs from the original by more than its precision allows is not written.""",
        usage="softline export SOURCE --to FILE [--OPTION ...]",
        epilog="""\
            examples:
              softline export runs/softpp/best.pt --to softpp.onnx
              softline export runs/softpp/best.pt --to softpp_int8.onnx --int8 static --calibrate /data/photos
              softline export runs/camvid/best.pt --to camvid.pt2 --size 360x480 --batch 1
              softline predict softpp.onnx cat.jpg
            """,
    )
    add_source(parser)
    parser.add_argument("--to", type=place, required=True, metavar="FILE", help="ends in .onnx or .pt2")
    parser.add_argument("--size", metavar="H[xW]", help="fix height and width of the images (default: any)")
    parser.add_argument("--length", type=int, metavar="N", help="fix the number of tokens of sequences (default: any)")
    parser.add_argument("--batch", type=int, metavar="N", help="fix the number of samples in a run (default: any)")
    parser.add_argument(
        "--preprocess",
        action="store_true",
        help="take bytes [B, H, W, C] as in image files and normalise them; resizing is left to the caller",
    )
    parser.add_argument(
        "--features", action="store_true", help="the maps of the backbone's stages instead of predictions"
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "fp16"),
        default="fp32",
        help="number format of the weights; fp16 keeps sums over tokens, distances and inverses in float32",
    )
    parser.add_argument(
        "--int8",
        choices=("dynamic", "static"),
        help="8-bit weights, for .onnx; static: 8-bit activations as well, whose range is found on images",
    )
    parser.add_argument(
        "--calibrate",
        metavar="DATA",
        help="images for --int8 static: as for `softline evaluate` (default: two photographs of the package)",
    )
    parser.add_argument("--split", default="train", metavar="NAME", help="part of that data (default: train)")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile by AOTInductor into a .pt2 package for this kind of machine; needs a C++ compiler",
    )
    parser.add_argument(
        "--no-compiled",
        action="store_true",
        help="leave torch.compile, which needs a C++ compiler and minutes, out of the comparison",
    )
    parser.add_argument("--json", type=place, metavar="PATH", help="also write the comparison to this file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    check_outputs(options.to, options.json)
    size = None if options.size is None else _size(options.size)
    for name in ("batch", "length"):
        if getattr(options, name) is not None:
            check_integer(f"--{name}", getattr(options, name), 1)
    if options.calibrate is not None and options.int8 != "static":
        raise UserError("--calibrate is for --int8 static")

    from softline.deploy.export import check_options, export, has_compiler
    from softline.deploy.loading import load
    from softline.measure.environment import environment

    check_options(options.to, precision=options.precision, int8=options.int8, package=options.compile, rounds=1)
    if str(options.source).endswith(".onnx"):
        raise UserError(f"{options.source} is exported already: name the checkpoint it was made of")
    trained = load(options.source)
    calibration = None if options.calibrate is None else _images(options.calibrate, options.split)
    with Progress() as progress, held_outputs(options.to, options.json):
        report = export(
            trained,
            options.to,
            size=size,
            length=options.length,
            batch=options.batch,
            preprocess=options.preprocess,
            features=options.features,
            precision=options.precision,
            int8=options.int8,
            calibration=calibration,
            package=options.compile,
            compiled=not options.no_compiled and has_compiler(),
            notify=lambda text: progress.show("", text),
        )
        if options.json is not None:
            described = {"source": options.source, "model": trained.name, "environment": environment()}
            write_json(options.json, {**described, **report.to_dict()})
    print(_text(report))


def _size(text: str) -> tuple[int, int]:
    parts = text.split("x")
    if not 1 <= len(parts) <= 2 or not all(part.isdigit() for part in parts):
        raise UserError(f"--size must be a side or HEIGHTxWIDTH in pixels, got {text!r}")
    sides = [int(part) for part in parts]
    for side in sides:
        check_integer("--size", side, 1)
    return sides[0], sides[-1]


def _images(source: str, split: str) -> list[Any]:
    from softline.data.images import ImageStream, open_source

    images = open_source(source, split)
    if isinstance(images, ImageStream):
        raise UserError(f"--calibrate needs images that can be read in any order, got {source}")
    count = min(len(images), CALIBRATION_IMAGES)
    # spread over the classes, which are stored one after the other
    return [images.load(place * len(images) // count)[0] for place in range(count)]


def _text(report: "ExportReport") -> str:
    ways = list(report.rows[0].milliseconds)
    head = ["input", "difference", "same class", *(f"{way} ms" for way in ways)]
    rows = [
        [
            "x".join(str(length) for length in row.sizes.values()),
            f"{row.difference:.1e}",
            "-" if row.agreement is None else f"{100 * row.agreement:.1f} %",
            *(f"{row.milliseconds[way]:,.1f}" for way in ways),
        ]
        for row in report.rows
    ]
    count = sum(report.operators.values())
    common = ", ".join(f"{name} {times}" for name, times in list(report.operators.items())[:6])
    limits = ", ".join(f"{axis} {_range(*limit)}" for axis, limit in report.input["ranges"].items())
    return "\n".join(
        [
            format_table(head, rows),
            "",
            f"{report.file}: {report.format}, {report.precision}, {report.bytes / 1e6:.1f} MB, "
            f"exported in {report.seconds:.0f} s",
            f"{count:,} operators of {len(report.operators)} kinds: {common}, ...",
            f"input {report.input['name']}: {limits}",
            f"largest difference {max(row.difference for row in report.rows):.1e} of the largest output, "
            f"allowed {report.tolerance:g}",
        ]
    )


def _range(least: int, most: int | None) -> str:
    if least == most:
        return str(least)
    return f"from {least}" if most is None else f"{least} to {most}"
