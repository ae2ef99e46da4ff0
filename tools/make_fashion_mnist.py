"""Write the images embedded in softline: the first 600 training and 100 test images of each class of Fashion-MNIST.

Reads the files of Debian's package dataset-fashion-mnist; the result is the same byte for byte.

    python tools/make_fashion_mnist.py src/softline/data/fashion_mnist
"""

import argparse
import gzip
import io
import lzma
from pathlib import Path

import numpy as np

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
# our name of the split, Zalando's, and the images of each class
SPLITS = [("train", "train", 600), ("test", "t10k", 100)]


def read_idx(path: Path, header: int) -> np.ndarray:
    return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=header)


def first_of_each_class(prefix: str, count: int) -> np.ndarray:
    """Images [class, image, 28, 28], in the order of the original."""
    images = read_idx(DEBIAN / f"{prefix}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)
    labels = read_idx(DEBIAN / f"{prefix}-labels-idx1-ubyte.gz", 8)
    return np.stack([images[labels == label][:count] for label in range(10)])


def compress(images: np.ndarray) -> bytes:
    # xz: a fifth smaller than a .npz, and its encoder does not vary with the zlib at hand
    plain = io.BytesIO()
    np.save(plain, images, allow_pickle=False)
    return lzma.compress(plain.getvalue(), preset=9)


def write(directory: Path) -> None:
    for split, prefix, count in SPLITS:
        (directory / f"{split}.npy.xz").write_bytes(compress(first_of_each_class(prefix, count)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="an existing directory")
    write(parser.parse_args().directory)
