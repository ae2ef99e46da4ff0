"""``softline predict``: apply a trained model to images."""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from softline.cli.arguments import Parser, add_checkpoint, place
from softline.cli.outputs import check_outputs, held_outputs
from softline.cli.task_options import given_options
from softline.errors import UserError
from softline.files import write_json, write_whole

if TYPE_CHECKING:
    from softline.engine.trained import Prediction

# options of `Trained.predict` that the help page lists; a task takes some of them, and may take others
TASK_OPTIONS = ("top", "score")


def add_arguments(parser: Parser) -> None:
    parser.describe(
        """Apply a trained model to images. Classifiers: the most probable classes of each image. Detectors draw boxes
        and masks, segmenters a colour for each pixel with a legend, as NAME.png in the directory --out; segmenters also
        write the labels themselves, as NAME_labels.png.""",
        usage="softline predict CHECKPOINT IMAGE [IMAGE ...] [--out DIR] [--json PATH] [--OPTION VALUE ...]",
        epilog="""\
            examples:
              softline predict runs/softpp/best.pt cat.jpg dog.jpg --top 3
              softline predict runs/retinanet/best.pt street.jpg --out drawn --score 0.3

            A model refuses options that have no meaning for it. Tasks of other packages can have options that are not
            listed here; their values are YAML.
            """,
    )
    add_checkpoint(parser)
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image files")
    parser.add_argument("--top", type=int, metavar="K", help="number of classes to print, for classifiers (default: 5)")
    parser.add_argument(
        "--score", type=float, metavar="S", help="leave out objects with a lower score, for detectors (default: 0.5)"
    )
    parser.add_argument("--out", type=place, metavar="DIR", help="directory for what detectors and segmenters draw")
    parser.add_argument("--json", type=place, metavar="PATH", help="also write the predictions to this file")
    parser.take_overrides()
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    check_outputs(options.json)

    from softline.data.images.single import check_file
    from softline.engine import distributed
    from softline.engine.trained import check_options
    from softline.tasks.loading import load_trained

    trained = load_trained(options.checkpoint)
    given = given_options(options, TASK_OPTIONS)
    check_options(trained.predict, given, kind=trained.kind)
    targets = _targets(options, trained.drawings, trained.kind)
    predictions = trained.predict(options.images, **given)
    # all of them before the first one, as predictions may take long
    for path in options.images:
        check_file(path)
    trained.model.to(distributed.start().device)
    found = []
    with held_outputs(options.json, directory=options.out):
        for path, prediction in zip(options.images, predictions, strict=True):
            _write(prediction, targets[path])
            found.append({"name": prediction.name, **prediction.found})
        if options.json is not None:
            write_json(options.json, found)


def _targets(options: argparse.Namespace, suffixes: Sequence[str], kind: str) -> dict[str, dict[str, Path]]:
    """Return the files to write, by image and suffix, after checking that none of them replaces another or an image."""
    if not suffixes:
        if options.out is not None:
            raise UserError(f"--out has no meaning for {kind}, which draws nothing")
        return {path: {} for path in options.images}
    if options.out is None:
        raise UserError(f"{kind} draws on the images: name a directory for the drawings with --out DIR")
    targets = {
        path: {suffix: options.out / f"{Path(path).stem}{suffix}.png" for suffix in suffixes} for path in options.images
    }
    written = [target for path in options.images for target in targets[path].values()]
    twice = sorted({target.name for target in written if written.count(target) > 1})
    if twice:
        raise UserError(f"several images would be drawn to {twice[0]}: rename them, or use several directories")
    images = {Path(path).resolve() for path in options.images}
    for target in written:
        if target.resolve() in images:
            raise UserError(f"{target} is one of the images and would be overwritten: name another --out DIR")
    return targets


def _write(prediction: "Prediction", targets: Mapping[str, Path]) -> None:
    if not targets:
        print(f"{prediction.name}\n{prediction.text}", flush=True)
        return
    for suffix, target in targets.items():
        write_whole(target, partial(prediction.images[suffix].save, format="PNG"))
    print(f"{prediction.name} -> {next(iter(targets.values()))}: {prediction.text}", flush=True)
