"""Pixels of greyscale images in row order: Image (CIFAR-10) and Pathfinder of the Long Range Arena.

The layouts below ``ROOT``:

- CIFAR-10: ``[cifar-10-batches-py/]{data_batch_1 ... data_batch_5, test_batch, batches.meta}``
- images of one size in class folders: ``{train,test}/<class>/<image>``
- Pathfinder: ``[[lra_release/]pathfinder32/][curv_contour_length_14/]{imgs/<k>/sample_<j>.png, metadata/<k>.npy}``;
  despite their names, the metadata files are text with a line per image: folder, file, a number, label and more

A token is the value of a pixel, 0 to 255: a black pixel is 0 and thus masked like padding, as in the benchmark.
"""

import io
import os
import pickle
import pickletools
import re
import reprlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from softline.checks import check_integer, check_option
from softline.data.images.datasets import to_mode
from softline.data.images.folders import FolderImages, open_folder
from softline.data.images.interface import load_image
from softline.data.reading import walk
from softline.data.sequences.interface import SequenceError, SequenceSource, Split, Tokens
from softline.data.sequences.text import LRA_ORIGIN, VOCABULARY, missing_download
from softline.errors import UserError
from softline.files import read_bytes

Pixels = NDArray[np.uint8]
Indices = NDArray[np.int64]

SPLITS = ("train", "val", "test")
IMAGE_TENTHS = {"train": (0, 9), "val": (9, 10)}
PATHFINDER_TENTHS = {"train": (0, 8), "val": (8, 9), "test": (9, 10)}
CIFAR_FOLDER = "cifar-10-batches-py"
CIFAR_META = "batches.meta"
CIFAR_BATCHES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
CIFAR_SIDE = 32
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_ORIGIN = "cifar-10-python.tar.gz of cs.toronto.edu/~kriz/cifar.html"
PATHFINDER_CLASSES = ("open", "connected")
CONTOURS = "curv_contour_length_14"
METADATA_LINE = re.compile(rb"imgs/(0|[1-9][0-9]{0,8})\s+sample_(0|[1-9][0-9]{0,8})\.png\s+\S+\s+([01])(\s.*)?")

MAX_TUPLES = 1000
# exceptions that pickle raises for files that are truncated or not pickles
UNREADABLE_PICKLE = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    OverflowError,
    RecursionError,
    MemoryError,
)


class BatchPixels:
    """Images of CIFAR-10's batches, as one array in memory because a pickle cannot be read in parts.

    pixels: [images, tokens].
    places: batch and row of each image [images, 2].
    """

    vocabulary = VOCABULARY
    max_length = CIFAR_SIDE * CIFAR_SIDE
    parts = 1

    def __init__(
        self, batches: Sequence[Path], classes: tuple[str, ...], pixels: Pixels, labels: Indices, places: Indices
    ) -> None:
        self.classes = classes
        self._batches = tuple(str(batch) for batch in batches)
        self._pixels, self._labels, self._places = pixels, labels, places

    def __len__(self) -> int:
        return len(self._pixels)

    def lengths(self) -> NDArray[np.int64]:
        return np.full(len(self), self.max_length)

    def name(self, index: int) -> str:
        batch, row = self._places[index].tolist()
        return f"{self._batches[batch]}: image {row}"

    def load(self, index: int) -> tuple[tuple[Tokens, ...], int]:
        return (self._pixels[index].astype(np.uint16),), int(self._labels[index])


class FolderPixels:
    """Images in class folders, all of ``size`` (width, height), converted to greyscale.

    indices: indices of the images that belong to the split.
    """

    vocabulary = VOCABULARY
    parts = 1

    def __init__(self, images: FolderImages, indices: Indices, *, size: tuple[int, int]) -> None:
        self.classes = images.classes
        self.max_length = size[0] * size[1]
        self._images, self._indices, self._size = images, indices, size

    def __len__(self) -> int:
        return len(self._indices)

    def lengths(self) -> NDArray[np.int64]:
        return np.full(len(self), self.max_length)

    def name(self, index: int) -> str:
        return self._images.name(int(self._indices[index]))

    def load(self, index: int) -> tuple[tuple[Tokens, ...], int]:
        image, label = self._images.load(int(self._indices[index]))
        _check_size(self.name(index), image, self._size)
        return (grey_tokens(image, lambda: self.name(index)),), label


class Samples(NamedTuple):
    """Pathfinder's images as listed in its metadata: arrays [images]."""

    folders: NDArray[np.int32]
    files: NDArray[np.int32]
    labels: NDArray[np.int32]
    metadata: NDArray[np.int32]
    """Index of the metadata file that lists the image."""
    lines: NDArray[np.int32]

    def at(self, indices: Indices) -> "Samples":
        return Samples(*(array[indices] for array in self))


