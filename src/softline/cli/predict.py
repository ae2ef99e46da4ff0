"""``softline predict``: what is on an image."""

import argparse
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

from softline.cli.arguments import Commands, check_parent
from softline.errors import UserError


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "predict",
        help="name, or draw, what is on images",
        description="Classifiers: the likeliest classes of each image with their probabilities. Detectors draw boxes "
        "and masks, segmenters a colour for each pixel with a legend, as PNG files in a directory; segmenters write "
        "the labels themselves too, as NAME_labels.png.",
    )
    parser.add_argument(
        "checkpoint", help="a .pt file of `softline train`, a directory that timm saved, or a published model's name"
    )
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image files")
    parser.add_argument("--top", type=int, metavar="K", help="classes for each image, of classifiers (default: 5)")
    parser.add_argument(
        "--score", type=float, metavar="S", help="draw objects with a higher score, of detectors (default: 0.5)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where detectors and segmenters put what they draw")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the predictions here")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from softline.files import write_json
    from softline.tasks.loading import load_trained

    check_parent(options.json)
    trained = load_trained(options.checkpoint)
    if trained.task == "sequence":
        raise UserError(f"{options.checkpoint} was trained for sequences, not for images")
    predictions = _name(options, trained) if trained.task == "classification" else _draw(options, trained)
    if options.json is not None:
        write_json(options.json, predictions)


def _name(options: argparse.Namespace, trained: Any) -> list[dict[str, Any]]:
    from softline.checks import check_integer
    from softline.tasks.classification.trained import predict

    _refuse(options, trained, "out", "score")
    top = 5 if options.top is None else options.top
    check_integer("--top", top, 1)
    _check_images(options)
    predictions = []
    for prediction in predict(trained, options.images, top=top):
        predictions.append(dataclasses.asdict(prediction))
        print(prediction.name)
        for name, probability in zip(prediction.classes, prediction.probabilities, strict=True):
            print(f"  {100 * probability:5.1f} %  {name}")
    return predictions


def _draw(options: argparse.Namespace, trained: Any) -> list[dict[str, Any]]:
    from softline.engine import distributed
    from softline.files import make_directory, write_whole
    from softline.tasks.dense import predict_dense

    _refuse(options, trained, *(["top"] if trained.task == "detection" else ["top", "score"]))
    if options.out is None:
        raise UserError(f"a model for {trained.task} draws on the images: say where to by --out DIR")
    score = 0.5 if options.score is None else options.score
    if not 0 <= score < 1:
        raise UserError(f"--score must be at least 0 and below 1, got {score}")
    names = [f"{Path(path).stem}.png" for path in options.images]
    written = [*names, *(_labels_name(name) for name in names if trained.task == "segmentation")]
    twice = sorted({name for name in written if written.count(name) > 1})
    if twice:
        raise UserError(f"several images would be drawn to {twice[0]}: name them apart, or use several directories")
    images = {Path(path).resolve() for path in options.images}
    for name in written:
        if (options.out / name).resolve() in images:
            raise UserError(f"{options.out / name} is one of the images and would be lost: name another --out DIR")
    _check_images(options)
    make_directory(options.out)
    predictions = []
    trained.model.to(distributed.start().device)
    drawn_images = predict_dense(trained.model, trained.classes, trained.recipe, options.images, score=score)
    for name, drawn in zip(names, drawn_images, strict=True):
        target = options.out / name
        write_whole(target, partial(drawn.image.save, format="PNG"))
        if drawn.labels is not None:
            write_whole(options.out / _labels_name(name), partial(drawn.labels.save, format="PNG"))
        predictions.append({"name": drawn.name, **drawn.found})
        print(f"{drawn.name} -> {target}: {_summary(drawn.found)}")
    return predictions


def _check_images(options: argparse.Namespace) -> None:
    """All of them before the first, which may take long."""
    from softline.data.images.single import check_file

    for path in options.images:
        check_file(path)


def _labels_name(name: str) -> str:
    return f"{Path(name).stem}_labels.png"


def _summary(found: dict[str, Any]) -> str:
    if "objects" in found:
        names = [each["class"] for each in found["objects"]]
        return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)) or "no objects"
    shares = sorted(found["pixels"].items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares[:6])


def _refuse(options: argparse.Namespace, trained: Any, *names: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise UserError(f"--{name} has no meaning for a model of {trained.task}")
