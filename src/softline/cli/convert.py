"""``softline convert``: official checkpoints for timm."""

import argparse

from softline.cli.arguments import Parser, place
from softline.cli.table import format_table


def add_arguments(parser: Parser) -> None:
    parser.describe(
        """Read an official checkpoint, without executing anything in it, and write config.json and model.safetensors.
        After `import softline`, timm.create_model('local-dir:DIRECTORY', pretrained=True) loads them.""",
        epilog="""\
            example:
              softline convert SOFT_tiny.pth converted/soft_tiny
            """,
    )
    parser.add_argument("checkpoint", type=place, metavar="CHECKPOINT", help="the authors' .pth file")
    parser.add_argument("directory", type=place, metavar="DIRECTORY", help="where to write; it must not exist yet")
    parser.add_argument("--model", metavar="NAME", help="softline's name of the model (default: found by its weights)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from softline.weights.releases import convert_official

    done = convert_official(options.checkpoint, options.directory, model=options.model)
    rows = [[theirs, "->", ours or "(not needed)"] for theirs, ours in done.keys.items()]
    print(format_table(["official", "", "softline"], rows, left=3))
    print(f"\n{done.model}: {options.directory}")
    print(f"sha256 of model.safetensors: {done.sha256}")
