"""Where a model looks: rows of the explicit attention weights, laid out on the image."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from softline.backbones.inspection import Layer, attention_layers, look
from softline.checks import check_index
from softline.data.images import ImageSource
from softline.data.images.datasets import to_mode
from softline.errors import UserError
from softline.layers.grid import GridSize
from softline.plotting.contrast import contrast
from softline.tasks.images import eval_image_transform
from softline.tasks.loading import load_trained


@dataclass(frozen=True)
class HeatMap:
    """How much one token of an image takes from each of the others, in one head."""

    row: Tensor
    """Weights [H, W] of the query; class tokens are left out."""
    query: tuple[int, int]
    """Row and column of the query in the grid."""
    predicted: int
    """The model's class."""
    probability: float
    """That the model gives to it."""

    def contrast(self) -> Tensor:
        """See `contrast`."""
        return contrast(self.row)


@dataclass(frozen=True)
class Example:
    """One image under the eyes of several models."""

    name: str
    image: Tensor
    """As the models saw it, but in 0 to 1: [C, H, W]."""
    label: str
    maps: dict[str, HeatMap]
    """By model."""
    classes: tuple[str, ...]


def compare_attention(checkpoints: Mapping[str, Path], source: ImageSource, *, count: int = 5) -> list[Example]:
    """Heat maps of ``count`` images, the first of as many classes spread over all, by models that `train` wrote.

    checkpoints: of models for images of one size and for the classes of ``source``.
    """
    if not checkpoints:
        return []
    trained = {name: load_trained(str(path)) for name, path in checkpoints.items()}
    for one in trained.values():
        one.model.eval()
    first = next(iter(trained.values()))
    indices = first_of_classes(source, count)
    loaded = [source.load(index) for index in indices]
    transform = eval_image_transform(first.settings)
    images = torch.stack([transform(to_mode(image, first.settings["mode"], lambda: "image")) for image, _ in loaded])
    grid_size = look(first.model, images[:1], find_layer(first.model, 0, 0))[0][0].grid_size
    queries = [brightest_token(image, grid_size) for image in images]
    maps = {name: attention_maps(one.model, images, queries) for name, one in trained.items()}
    mean, std = (torch.tensor(first.settings[key])[:, None, None] for key in ("mean", "std"))
    return [
        Example(
            name=source.name(index),
            image=(images[position] * std + mean).clamp(0, 1),
            label=first.classes[label],
            maps={name: found[position] for name, found in maps.items()},
            classes=first.classes,
        )
        for position, (index, (_, label)) in enumerate(zip(indices, loaded, strict=True))
    ]


def first_of_classes(source: ImageSource, count: int) -> list[int]:
    """Indices of the first image of each of ``count`` classes, spread over all: chosen by no one's taste."""
    first: dict[int, int] = {}
    for index in range(len(source)):
        first.setdefault(source.load(index)[1], index)
    labels = sorted(first)
    count = min(count, len(labels))
    return [first[labels[position * len(labels) // count]] for position in range(count)]


def attention_maps(
    model: nn.Module, images: Tensor, queries: list[tuple[int, int]], *, stage: int = 0, block: int = 0, head: int = 0
) -> list[HeatMap]:
    """One heat map for each image, as in Figs. 4 and 7 of the SOFT paper: a row of the weights of one head.

    model: a backbone of softline, in eval mode.
    images: [B, C, H, W].
    queries: for each image the token (row, column) whose row is taken.
    """
    if len(queries) != len(images):
        raise UserError(f"queries must name one token for each of {len(images)} images, got {len(queries)}")
    (given,), logits = look(model, images, find_layer(model, stage, block))
    chances = logits.softmax(-1)
    maps = []
    for index, (row, column) in enumerate(queries):
        token = torch.tensor([given.token(row, column)])
        with torch.no_grad():
            rows = given.rows()(token)[index, :, 0]  # [heads, N]
        check_index("head", head, len(rows))
        probability, predicted = chances[index].max(-1)
        maps.append(HeatMap(given.on_grid(rows[head]).float(), (row, column), int(predicted), float(probability)))
    return maps


def find_layer(model: nn.Module, stage: int, block: int) -> list[Layer]:
    """The attention of a block."""
    layers = attention_layers(model)
    check_index("stage", stage, layers[-1].stage + 1)
    check_index("block", block, sum(layer.stage == stage for layer in layers))
    return [layer for layer in layers if (layer.stage, layer.block) == (stage, block)]


def brightest_token(image: Tensor, grid_size: GridSize) -> tuple[int, int]:
    """Row and column of the patch of ``image`` [C, H, W] that is brightest: on the object, where the ground is dark."""
    patches = nn.functional.adaptive_avg_pool2d(image.mean(0, keepdim=True), grid_size)[0]  # [H, W]
    row, column = divmod(int(patches.argmax()), grid_size[1])
    return row, column
