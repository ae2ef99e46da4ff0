"""The ``softline`` command: parse arguments, call, print."""

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import softline
from softline.attention import ATTENTIONS
from softline.bench import ScalingRow, growth_exponent, measure_scaling
from softline.bench.catalog import describe, list_models
from softline.bench.environment import environment
from softline.checkpoints import convert_official
from softline.ops.inputs import check_option

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="softline", description="Vision transformers whose attention costs O(N): SOFT, SOFT++, InLine."
    )
    parser.add_argument("--version", action="version", version=f"softline {softline.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_quickstart(commands)
    _add_models(commands)
    _add_convert(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except BrokenPipeError:
        # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"softline {options.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


def _add_quickstart(commands: Commands) -> None:
    parser = commands.add_parser(
        "quickstart",
        help="output and cost of softmax, SOFT++ and InLine over growing image sizes, in about a minute",
        description="Run one attention layer of each kind (64 channels, 2 heads, patches of 8x8 pixels, random tokens) "
        "on growing images and show output, time, operations and memory.",
    )
    parser.add_argument(
        "--sizes",
        type=_integers,
        default=[224, 448, 896, 1344],
        metavar="PIXELS,...",
        help="image sides, comma-separated (default: 224,448,896,1344)",
    )
    parser.add_argument(
        "--attentions",
        type=lambda text: text.split(","),
        default=["softmax", "softpp", "inline"],
        metavar="NAME,...",
        help="attentions to compare with the first (default: softmax,softpp,inline)",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the measurements here")
    parser.add_argument("--figure", type=Path, metavar="PATH", help="draw them here (.png or .svg; needs matplotlib)")
    parser.set_defaults(run=_quickstart)


def _quickstart(options: argparse.Namespace) -> None:
    for name in options.attentions:
        check_option("attention", name, ATTENTIONS)
    if options.figure is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--figure needs matplotlib: pip install 'softline[train]'")
    _check_parent(options.json, options.figure)
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
            _write(options.json, {"environment": machine, "rows": [dataclasses.asdict(row) for row in rows]})
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


def _add_models(commands: Commands) -> None:
    parser = commands.add_parser(
        "models",
        help="list the models with their size, cost and reported accuracy",
        description="List softline's models. All are built by timm.create_model(NAME) after `import softline`.",
    )
    parser.add_argument("pattern", nargs="?", default="*", help="shell pattern, such as 'softpp_*' (default: all)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the list here")
    parser.set_defaults(run=_models)


def _models(options: argparse.Namespace) -> None:
    names = list_models(options.pattern)
    _check_parent(options.json)
    print(f"{'model':<24}{'image':>6}{'params M':>10}{'GMACs':>8}{'top-1 %*':>10}")
    cards = []
    for name in names:
        card = describe(name)
        cards.append(card)
        reported = "-" if card.reported_top1 is None else f"{card.reported_top1:.1f}"
        size = f"{card.image_size:>6}{card.parameters / 1e6:>10.2f}{card.macs / 1e9:>8.3f}"
        print(f"{name:<24}{size}{reported:>10}", flush=True)
    print("* on ImageNet-1K, as reported by the papers; not measured here")
    if options.json is not None:
        _write(options.json, [card._asdict() for card in cards])


def _add_convert(commands: Commands) -> None:
    parser = commands.add_parser(
        "convert",
        help="turn an official SOFT or InLine checkpoint into a directory that timm loads",
        description="Read an official checkpoint without executing anything in it and write config.json and "
        "model.safetensors; timm.create_model('local-dir:DIRECTORY', pretrained=True) loads them.",
    )
    parser.add_argument("checkpoint", type=Path, help="the authors' .pth file")
    parser.add_argument("directory", type=Path, help="where to write; must not exist yet")
    parser.add_argument("--model", metavar="NAME", help="softline's name of the model (default: found by its weights)")
    parser.set_defaults(run=_convert)


def _convert(options: argparse.Namespace) -> None:
    done = convert_official(options.checkpoint, options.directory, model=options.model)
    width = max(map(len, done.keys))
    for theirs, ours in done.keys.items():
        print(f"{theirs:<{width}}  ->  {ours or '(not needed)'}")
    print(f"\n{done.model}: {options.directory}")
    print(f"sha256 of model.safetensors: {done.sha256}")


def _check_parent(*paths: Path | None) -> None:
    for path in paths:
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"no such directory: {path.parent}")


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers separated by commas, got {text!r}") from None


def _write(path: Path, content: object) -> None:
    """Whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main())
