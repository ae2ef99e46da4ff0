"""Semantic segmentation datasets: ADE20K, Cityscapes, and folders of images and masks.

The layouts below ``ROOT``:

- ade20k: ``images/{training,validation}/*.jpg`` with ``annotations/{training,validation}/*.png``
- cityscapes: ``leftImg8bit/SPLIT/CITY/*_leftImg8bit.png`` with ``gtFine/SPLIT/CITY/*_gtFine_labelIds.png``
- folder: ``SPLIT/*.jpg`` with ``SPLITannot/*.png`` (as CamVid), or ``images/SPLIT/*.jpg`` with ``masks/SPLIT/*.png``

Images may be .jpg, .jpeg or .png and may be in subfolders; a mask has the name of its image. EXIF orientation is not
applied: a mask labels the stored pixels. ROOT and the folders named here may be symbolic links; below them links are
refused.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from softline.checks import check_integer, check_option
from softline.data.images.corrupt import remaining
from softline.data.images.datasets import to_mode
from softline.data.images.interface import EXTENSIONS, CorruptImageError, decode, decoding, load_image, read_content
from softline.data.randomness import repeatable
from softline.data.reading import walk
from softline.data.semantic.classes import (
    ADE20K,
    CITYSCAPES,
    CITYSCAPES_IDS,
    IGNORE,
    LAYOUTS,
    Layout,
    check_class_count,
    palette,
)
from softline.data.semantic.transforms import SemanticTransform
from softline.errors import UserError

__all__ = ["IGNORE", "CorruptMaskError", "Layout", "SemanticImages", "SemanticSource", "open_semantic", "palette"]

ADE20K_SPLITS = {"train": "training", "val": "validation", "training": "training", "validation": "validation"}
CITYSCAPES_SPLITS = ("train", "val", "test")

logger = logging.getLogger(__name__)


class CorruptMaskError(CorruptImageError):
    """A mask that can be decoded but does not label the pixels of its image."""

    text = "mask {name}: {reason}; repair it, or leave the image out by --skip-corrupt"


@runtime_checkable
class SemanticSource(Protocol):
    """Images with a label for each pixel that can be read in any order, by several threads and processes."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names by label."""

    def __len__(self) -> int: ...

    def load(self, index: int) -> tuple[Image.Image, NDArray[np.uint8]]:
        """The RGB image and its labels [H, W], 0 to K - 1 or IGNORE; `CorruptImageError` if either is unusable."""

    def name(self, index: int) -> str:
        """Path of the image file."""

    def without(self, indices: Collection[int]) -> "SemanticSource":
        """The source without the images at ``indices``, such as those that `find_corrupt` returns."""


class Values(NamedTuple):
    """The meaning of the byte values in a mask."""

    labels: NDArray[np.uint8]
    """[256]: the label of each byte value, or IGNORE."""
    known: NDArray[np.bool_]
    """[256]: the byte values that may occur."""
    rule: str
    """Description of these values for error messages."""


