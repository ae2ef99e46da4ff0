"""Finding images that cannot be decoded before training, so that the number of images is known from the start."""

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from PIL import Image

from softline.checks import check_integer
from softline.data.images.datasets import check_bits
from softline.data.images.interface import CorruptImageError, ImageSource
from softline.data.sampler import check_rank
from softline.errors import UserError


@dataclass(frozen=True)
class CorruptImage:
    """An image that cannot be decoded."""

    index: int
    name: str
    reason: str


def find_corrupt(
    source: ImageSource,
    *,
    threads: int = 8,
    shard: tuple[int, int] = (0, 1),
    progress: Callable[[int, int], None] | None = None,
) -> list[CorruptImage]:
    """Decode every image of a shard and return those that fail, by index.

    shard: (rank, processes); takes the images rank, rank + processes, ...
    progress: called in this thread with the number of images done and the total.
    """
    check_integer("threads", threads, 1)
    rank, processes = shard
    check_rank(rank, processes)
    indices = range(rank, len(source), processes)
    found = []
    with ThreadPoolExecutor(threads) as pool:
        # in portions, because a future for each image of a large dataset would fill the memory
        for start in range(0, len(indices), 1024):
            portion = indices[start : start + 1024]
            found += [corrupt for corrupt in pool.map(lambda index: _check(source, index), portion) if corrupt]
            if progress is not None:
                progress(start + len(portion), len(indices))
    return found


def _check(source: ImageSource, index: int) -> CorruptImage | None:
    try:
        check_bits(source.load(index)[0], lambda: source.name(index))
    except CorruptImageError as error:
        return CorruptImage(index, error.name, error.reason)
    return None


def remaining(length: int, left_out: Collection[int]) -> list[int]:
    """The indices below ``length`` that are not in ``left_out``."""
    gone = set(left_out)
    outside = sorted(index for index in gone if not 0 <= index < length)
    if outside:
        raise UserError(f"indices must lie between 0 and {length - 1}, got {outside[0]}")
    return [index for index in range(length) if index not in gone]


class _Without:
    def __init__(self, source: ImageSource, indices: Collection[int]) -> None:
        self.classes = source.classes
        self._source = source
        self._kept = remaining(len(source), indices)

    def __len__(self) -> int:
        return len(self._kept)

    def load(self, index: int) -> tuple[Image.Image, int]:
        return self._source.load(self._kept[index])

    def name(self, index: int) -> str:
        return self._source.name(self._kept[index])


def without(source: ImageSource, indices: Collection[int]) -> ImageSource:
    """The source without the images at ``indices``; it keeps all classes, even those without any image left."""
    return _Without(source, indices)
