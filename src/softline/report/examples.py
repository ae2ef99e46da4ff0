"""Images under the attention of several trained models, side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from softline.analysis.heatmap import HeatMap, query_map
from softline.analysis.subjects import Picture, Subject, open_subject
from softline.data.images import ImageSource
from softline.layers.grid import GridSize

HEAD = 0


@dataclass(frozen=True)
class Example:
    """One image with a heat map and a prediction of each model."""

    name: str
    image: Tensor
    """The image as the first model sees it, with values from 0 to 1: [C, H, W]."""
    label: str
    maps: dict[str, HeatMap]
    """By model, the weights of one query in head 1 of the first layer."""
    predictions: dict[str, tuple[str, float]]
    """By model, the most probable class and its probability."""


def compare_attention(checkpoints: Mapping[str, Path], source: ImageSource, *, count: int = 5) -> list[Example]:
    """Compare trained models on ``count`` images: the first of as many classes, spread over all.

    checkpoints: classifiers by name, for images of one size and the classes of ``source``.
    """
    if not checkpoints:
        return []
    subjects = [open_subject(str(path), name=name) for name, path in checkpoints.items()]
    pictures = [Picture(source.name(index), *source.load(index)) for index in first_of_classes(source, count)]
    return [_example(subjects, picture) for picture in pictures]


def _example(subjects: Sequence[Subject], picture: Picture) -> Example:
    assert picture.label is not None, "the images of a source have labels"
    first = subjects[0]
    image = first.prepare(picture.image)
    maps: dict[str, HeatMap] = {}
    predictions: dict[str, tuple[str, float]] = {}
    for subject in subjects:
        (given,), logits = subject.look(subject.prepare(picture.image)[None], subject.layers[:1])
        query = brightest_token(image, given.grid_size)
        values = query_map(given, given.token(*query), head=HEAD)
        column = f"{given.layer.name}, head {HEAD + 1}"
        maps[subject.name] = HeatMap(subject.name, picture.name, column, query, given.grid_size, values)
        probability, predicted = logits[0].softmax(-1).max(-1)
        predictions[subject.name] = (subject.classes[int(predicted)], float(probability))
    return Example(picture.name, first.shown(image), first.classes[picture.label], maps, predictions)


def first_of_classes(source: ImageSource, count: int) -> list[int]:
    """Indices of the first image of each of ``count`` classes, spread over all classes: nobody selects them."""
    first: dict[int, int] = {}
    for index in range(len(source)):
        first.setdefault(source.load(index)[1], index)
    labels = sorted(first)
    count = min(count, len(labels))
    return [first[labels[position * len(labels) // count]] for position in range(count)]


def brightest_token(image: Tensor, grid_size: GridSize) -> tuple[int, int]:
    """Row and column of the brightest patch of an image [C, H, W], which is on the object if the ground is dark."""
    patches = nn.functional.adaptive_avg_pool2d(image.mean(0, keepdim=True), grid_size)[0]  # [H, W]
    row, column = divmod(int(patches.argmax()), grid_size[1])
    return row, column
