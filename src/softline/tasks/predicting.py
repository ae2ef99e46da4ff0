"""Samples that a trained model is used on, in batches."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from PIL import Image
from torch import Tensor

from softline.checks import check_integer
from softline.data.images.datasets import Mode
from softline.data.images.single import list_images, to_image
from softline.engine.trained import Result

T = TypeVar("T")


class Photograph(NamedTuple):
    """An image to use a model on."""

    image: Image.Image
    name: str | None
    """Path of its file; None if it comes from memory."""


def predict_images(
    inputs: Any, run: Callable[[Sequence[Photograph]], Sequence[Result]], *, mode: Mode, batch_size: int
) -> Any:
    """Run a model on one image, or on those of a list, tuple, array or tensor; return a result, or a list of them.

    inputs: see `softline.data.images.single.to_image`; an array or tensor of four dimensions is a list of images.
    run: returns a result for each image of a batch.
    """
    opened = partial(_open, mode=mode)
    return predict_samples(inputs, list_images(inputs), opened, run, what="image", batch_size=batch_size)


def predict_samples(
    inputs: Any,
    listed: Sequence[Any] | None,
    opened: Callable[..., T],
    run: Callable[[Sequence[T]], Sequence[Result]],
    *,
    what: str,
    batch_size: int,
) -> Any:
    """Run a model on samples in batches; return a result, or a list of them.

    listed: the samples in ``inputs``; None if that is one sample.
    opened: reads a sample; its argument ``what`` is what an error calls it.
    run: returns a result for each sample of a batch.
    """
    check_integer("batch_size", batch_size, 1)
    if listed is None:
        (result,) = run([opened(inputs, what=f"the {what}")])
        return result
    results: list[Result] = []
    for first in range(0, len(listed), batch_size):
        batch = enumerate(listed[first : first + batch_size], first)
        results += run([opened(sample, what=f"{what} {index}") for index, sample in batch])
    return results


def run_by_size(images: Sequence[Tensor], run: Callable[[Tensor], Sequence[T]]) -> list[T]:
    """Run images [C, H, W] of equal size together; return what ``run`` returns for each, in their order.

    run: takes a batch [B, C, H, W].
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for place, image in enumerate(images):
        places.setdefault(tuple(image.shape), []).append(place)
    found: dict[int, T] = {}
    for alike in places.values():
        # a single image is not copied
        batch = images[alike[0]][None] if len(alike) == 1 else torch.stack([images[place] for place in alike])
        found |= zip(alike, run(batch), strict=True)
    return [found[place] for place in range(len(images))]


def _open(item: Any, *, mode: Mode, what: str) -> Photograph:
    return Photograph(to_image(item, mode, name=what), str(item) if isinstance(item, str | Path) else None)
