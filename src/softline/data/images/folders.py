"""Images in class folders, on disk or in a .tar file.

The layout is ``ROOT/<split>/<class>/<image>``, where ROOT is a directory or a .tar file. A split may itself be a .tar
file, ``ROOT/<split>.tar``; in a .tar file, a class may be a .tar file of images, as in ImageNet's release. The split
"val" is the first existing folder of val, validation and test. A root without any split folder is itself a validation
split. Classes are in timm's order: by name, with numbers sorted by value.
"""

import io
import logging
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from PIL import Image
from timm.data import get_img_extensions, is_img_extension
from timm.utils import natural_key

from softline.checks import check_option
from softline.data.images.interface import decode, decoding
from softline.errors import UserError

SPLITS = {"train": ("train",), "val": ("val", "validation", "test"), "test": ("test",)}
SPLIT_FOLDERS = frozenset(name for names in SPLITS.values() for name in names)

logger = logging.getLogger(__name__)


class Entry(NamedTuple):
    """An image of a split."""

    parts: tuple[str, ...]
    """Folders below the split, and the file name."""
    offset: int = 0
    """Start of its bytes in the file that contains them."""
    size: int = -1
    """Number of bytes; -1 reads to the end of the file."""


class FolderImages:
    """Images whose class is the name of their folder.

    Every load opens the file again, so that threads and processes share no open files.

    root: folder of the split; the names of the images begin with it.
    archive: .tar file that contains the images; None if they are separate files.
    """

    def __init__(self, root: str, entries: Sequence[Entry], *, archive: str | None = None) -> None:
        _check_entries(root, entries)
        names = {entry.parts[0] for entry in entries}
        # also by name, so that names with equal keys, such as 1 and 01, have the same order everywhere
        self.classes = tuple(sorted(names, key=lambda name: (natural_key(name), name)))
        label = {name: index for index, name in enumerate(self.classes)}
        entries = sorted(entries, key=lambda entry: (label[entry.parts[0]], entry.parts))
        self._root, self._archive = root, archive
        # arrays, because reference counting would gradually copy the objects of a list into every worker
        self._names = np.array([os.fsencode("/".join(entry.parts)) for entry in entries])
        self._labels = np.array([label[entry.parts[0]] for entry in entries])
        self._places = np.array([(entry.offset, entry.size) for entry in entries])

    def __len__(self) -> int:
        return len(self._names)

    def load(self, index: int) -> tuple[Image.Image, int]:
        offset, size = self._places[index].tolist()
        with open(self._archive or self.name(index), "rb") as file:
            file.seek(offset)
            content = io.BytesIO(file.read(size))
        with decoding(self.name(index)):
            image = decode(content)
        return image, int(self._labels[index])

    def name(self, index: int) -> str:
        return f"{self._root}/{os.fsdecode(self._names[index])}"


def open_folder(root: str, split: str) -> FolderImages:
    """Open the images of a split in a directory of class folders."""
    check_option("split", split, SPLITS)
    directory = Path(root)
    for name in SPLITS[split]:
        if (directory / name).is_dir():
            return _open_directory(directory / name)
        if (directory / f"{name}.tar").is_file():
            archive = str(directory / f"{name}.tar")
            return FolderImages(archive, list(_tar_entries(archive)), archive=archive)
    present = sorted(
        name for name in SPLIT_FOLDERS if (directory / name).exists() or (directory / f"{name}.tar").exists()
    )
    _check_unsplit(root, split, present)
    return _open_directory(directory)


def open_tar(root: str, split: str) -> FolderImages:
    """Open the images of a split in a .tar file of class folders."""
    check_option("split", split, SPLITS)
    entries = list(_tar_entries(root))
    present = {entry.parts[0] for entry in entries if len(entry.parts) > 2} & SPLIT_FOLDERS
    name = next((name for name in SPLITS[split] if name in present), None)
    if name is None:
        _check_unsplit(root, split, sorted(present))
        return FolderImages(root, entries, archive=root)
    entries = [entry._replace(parts=entry.parts[1:]) for entry in entries if entry.parts[0] == name]
    return FolderImages(f"{root}/{name}", entries, archive=root)


def _check_unsplit(root: str, split: str, present: list[str]) -> None:
    """Check that the root may itself be the split: a validation split, in a root without any split folder."""
    if split != "train" and not present:
        return
    expected = " or ".join(f"{root}/{name}/<class>/*.jpg" for name in SPLITS[split])
    found = f"; found the split {', '.join(present)} only" if present else ""
    raise UserError(f"{root} has no images for the split {split!r}: expected {expected}{found}")


def _open_directory(directory: Path) -> FolderImages:
    entries, others = [], 0
    for folder, subfolders, names in os.walk(directory, followlinks=True):
        subfolders.sort()
        images = [name for name in names if is_image_name(name)]
        others += sum(not name.startswith(".") for name in names) - len(images)
        if not images and not subfolders and Path(folder) != directory:
            raise UserError(f"class folder {folder} holds no images ({image_extensions()}): add some or delete it")
        below = Path(folder).relative_to(directory).parts
        entries += [Entry((*below, name)) for name in images]
    if others:
        logger.warning("%d files in %s are not images (%s) and are ignored", others, directory, image_extensions())
    return FolderImages(str(directory), entries)


def _tar_entries(path: str) -> Iterator[Entry]:
    try:
        with tarfile.open(path, "r:") as tar:
            yield from _walk_tar(tar, 0, ())
    except tarfile.TarError as error:
        raise UserError(f"{path} must be an uncompressed, complete .tar file: {error}") from error


def _walk_tar(tar: tarfile.TarFile, start: int, folder: tuple[str, ...]) -> Iterator[Entry]:
    """Entries of a .tar file that starts at byte ``start`` of the file on disk."""
    for member in tar:
        place = PurePosixPath(member.name)
        parts = (*folder, *place.parts)
        if not member.isfile() or place.name.startswith("."):
            continue
        if place.suffix == ".tar":
            with tarfile.open(fileobj=tar.extractfile(member), mode="r:") as inner:
                yield from _walk_tar(inner, start + member.offset_data, (*parts[:-1], place.stem))
        elif is_image_name(place.name):
            yield Entry(parts, start + member.offset_data, member.size)


def _check_entries(root: str, entries: Sequence[Entry]) -> None:
    if not entries:
        raise UserError(f"{root} holds no images: expected {root}/<class>/<image> ({image_extensions()})")
    for entry in entries:
        if len(entry.parts) < 2:
            raise UserError(f"{'/'.join((root, *entry.parts))} is out of place: expected {root}/<class>/<image>")


def is_image_name(name: str) -> bool:
    # macOS creates ._name.jpg files, which are not images
    return not name.startswith(".") and is_img_extension(os.path.splitext(name)[1].lower())


def image_extensions() -> str:
    return ", ".join(get_img_extensions())
