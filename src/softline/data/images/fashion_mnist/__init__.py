"""Fashion-MNIST: 28 x 28 greyscale images of ten kinds of clothing.

By Xiao, Rasul and Vollgraf, https://arxiv.org/abs/1708.07747. The package contains the first 600 training and 100 test
images of each class, written by tools/make_fashion_mnist.py.
"""

import gzip
import lzma
import os
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from softline.checks import check_option
from softline.errors import UserError

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
SPLITS = {"train": "train", "val": "test", "test": "test"}
DEBIAN = Path("/usr/share/datasets/fashion-mnist")

Bytes = npt.NDArray[np.uint8]


class ArrayImages:
    """Greyscale images in an array.

    images: [image, 28, 28].
    labels: [image].
    prefix: start of the images' names.
    """

    def __init__(self, images: Bytes, labels: Bytes, prefix: str) -> None:
        self.classes = CLASSES
        self._images, self._labels, self._prefix = images, labels, prefix

    def __len__(self) -> int:
        return len(self._images)

    def load(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self._images[index]), int(self._labels[index])

    def name(self, index: int) -> str:
        return f"{self._prefix}/{index}"


def embedded(split: str) -> ArrayImages:
    """The 6,000 training or 1,000 test images of the package, sorted by class."""
    check_option("split", split, SPLITS)
    compressed = files(__name__).joinpath(f"{SPLITS[split]}.npy.xz")
    with compressed.open("rb") as file, lzma.open(file) as plain:
        images: Bytes = np.lib.format.read_array(plain, allow_pickle=False)  # [class, image, 28, 28]
    labels = np.arange(10, dtype=np.uint8).repeat(images.shape[1])
    return ArrayImages(images.reshape(-1, 28, 28), labels, f"embedded/{SPLITS[split]}")


def full(split: str, *, root: str | None = None) -> ArrayImages:
    """All 60,000 training or 10,000 test images: from Debian's package if installed, else downloaded to ``root``."""
    check_option("split", split, SPLITS)
    images, labels = _debian(SPLITS[split]) if DEBIAN.is_dir() else _download(SPLITS[split], root)
    return ArrayImages(images, labels, f"fashion-mnist/{SPLITS[split]}")


def _debian(split: str) -> tuple[Bytes, Bytes]:
    prefix = {"train": "train", "test": "t10k"}[split]
    images, labels = (DEBIAN / f"{prefix}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1"))
    return _read_idx(images, 16).reshape(-1, 28, 28), _read_idx(labels, 8)


def _read_idx(path: Path, header: int) -> Bytes:
    return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=header)


def _download(split: str, root: str | None) -> tuple[Bytes, Bytes]:
    directory = root or os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "softline")
    try:
        dataset = import_module("torchvision.datasets").FashionMNIST(directory, train=split == "train", download=True)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"Fashion-MNIST could not be downloaded to {directory} ({error}); connect to the internet, "
            "install Debian's package dataset-fashion-mnist, or use the source 'embedded'"
        ) from error
    return dataset.data.numpy(), dataset.targets.numpy().astype(np.uint8)
