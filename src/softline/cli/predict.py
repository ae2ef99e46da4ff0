"""``softline predict``: what is on an image."""

import argparse
import dataclasses
from pathlib import Path

from softline.cli.arguments import Commands, check_parent


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "predict",
        help="name what is on images",
        description="The likeliest classes of each image with their probabilities.",
    )
    parser.add_argument(
        "checkpoint", help="a .pt file of `softline train`, a directory that timm saved, or a published model's name"
    )
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image files")
    parser.add_argument("--top", type=int, default=5, metavar="K", help="classes for each image (default: 5)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the predictions here")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from softline.engine.files import write_json
    from softline.engine.trained import load_trained, predict
    from softline.ops.inputs import check_integer

    check_integer("--top", options.top, 1)
    check_parent(options.json)
    trained = load_trained(options.checkpoint)
    predictions = []
    for prediction in predict(trained, options.images, top=options.top):
        predictions.append(dataclasses.asdict(prediction))
        print(prediction.name)
        for name, probability in zip(prediction.classes, prediction.probabilities, strict=True):
            print(f"  {100 * probability:5.1f} %  {name}")
    if options.json is not None:
        write_json(options.json, predictions)