class PathfinderPixels:
    """Pathfinder's images, all of ``size`` (width, height); every load opens its file again.

    root: folder that contains imgs and metadata.
    metadata: paths of the metadata files, to which ``samples.metadata`` refers.
    """

    classes = PATHFINDER_CLASSES
    vocabulary = VOCABULARY
    parts = 1

    def __init__(
        self, root: str, metadata: Sequence[str], samples: Samples, *, size: tuple[int, int] | None = None
    ) -> None:
        self._root, self._samples = root, samples
        self._metadata = np.array([os.fsencode(path) for path in metadata])
        self._size = self._decode(0).size if size is None else size
        self.max_length = self._size[0] * self._size[1]

    def __len__(self) -> int:
        return len(self._samples.labels)

    def lengths(self) -> NDArray[np.int64]:
        return np.full(len(self), self.max_length)

    def name(self, index: int) -> str:
        return f"{self._root}/imgs/{self._samples.folders[index]}/sample_{self._samples.files[index]}.png"

    def part(self, indices: Indices) -> "PathfinderPixels":
        """The images at ``indices``."""
        metadata = [os.fsdecode(path) for path in self._metadata]
        return PathfinderPixels(self._root, metadata, self._samples.at(indices), size=self._size)

    def load(self, index: int) -> tuple[tuple[Tokens, ...], int]:
        image = self._decode(index)
        _check_size(self.name(index), image, self._size)
        if image.mode != "L":
            raise SequenceError(f"{self.name(index)}: the image must be 8-bit greyscale, its mode is {image.mode}")
        return (_tokens(np.asarray(image)),), int(self._samples.labels[index])

    def _decode(self, index: int) -> Image.Image:
        try:
            return load_image(self.name(index))
        except FileNotFoundError as error:
            line = f"{os.fsdecode(self._metadata[self._samples.metadata[index]])}:{self._samples.lines[index]}"
            raise SequenceError(f"{line}: names the image {self.name(index)}, which does not exist") from error


def open_grey_images(root: Path, split: Split, *, seed: int = 0) -> SequenceSource:
    """Open images of CIFAR-10, or of class folders, in greyscale; all must have the size of the first training image.

    A black pixel is token 0 and thus masked like padding, as in the benchmark.

    root: folder of CIFAR-10's Python batches, its parent, or a folder that contains train and test.
    seed: seed of the permutation of the training images, of which the first 90 % are "train" and the rest "val".
    """
    check_option("split", split, SPLITS)
    check_integer("seed", seed, 0)
    root = Path(root)
    for folder in (root, root / CIFAR_FOLDER):
        if (folder / CIFAR_META).is_file():
            return _open_batches(folder, split, seed)
    if all((root / name).is_dir() for name in ("train", "test")):
        return _open_class_folders(root, split, seed)
    places = [root / CIFAR_META, root / CIFAR_FOLDER / CIFAR_META, root / "train", root / "test"]
    raise missing_download("CIFAR-10's batches or folders of images", split, places, CIFAR_ORIGIN)


def open_pathfinder(root: Path, split: Split, *, seed: int = 0) -> SequenceSource:
    """Open images of dashes and two dots; the label tells whether dashes connect the dots.

    A black pixel is token 0 and thus masked like padding, as in the benchmark.

    root: folder curv_contour_length_14, its parent (pathfinder32, pathfinder128, ...), or lra_release or its parent,
        of which pathfinder32 is used.
    seed: seed of the permutation of all images, of which the first 80 % are "train", the next 10 % "val" and the rest
        "test".
    """
    check_option("split", split, SPLITS)
    check_integer("seed", seed, 0)
    below = ("", CONTOURS, f"pathfinder32/{CONTOURS}", f"lra_release/pathfinder32/{CONTOURS}")
    folders = [Path(root, folder) for folder in below]
    folder = next((folder for folder in folders if (folder / "metadata").is_dir()), None)
    if folder is None:
        raise missing_download("Pathfinder's images", split, [path / "metadata" for path in folders], LRA_ORIGIN)
    found = next(walk(folder / "metadata", wanted=_is_metadata, root=folder))
    paths = [str(found.path / name) for name in found.files]
    samples = _read_metadata(folder, paths)
    indices = _share(folder, len(samples.labels), split, PATHFINDER_TENTHS[split], seed)
    return PathfinderPixels(str(folder), paths, samples).part(indices)


