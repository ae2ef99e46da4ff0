"""Images in class folders, on disk or in a .tar file.

The layout is ``ROOT/<split>/<class>/<image>``, where ROOT is a directory or a .tar file. A split may itself be a .tar
file, ``ROOT/<split>.tar``; in a .tar file, a class may be a .tar file of images, as in ImageNet's release. The split
"val" is the first existing folder of val, validation and test. A root without any split folder is itself a validation
split. Classes are in timm's order: by name, with numbers sorted by value.

ROOT and its split folders may be symbolic links; below them links are refused, in a directory as well as in a .tar
file.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from timm.utils import natural_key

from softline.checks import check_option
from softline.data.images.interface import image_extensions, is_image_name, load_image
from softline.data.images.tar import Entry, read_tar
from softline.data.reading import walk
from softline.errors import UserError

__all__ = ["FolderImages", "image_extensions", "is_image_name", "open_folder", "open_tar"]

SPLITS = {"train": ("train",), "val": ("val", "validation", "test"), "test": ("test",)}
SPLIT_FOLDERS = frozenset(name for names in SPLITS.values() for name in names)

logger = logging.getLogger(__name__)


class FolderImages:
    """Images whose class is the name of their folder.

    Every load opens the file again, so that threads and processes share no open files.

    root: folder of the split; the names of the images begin with it.
    archive: .tar file that contains the images; None if they are separate files.
    labelled: whether folders are classes; otherwise there are none, and all labels are 0.
    """

    def __init__(
        self, root: str, entries: Sequence[Entry], *, archive: str | None = None, labelled: bool = True
    ) -> None:
        _check_entries(root, entries, labelled=labelled)
        names = {entry.parts[0] for entry in entries if labelled}
        # also by name, so that names with equal keys, such as 1 and 01, have the same order everywhere
        self.classes = tuple(sorted(names, key=lambda name: (natural_key(name), name)))
        label = {name: index for index, name in enumerate(self.classes)}
        entries = sorted(entries, key=lambda entry: (label.get(entry.parts[0], 0), entry.parts))
        self._root, self._archive = root, archive
        # arrays, because reference counting would gradually copy the objects of a list into every worker
        self._names = np.array([os.fsencode("/".join(entry.parts)) for entry in entries])
        self._labels = np.array([label.get(entry.parts[0], 0) for entry in entries])
        self._places = np.array([(entry.offset, entry.size) for entry in entries])

    def __len__(self) -> int:
        return len(self._names)

    def load(self, index: int) -> tuple[Image.Image, int]:
        offset, size = self._places[index].tolist()
        name = self.name(index)
        image = load_image(self._archive or name, name=name, offset=offset, size=size)
        return image, int(self._labels[index])

    def name(self, index: int) -> str:
        return f"{self._root}/{os.fsdecode(self._names[index])}"


def open_folder(root: str, split: str, *, labelled: bool = True) -> FolderImages:
    """Open the images of a split in a directory of class folders, or of images without labels."""
    check_option("split", split, SPLITS)
    directory = Path(root)
    for name in SPLITS[split]:
        if (directory / name).is_dir():
            return _open_directory(directory / name, directory, labelled=labelled)
        if (directory / f"{name}.tar").is_file():
            archive = str(directory / f"{name}.tar")
            return FolderImages(archive, _tar_entries(archive), archive=archive, labelled=labelled)
    present = sorted(
        name for name in SPLIT_FOLDERS if (directory / name).exists() or (directory / f"{name}.tar").exists()
    )
    _check_unsplit(root, split, present)
    return _open_directory(directory, directory, labelled=labelled)


def open_tar(root: str, split: str, *, labelled: bool = True) -> FolderImages:
    """Open the images of a split in a .tar file of class folders, or of images without labels."""
    check_option("split", split, SPLITS)
    entries = _tar_entries(root)
    least = 2 if labelled else 1
    present = {entry.parts[0] for entry in entries if len(entry.parts) > least} & SPLIT_FOLDERS
    name = next((name for name in SPLITS[split] if name in present), None)
    if name is None:
        _check_unsplit(root, split, sorted(present))
        return FolderImages(root, entries, archive=root, labelled=labelled)
    entries = [entry._replace(parts=entry.parts[1:]) for entry in entries if entry.parts[0] == name]
    return FolderImages(f"{root}/{name}", entries, archive=root, labelled=labelled)


def _check_unsplit(root: str, split: str, present: list[str]) -> None:
    """Check that the root may itself be the split: a validation split, in a root without any split folder."""
    if split != "train" and not present:
        return
    expected = " or ".join(f"{root}/{name}/<class>/*.jpg" for name in SPLITS[split])
    found = f"; found the split {', '.join(present)} only" if present else ""
    raise UserError(f"{root} has no images for the split {split!r}: expected {expected}{found}")


def _open_directory(directory: Path, root: Path, *, labelled: bool) -> FolderImages:
    entries, others = [], 0
    for folder in walk(directory, wanted=is_image_name, root=root):
        others += folder.others
        if not folder.files and not folder.subfolders and folder.parts:
            raise UserError(f"class folder {folder.path} holds no images ({image_extensions()}): add some or delete it")
        entries += [Entry((*folder.parts, name)) for name in folder.files]
    _report_others(others, str(directory))
    return FolderImages(str(directory), entries, labelled=labelled)


def _tar_entries(path: str) -> list[Entry]:
    entries, others = read_tar(path, is_image_name)
    _report_others(others, path)
    return entries


def _report_others(count: int, place: str) -> None:
    if count:
        logger.warning("%d files in %s are not images (%s) and are ignored", count, place, image_extensions())


def _check_entries(root: str, entries: Sequence[Entry], *, labelled: bool) -> None:
    expected = f"{root}/<class>/<image>" if labelled else f"{root}/<image>"
    if not entries:
        raise UserError(f"{root} holds no images: expected {expected} ({image_extensions()})")
    for entry in entries:
        if labelled and len(entry.parts) < 2:
            raise UserError(f"{'/'.join((root, *entry.parts))} is out of place: expected {root}/<class>/<image>")
