"""Image datasets for torch's DataLoader."""

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Literal

from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from softline.checks import check_integer, check_option
from softline.data.images.interface import CorruptImageError, ImageSource, ImageStream
from softline.data.randomness import repeatable

Mode = Literal["RGB", "L"]
Transform = Callable[[Image.Image], Tensor]


class LabelledImages(Dataset[tuple[Tensor, int]]):
    """Transformed images and labels, by index or by (epoch, index); a plain index belongs to epoch 0.

    A random transform depends on (seed, epoch, index) only: not on the number of workers or processes, nor on where a
    run was interrupted.

    mode: RGB, or L for greyscale.
    """

    def __init__(self, source: ImageSource, transform: Transform, *, seed: int = 0, mode: Mode = "RGB") -> None:
        check_integer("seed", seed, 0)
        check_option("mode", mode, ("RGB", "L"))
        self.source, self.transform, self.seed, self.mode = source, transform, seed, mode

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: int | tuple[int, int]) -> tuple[Tensor, int]:
        epoch, index = key if isinstance(key, tuple) else (0, key)
        image, label = self.source.load(index)
        image = to_mode(image, self.mode, lambda: self.source.name(index))
        with repeatable(self.seed, epoch, index):
            return self.transform(image), label


class StreamImages(IterableDataset[tuple[Tensor, int]]):
    """Transformed images and labels of a stream.

    A random transform depends on (seed, epoch, rank, worker, position in the worker).
    """

    def __init__(
        self, stream: ImageStream, transform: Transform, *, seed: int = 0, rank: int = 0, mode: Mode = "RGB"
    ) -> None:
        check_integer("seed", seed, 0)
        check_integer("rank", rank, 0)
        check_option("mode", mode, ("RGB", "L"))
        self.stream, self.transform, self.seed, self.rank, self.mode = stream, transform, seed, rank, mode
        # in shared memory, so that persistent workers see changes
        self._epoch = multiprocessing.Value("i", 0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; call this before each pass."""
        self._epoch.value = epoch
        self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        worker = get_worker_info()
        place = (self._epoch.value, self.rank, worker.id if worker else 0)
        for position, (image, label) in enumerate(self.stream):
            image = to_mode(image, self.mode, lambda: "an image of the stream")
            with repeatable(self.seed, *place, position):
                tensor = self.transform(image)
            yield tensor, label


def to_mode(image: Image.Image, mode: Mode, name: Callable[[], str]) -> Image.Image:
    check_bits(image, name)
    return image if image.mode == mode else image.convert(mode)


def check_bits(image: Image.Image, name: Callable[[], str]) -> None:
    # Pillow would clip values of 16 and 32 bits at 255
    if image.mode.startswith(("I", "F")):
        raise CorruptImageError(name(), f"8 bits for each colour are needed, its mode is {image.mode}")
