"""``softline convert``: official checkpoints for timm."""

import argparse
from pathlib import Path

from softline.cli.arguments import Commands
from softline.weights.releases import convert_official


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "convert",
        help="turn an official SOFT or InLine checkpoint into a directory that timm loads",
        description="Read an official checkpoint without executing anything in it and write config.json and "
        "model.safetensors; timm.create_model('local-dir:DIRECTORY', pretrained=True) loads them.",
    )
    parser.add_argument("checkpoint", type=Path, help="the authors' .pth file")
    parser.add_argument("directory", type=Path, help="where to write; must not exist yet")
    parser.add_argument("--model", metavar="NAME", help="softline's name of the model (default: found by its weights)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    done = convert_official(options.checkpoint, options.directory, model=options.model)
    width = max(map(len, done.keys))
    for theirs, ours in done.keys.items():
        print(f"{theirs:<{width}}  ->  {ours or '(not needed)'}")
    print(f"\n{done.model}: {options.directory}")
    print(f"sha256 of model.safetensors: {done.sha256}")
