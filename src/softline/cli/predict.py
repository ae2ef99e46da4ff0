"""``softline predict``: apply a trained model to files."""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from softline.checks import check_integer
from softline.cli.arguments import Parser, add_checkpoint, place
from softline.cli.outputs import check_outputs, held_outputs
from softline.cli.task_options import given_options
from softline.errors import UserError
from softline.files import write_json, write_whole

if TYPE_CHECKING:
    from softline.engine.trained import Result

# options of `Trained.predict` that the help page lists; a task takes some of them, and may take others
TASK_OPTIONS = ("top", "score", "inference", "batch_size")


def add_arguments(parser: Parser) -> None:
    parser.describe(
        """Apply a trained model to files and print what it finds: the most probable classes of an image or a text, the
        objects in an image, the shares of the classes of its pixels. --out also draws it, as NAME.png: bars beside the
        image, boxes and masks, a colour for each pixel with a legend. Segmenters also write the labels themselves, as
        NAME_labels.png.""",
        usage="softline predict CHECKPOINT FILE [FILE ...] [--out DIR] [--json PATH] [--OPTION VALUE ...]",
        epilog="""\
            examples:
              softline predict runs/softpp/best.pt cat.jpg dog.jpg --top 3
              softline predict runs/retinanet/best.pt street.jpg --out drawn --score 0.3
              softline predict runs/lra_text/best.pt review.txt

            A model refuses options that have no meaning for it. Tasks of other packages can have options that are not
            listed here; their values are YAML.
            """,
    )
    add_checkpoint(parser)
    parser.add_argument("files", nargs="+", metavar="FILE", help="images, or texts for models of sequences")
    parser.add_argument("--top", type=int, metavar="K", help="number of classes to print, for classifiers (default: 5)")
    parser.add_argument(
        "--score", type=float, metavar="S", help="leave out objects with a lower score, for detectors (default: 0.5)"
    )
    parser.add_argument(
        "--inference",
        choices=("whole", "slide"),
        help="whole images or sliding windows, for segmenters (default: as in training)",
    )
    parser.add_argument("--batch-size", type=int, metavar="N", help="files at once (default: 1)")
    parser.add_argument("--out", type=place, metavar="DIR", help="directory for drawings of what is found")
    parser.add_argument("--json", type=place, metavar="PATH", help="also write the predictions to this file")
    parser.take_overrides()
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    check_outputs(options.json)
    if options.batch_size is not None:
        check_integer("--batch-size", options.batch_size, 1)

    from softline.data.images.single import check_file
    from softline.deploy.loading import load
    from softline.engine import distributed
    from softline.engine.trained import check_options

    trained = load(options.checkpoint)
    given = given_options(options, TASK_OPTIONS)
    check_options(trained.predict, given, kind=trained.kind)
    targets = _targets(options, trained.drawings, trained.kind)
    # all of them before the first one, as predictions may take long
    for path in options.files:
        check_file(path, "file")
    # so are the values of the options
    trained.predict([], **given)
    trained.to(distributed.start().device)
    found, size = [], options.batch_size or 1
    with held_outputs(options.json, directory=options.out):
        for first in range(0, len(options.files), size):
            paths = options.files[first : first + size]
            results = trained.predict([Path(path) for path in paths], **given)
            for path, result in zip(paths, results, strict=True):
                _write(path, result, targets[path])
                found.append({**result.to_dict(), "name": path})
        if options.json is not None:
            write_json(options.json, found)


def _targets(options: argparse.Namespace, suffixes: Sequence[str], kind: str) -> dict[str, dict[str, Path]]:
    """Return the files to write, by file and suffix, after checking that none of them replaces another or an input."""
    if options.out is None:
        return {path: {} for path in options.files}
    if not suffixes:
        raise UserError(f"--out has no meaning for {kind}, which draws nothing")
    targets = {
        path: {suffix: options.out / f"{Path(path).stem}{suffix}.png" for suffix in suffixes} for path in options.files
    }
    written = [target for path in options.files for target in targets[path].values()]
    twice = sorted({target.name for target in written if written.count(target) > 1})
    if twice:
        raise UserError(f"several files would be drawn to {twice[0]}: rename them, or use several directories")
    files = {Path(path).resolve() for path in options.files}
    for target in written:
        if target.resolve() in files:
            raise UserError(f"{target} is one of the files and would be overwritten: name another --out DIR")
    return targets


def _write(path: str, result: "Result", targets: Mapping[str, Path]) -> None:
    drawings = result.drawings() if targets else {}
    for suffix, target in targets.items():
        write_whole(target, partial(drawings[suffix].save, format="PNG"))
    head, text = " -> ".join([path, *map(str, list(targets.values())[:1])]), str(result)
    # an indented text is a block of its own
    print(f"{head}\n{text}" if text.startswith(" ") else f"{head}: {text}", flush=True)