def grey_tokens(image: Image.Image, name: Callable[[], str]) -> Tokens:
    """Token ids [H * W] of an image: its grey values in row order."""
    if image.mode == "L":
        return _tokens(np.asarray(image))
    colours = np.asarray(to_mode(image, "RGB", name))  # [H, W, 3]
    return _tokens(luma(np.moveaxis(colours, -1, 0)))


def luma(colours: Pixels) -> Pixels:
    """Grey values [...] of red, green and blue [3, ...], as by TensorFlow's rgb_to_grayscale."""
    # not a matrix product, as the order of the sum must not depend on the machine
    red, green, blue = colours.astype(np.float32) * np.float32(1 / 255)
    grey = red * np.float32(0.2989) + green * np.float32(0.5870) + blue * np.float32(0.1140)
    return (grey * np.float32(255.5)).astype(np.uint8)


def _is_metadata(name: str) -> bool:
    return name.endswith(".npy") and not name.startswith(".")


def _share(root: Path, count: int, split: str, tenths: tuple[int, int], seed: int) -> Indices:
    """Sorted indices of the images between two tenths of a random permutation of ``count`` images."""
    start, end = (count * tenth // 10 for tenth in tenths)
    if start == end:
        raise UserError(f"{root}: {count} images are too few, the split {split!r} would have none")
    return np.sort(np.random.Generator(np.random.PCG64(seed)).permutation(count)[start:end])


def _image_share(root: Path, count: int, split: str, seed: int) -> Indices:
    return np.arange(count) if split == "test" else _share(root, count, split, IMAGE_TENTHS[split], seed)


def _tokens(pixels: Pixels) -> Tokens:
    return pixels.reshape(-1).astype(np.uint16)


def _check_size(name: str, image: Image.Image, size: tuple[int, int]) -> None:
    if image.size != size:
        found = f"{image.width}x{image.height} pixels, the first {size[0]}x{size[1]}"
        raise SequenceError(f"{name}: every image must have the size of the first, it has {found}")


def _open_class_folders(root: Path, split: str, seed: int) -> FolderPixels:
    images = {name: open_folder(str(root), name) for name in ("train", "test")}
    train, test = (images[name].classes for name in ("train", "test"))
    if train != test:
        only = ", ".join(sorted(set(train) ^ set(test)))
        raise UserError(f"{root}/train and {root}/test must have the same classes; only one of them has {only}")
    size = images["train"].load(0)[0].size
    chosen = images["test" if split == "test" else "train"]
    return FolderPixels(chosen, _image_share(root, len(chosen), split, seed), size=size)


def _open_batches(folder: Path, split: str, seed: int) -> BatchPixels:
    names = CIFAR_BATCHES["test" if split == "test" else "train"]
    paths = [folder / name for name in names]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise missing_download("CIFAR-10's batches", split, missing, CIFAR_ORIGIN)
    classes = _read_classes(folder / CIFAR_META)
    batches = [_read_batch(path, len(classes)) for path in paths]
    pixels = np.concatenate([pixels for pixels, _ in batches])
    labels = np.concatenate([labels for _, labels in batches])
    places = [(batch, row) for batch, (_, rows) in enumerate(batches) for row in range(len(rows))]
    chosen = _image_share(folder, len(pixels), split, seed)
    return BatchPixels(paths, classes, pixels[chosen], labels[chosen], np.array(places)[chosen])


def _read_classes(path: Path) -> tuple[str, ...]:
    names = _read_pickle(path).get(b"label_names")
    if not isinstance(names, list) or not names or not all(isinstance(name, bytes) for name in names):
        raise UserError(f"{path} must have class names under b'label_names', got {reprlib.repr(names)}")
    return tuple(name.decode("latin1") for name in names)


def _read_batch(path: Path, classes: int) -> tuple[Pixels, Indices]:
    """Greyscale images [images, tokens] and labels [images]."""
    content = _read_pickle(path)
    values = 3 * CIFAR_SIDE * CIFAR_SIDE
    data, labels = content.get(b"data"), content.get(b"labels")
    if not isinstance(data, _PickledArray) or not data.is_bytes(values):
        found = repr(data) if isinstance(data, _PickledArray) else reprlib.repr(data)
        raise UserError(f"{path} must have uint8 [images, {values}] under b'data', got {found}")
    count = data.shape[0]
    if not isinstance(labels, list) or len(labels) != count:
        found = f"{len(labels)} labels" if isinstance(labels, list) else reprlib.repr(labels)
        raise UserError(f"{path} must have a list of {count} labels, one for each image, under b'labels', got {found}")
    for row, label in enumerate(labels):
        if type(label) is not int or not 0 <= label < classes:
            raise UserError(f"{path}: image {row}: the label must be 0 to {classes - 1}, got {reprlib.repr(label)}")
    colours = np.frombuffer(data.content, np.uint8).reshape(data.shape, order="F" if data.by_column else "C")
    planes = colours.reshape(count, 3, -1)  # [images, 3, tokens]
    return luma(np.moveaxis(planes, 1, 0)), np.array(labels, np.int64)


class _PickledType:
    """Stand-in for numpy's dtype in a pickle."""

    def __init__(self, code: object = None, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Ignore the byte order and similar properties, which single bytes do not have."""


class _PickledArray:
    """Stand-in for a numpy array in a pickle, which holds the content of the file without executing anything."""

    shape: tuple[int, ...] = ()
    code: object = None
    by_column = False
    content = b""

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_column, content = state
        if not isinstance(shape, tuple) or not isinstance(kind, _PickledType) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("an array must have a shape, a type and bytes")
        self.shape, self.code, self.by_column, self.content = shape, kind.code, bool(by_column), content

    def is_bytes(self, columns: int) -> bool:
        """Whether it is a complete uint8 array [rows, columns] with at least one row."""
        rows = self.shape[0] if self.shape and type(self.shape[0]) is int else 0
        whole = self.shape == (rows, columns) and len(self.content) == rows * columns > 0
        return whole and self.code in ("u1", b"u1")

    def __repr__(self) -> str:
        code, shape = reprlib.repr(self.code), reprlib.repr(list(self.shape))
        return f"an array of type {code} {shape} in {len(self.content)} bytes"


def _pickled_array(*_: object) -> _PickledArray:
    return _PickledArray()


def _pickled_bytes(text: str, encoding: str) -> bytes:
    """Stand-in for the function by which Python 3 stores bytes in pickles that Python 2 can read."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes must be written as latin1, got {encoding!r}")
    return text.encode("latin1")


STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _pickled_array,
    ("numpy._core.multiarray", "_reconstruct"): _pickled_array,
    ("numpy", "ndarray"): _PickledArray,
    ("numpy", "dtype"): _PickledType,
    ("_codecs", "encode"): _pickled_bytes,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Reads numbers, strings, lists, dictionaries and arrays, and refuses everything else.

    A pickle may name any function to be called, so only the stand-ins are looked up.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STAND_INS:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which a batch does not need")
        return STAND_INS[module, name]


def _read_pickle(path: Path) -> dict[Any, Any]:
    file = read_bytes(path)
    try:
        _check_steps(file)
        content = _ArrayUnpickler(io.BytesIO(file), encoding="bytes").load()
    except UNREADABLE_PICKLE as error:
        raise UserError(f"{path} must be a file of CIFAR-10's Python version: {error}") from error
    if not isinstance(content, dict):
        found = reprlib.repr(content)
        raise UserError(f"{path} must be a file of CIFAR-10's Python version: a dictionary, got {found}")
    return content


def _check_steps(file: bytes) -> None:
    """Refuse what a small file could use to exhaust Python's memory or its stack.

    Memory is reserved for all numbers of stored values up to the largest, and the hash of a tuple of tuples of tuples
    needs the stack.
    """
    tuples = 0
    for code, argument, _ in pickletools.genops(file):
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= int(argument or 0) < len(file):
            raise pickle.UnpicklingError(f"it stores a value as number {argument}")
        tuples += code.name.startswith("TUPLE")
        if tuples > MAX_TUPLES:
            raise pickle.UnpicklingError(f"it has more than {MAX_TUPLES} tuples, which a batch does not need")


def _read_metadata(folder: Path, paths: Sequence[str]) -> Samples:
    """All images in the metadata, sorted by folder and file."""
    rows = []
    for number, path in enumerate(paths):
        for line, content in enumerate(read_bytes(path).splitlines(), start=1):
            match = METADATA_LINE.fullmatch(content.strip())
            if match is None:
                rule = "a line must be imgs/<number> sample_<number>.png <number> <label 0 or 1> and more"
                raise SequenceError(f"{path}:{line}: {rule}, got {content.decode('latin1')!r:.80}")
            rows.append((int(match[1]), int(match[2]), int(match[3]), number, line))
    if not rows:
        raise UserError(f"{folder}/metadata must hold *.npy files with a line for each image; found none")
    columns = np.array(rows, np.int32).T  # [5, images]
    samples = Samples(*columns[:, np.lexsort((columns[1], columns[0]))])
    same = np.flatnonzero((np.diff(samples.folders) == 0) & (np.diff(samples.files) == 0))
    if len(same):
        first, second = (f"{paths[samples.metadata[i]]}:{samples.lines[i]}" for i in (same[0], same[0] + 1))
        raise SequenceError(f"{second}: every image must be listed once, this one is also listed in {first}")
    return samples