class SemanticFiles:
    """Pairs of image and mask files; every load opens them again, so that threads and processes share no open files.

    pairs: paths of image and mask, sorted.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]], classes: Sequence[str], values: Values) -> None:
        self.classes = tuple(classes)
        self._values = values
        # arrays, because reference counting would gradually copy the objects of a list into every worker
        self._images = np.array([os.fsencode(image) for image, _ in pairs])
        self._masks = np.array([os.fsencode(mask) for _, mask in pairs])

    def __len__(self) -> int:
        return len(self._images)

    def name(self, index: int) -> str:
        return os.fsdecode(self._images[index])

    def mask_name(self, index: int) -> str:
        return os.fsdecode(self._masks[index])

    def without(self, indices: Collection[int]) -> "SemanticFiles":
        pairs = [(self.name(index), self.mask_name(index)) for index in remaining(len(self), indices)]
        return SemanticFiles(pairs, self.classes, self._values)

    def load(self, index: int) -> tuple[Image.Image, NDArray[np.uint8]]:
        name, mask_name = self.name(index), self.mask_name(index)
        image = to_mode(load_image(name), "RGB", lambda: name)
        mask = _read_mask(mask_name)  # [H, W]
        if mask.shape != (image.height, image.width):
            sizes = f"{mask.shape[1]}x{mask.shape[0]} pixels, its image {name} {image.width}x{image.height}"
            raise CorruptMaskError(mask_name, f"a mask must have the size of its image, it has {sizes}")
        counts = np.bincount(mask.ravel(), minlength=256)
        unknown = np.flatnonzero((counts > 0) & ~self._values.known)
        if len(unknown):
            found = ", ".join(f"{value} ({counts[value]} pixels)" for value in unknown[:10])
            more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
            raise CorruptMaskError(mask_name, f"its values must be {self._values.rule}, got {found}{more}")
        return image, self._values.labels[mask]


class SemanticImages(Dataset[tuple[Tensor, Tensor]]):
    """Transformed images [3, H, W] and labels [H, W] by index or by (epoch, index).

    A plain index belongs to epoch 0. A random transform depends on (seed, epoch, index) only: not on the number of
    workers or processes, nor on where a run was interrupted.
    """

    def __init__(self, source: SemanticSource, transform: SemanticTransform, *, seed: int = 0) -> None:
        check_integer("seed", seed, 0)
        self.source, self.transform, self.seed = source, transform, seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: int | tuple[int, int]) -> tuple[Tensor, Tensor]:
        epoch, index = key if isinstance(key, tuple) else (0, key)
        image, labels = self.source.load(index)
        with repeatable(self.seed, epoch, index):
            return self.transform(image, labels)


def open_semantic(
    layout: Layout,
    root: Path,
    split: str,
    *,
    classes: Sequence[str] | int | None = None,
    ignore_index: int | None = None,
    skip_corrupt: bool = False,
    notify: Callable[[str], None] = logger.info,
) -> SemanticSource:
    """Open the images of a split and their labels. Every image must have a mask and every mask an image.

    split: train or val; also training and validation for ade20k, test for cityscapes, and any folder name for the
        layout folder.
    classes: class names by label, or their number; required for the layout folder, and not allowed for others.
    ignore_index: for the layout folder, the value in its masks that means "no label". With 0 the classes begin at 1, as
        in ADE20K; any other value must follow those of the classes. None: every pixel has a label.
    skip_corrupt: leave out images without a mask and masks without an image, and report them to ``notify``. Files that
        cannot be read are found by `find_corrupt`.
    """
    check_option("layout", layout, LAYOUTS)
    root = Path(root)
    if layout == "folder":
        names = _class_names(classes)
        values = _values_of_classes(len(names), ignore_index)
        image_folder, mask_folder = _find_folders(root, split)
        pairs = _pair(root, image_folder, mask_folder, skip=skip_corrupt, notify=notify)
        return SemanticFiles(pairs, names, values)
    if classes is not None or ignore_index is not None:
        given = f"classes {classes!r}" if classes is not None else f"ignore_index {ignore_index}"
        raise UserError(f"classes and ignore_index are for the layout folder, {layout} has its own; got {given}")
    if layout == "ade20k":
        check_option("split", split, ADE20K_SPLITS)
        folder = ADE20K_SPLITS[split]
        pairs = _pair(root, root / "images" / folder, root / "annotations" / folder, skip=skip_corrupt, notify=notify)
        return SemanticFiles(pairs, ADE20K, _values_of_classes(len(ADE20K), 0))
    check_option("split", split, CITYSCAPES_SPLITS)
    pairs = _pair(
        root,
        root / "leftImg8bit" / split,
        root / "gtFine" / split,
        image_endings=("_leftImg8bit.png",),
        mask_ending="_gtFine_labelIds.png",
        skip=skip_corrupt,
        notify=notify,
    )
    return SemanticFiles(pairs, [known.name for known in CITYSCAPES], _values_of_cityscapes())


def _class_names(classes: Sequence[str] | int | None) -> tuple[str, ...]:
    if classes is None:
        raise UserError("the layout folder needs classes: their names by label, or their number; got None")
    if isinstance(classes, int):
        check_class_count(classes)
        return tuple(str(label) for label in range(classes))
    if isinstance(classes, str) or not all(isinstance(name, str) for name in classes):
        raise UserError(f"classes must be a list of names or a number, got {classes!r}")
    check_class_count(len(classes))
    twice = sorted(name for name in set(classes) if list(classes).count(name) > 1)
    if twice:
        raise UserError(f"classes must have different names, got {twice[0]!r} twice")
    return tuple(classes)


def _values_of_classes(count: int, ignore_index: int | None) -> Values:
    """Consecutive values for the classes, from 1 on if 0 means "no label"."""
    first = 0
    if ignore_index is not None:
        check_integer("ignore_index", ignore_index, 0)
        if ignore_index > 255 or 0 < ignore_index < count:
            raise UserError(f"ignore_index must be 0 or lie between {count} (classes) and 255, got {ignore_index}")
        first = int(ignore_index == 0)
    labels = np.full(256, IGNORE, np.uint8)
    labels[first : first + count] = np.arange(count)
    known = labels != IGNORE
    rule = f"{first} to {first + count - 1} (classes)"
    if ignore_index is not None:
        known[ignore_index] = True
        rule += f" or {ignore_index} (no label)"
    return Values(labels, known, rule)


def _values_of_cityscapes() -> Values:
    labels = np.full(256, IGNORE, np.uint8)
    labels[[known.id for known in CITYSCAPES]] = np.arange(len(CITYSCAPES))
    known = np.arange(256) < CITYSCAPES_IDS
    # the id of licence plates is -1, which is 255 as a byte
    known[255] = True
    return Values(labels, known, f"0 to {CITYSCAPES_IDS - 1} (label ids) or 255 (no label)")


def _find_folders(root: Path, split: str) -> tuple[Path, Path]:
    """The folders of images and of masks in the layout folder."""
    if not isinstance(split, str) or not split:
        raise UserError(f"split must be the name of a folder, got {split!r}")
    candidates = [(root / split, root / f"{split}annot"), (root / "images" / split, root / "masks" / split)]
    for images, masks in candidates:
        if images.is_dir() and masks.is_dir():
            return images, masks
    expected = " or ".join(f"{images} with {masks}" for images, masks in candidates)
    missing = [str(folder) for pair in candidates for folder in pair if not folder.is_dir()]
    raise UserError(f"{root} has no images for the split {split!r}: expected {expected}; missing {', '.join(missing)}")


def _pair(
    root: Path,
    image_folder: Path,
    mask_folder: Path,
    *,
    image_endings: Sequence[str] | None = None,
    mask_ending: str = ".png",
    skip: bool,
    notify: Callable[[str], None],
) -> list[tuple[str, str]]:
    """Pairs of paths of an image and its mask, whose names differ only in the ending, sorted.

    skip: leave out files without a counterpart, and images with the same name.
    """
    endings = tuple(image_endings or EXTENSIONS)
    for folder in (image_folder, mask_folder):
        if not folder.is_dir():
            raise UserError(f"{folder} must be a folder that holds images or masks; it does not exist")
    images, others = _files(image_folder, endings, root)
    masks, _ = _files(mask_folder, (mask_ending,), root)
    if not images:
        raise UserError(f"{image_folder} holds no images: expected *{', *'.join(endings)}")
    if others:
        logger.warning("%d files in %s are not images (%s) and are ignored", others, image_folder, ", ".join(endings))
    problems = [f"{paths[1]} has the name of {paths[0]}" for paths in images.values() if len(paths) > 1]
    problems += [
        f"{paths[0]} has no mask {mask_folder / (key + mask_ending)}"
        for key, paths in images.items()
        if key not in masks
    ]
    problems += [f"mask {paths[0]} has no image in {image_folder}" for key, paths in masks.items() if key not in images]
    if problems:
        found = "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if len(problems) > 10 else "")
        rule = "every image must have one mask and every mask one image"
        if not skip:
            raise UserError(f"{rule}, {len(problems)} do not: {found}; leave them out by --skip-corrupt")
        notify(f"{rule}, {len(problems)} do not and are left out: {found}")
    whole = [key for key in sorted(images) if len(images[key]) == 1 and key in masks]
    if not whole:
        raise UserError(f"none of the {len(images)} images in {image_folder} has one mask in {mask_folder}")
    return [(images[key][0], masks[key][0]) for key in whole]


def _files(top: Path, endings: Sequence[str], root: Path) -> tuple[dict[str, list[str]], int]:
    """Files by their path below ``top`` without the ending, and the number of files with other endings."""

    lowered = tuple(ending.lower() for ending in endings)

    def wanted(name: str) -> bool:
        # macOS creates ._name.png files, which are not images
        return not name.startswith(".") and name.lower().endswith(lowered)

    found, others = defaultdict(list), 0
    for folder in walk(top, wanted=wanted, root=root):
        others += folder.others
        for name in folder.files:
            ending = next(ending for ending in lowered if name.lower().endswith(ending))
            found["/".join((*folder.parts, name[: -len(ending)]))].append(str(folder.path / name))
    return found, others


def _read_mask(name: str) -> NDArray[np.uint8]:
    """The byte values of a mask [H, W]; palette indices if it has a palette."""
    with decoding(name):
        content = read_content(name)
        mask = decode(content)
    rule = "a mask must be a PNG of one 8-bit channel or of palette indices"
    if mask.format != "PNG":
        raise CorruptMaskError(name, f"{rule}, it is {mask.format}")
    # from the header of the file: Pillow scales grey values of fewer bits to 0..255, which changes the labels
    bits = content.getbuffer()[24]
    if mask.mode not in ("L", "P") or (mask.mode == "L" and bits != 8):
        raise CorruptMaskError(name, f"{rule}, its mode is {mask.mode} of {bits} bits")
    return np.asarray(mask)
