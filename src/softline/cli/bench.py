"""``softline bench``: what one attention layer costs."""

import argparse
import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from softline.attention import ATTENTIONS
from softline.bench import ScalingRow, growth_exponent, measure_scaling
from softline.bench.environment import environment
from softline.cli.arguments import Commands, add_attentions, check_parent, integers
from softline.engine.files import write_json
from softline.ops.inputs import check_option


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench",
        help="output and cost of softmax, SOFT++ and InLine over growing image sizes, in about a minute",
        description="Run one attention layer of each kind (64 channels, 2 heads, patches of 8x8 pixels, random tokens) "
        "on growing images and show output, time, operations and memory.",
    )
    parser.add_argument(
        "--sizes",
        type=integers,
        default=[224, 448, 896, 1344],
        metavar="PIXELS,...",
        help="image sides, comma-separated (default: 224,448,896,1344)",
    )
    add_attentions(parser)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the measurements here")
    parser.add_argument("--figure", type=Path, metavar="PATH", help="draw them here (.png or .svg; needs matplotlib)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    for name in options.attentions:
        check_option("attention", name, ATTENTIONS)
    if options.figure is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--figure needs matplotlib: pip install 'softline[train]'")
    check_parent(options.json, options.figure)
    machine = environment()
    print(f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}; float32, batch 1\n")
    baseline = options.attentions[0]
    print(f"{'image':<11}{'tokens':>7}  {'attention':<11}{'ms':>9}{'vs ' + baseline:>12}", end="")
    print(f"{'GMACs':>9}{'peak MiB':>10}   output (mean, std)")
    rows: list[ScalingRow] = []
    for group in measure_scaling(options.attentions, options.sizes):
        for row in group:
            _print_row(row, group[0].milliseconds / row.milliseconds)
        rows += group
        if options.json is not None:
            # after each size, so that a failure at a larger one loses nothing
            write_json(options.json, {"environment": machine, "rows": [dataclasses.asdict(row) for row in rows]})
    _print_growth(rows)
    if options.json is not None:
        print(f"measurements: {options.json}")
    if options.figure is not None:
        from softline.bench.figure import plot_scaling

        plot_scaling(rows, options.figure)
        print(f"figure: {options.figure}")


def _print_row(row: ScalingRow, speedup: float) -> None:
    image = f"{row.image_size}x{row.image_size}"
    print(f"{image:<11}{row.tokens:>7}  {row.attention:<11}{row.milliseconds:>9.1f}{speedup:>11.1f}x", end="")
    print(f"{row.macs / 1e9:>9.2f}{row.peak_bytes / 2**20:>10.1f}   {row.output_mean:+.3f}, {row.output_std:.3f}")


def _print_growth(rows: Sequence[ScalingRow]) -> None:
    if len({row.tokens for row in rows}) < 2:
        return
    print("\ncost grows as tokens^p (1 linear, 2 quadratic):")
    for name in dict.fromkeys(row.attention for row in rows):
        mine = [row for row in rows if row.attention == name]
        tokens = [row.tokens for row in mine]
        operations = growth_exponent(tokens, [row.macs for row in mine])
        milliseconds = growth_exponent(tokens, [row.milliseconds for row in mine])
        print(f"  {name:<11} operations p = {operations:.2f}   time p = {milliseconds:.2f}")
