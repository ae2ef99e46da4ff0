"""Opening a source of images by its name or path."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from PIL import Image

from softline.data.images import fashion_mnist
from softline.data.images.folders import open_folder, open_tar
from softline.data.images.interface import CorruptImageError, ImageSource, ImageStream
from softline.data.images.timm_names import PACKAGES, open_timm
from softline.errors import UserError

__all__ = ["CorruptImageError", "ImageSource", "ImageStream", "check_same_classes", "is_fetched", "open_source"]

NAMES = ("embedded", "fashion-mnist", *(f"{kind}/" for kind in PACKAGES))


def open_source(
    source: str, split: str, *, root: str | None = None, labelled: bool = True
) -> ImageSource | ImageStream:
    """Open the labelled images of a split.

    source: "embedded" (6,000 + 1,000 images of Fashion-MNIST, no download), "fashion-mnist" (the whole dataset), a
        directory ``DIR/<split>/<class>/*.jpg``, a .tar file of such a directory, or a timm dataset torch/...,
        hfds/..., hfids/..., tfds/..., wds/...
    split: train, val or test, or another name that the dataset has. Datasets without "val" use their test images for
        it.
    root: directory to which fashion-mnist and timm's datasets are downloaded, or where they already are.
    labelled: whether folders are classes; otherwise images may lie anywhere in a directory or .tar file, all have the
        label 0, and the source names no classes.
    """
    if not isinstance(source, str) or not source:
        raise UserError(f"source must be {_possible()}; got {source!r}")
    kind, slash, name = source.partition("/")
    if source == "fashion-mnist":
        return fashion_mnist.full(split, root=root)
    if kind in PACKAGES and name:
        return open_timm(source, split, root=root)
    if root is not None:
        raise UserError(f"root ({root}) is for fashion-mnist and timm's datasets, not for the source {source!r}")
    if source == "embedded":
        return fashion_mnist.embedded(split)
    if Path(source).is_dir():
        return open_folder(source, split, labelled=labelled)
    if source.endswith(".tar") and Path(source).is_file():
        return open_tar(source, split, labelled=labelled)
    raise UserError(_unknown(source, f"{kind}/" if slash else source))


def is_fetched(source: str) -> bool:
    """Return whether opening a source may download it."""
    kind, _, name = source.partition("/")
    return source == "fashion-mnist" or (kind in PACKAGES and bool(name))


def check_same_classes(train: ImageSource | ImageStream, val: ImageSource | ImageStream) -> None:
    """Check that both have the same classes in the same order; a source without class names is not compared."""
    if not train.classes or not val.classes or train.classes == val.classes:
        return
    if set(train.classes) == set(val.classes):
        raise UserError("training and validation images have the same classes in different orders: labels differ")
    missing = [name for name in train.classes if name not in val.classes]
    extra = [name for name in val.classes if name not in train.classes]
    raise UserError(
        f"training and validation images must have the same classes, got {len(train.classes)} and {len(val.classes)}; "
        f"missing in validation: {_some(missing)}; only in validation: {_some(extra)}"
    )


def in_order(source: ImageSource | ImageStream, classes: Sequence[str]) -> ImageSource:
    """The source with its labels in the order of ``classes``, which are the same classes."""
    if isinstance(source, ImageStream):
        expected, got = _some(list(classes)), _some(list(source.classes))
        raise UserError(f"the classes of a stream must be in the order {expected}; got {got}")
    return _Reordered(source, classes)


class _Reordered:
    def __init__(self, source: ImageSource, classes: Sequence[str]) -> None:
        self.classes = tuple(classes)
        self._source = source
        self._labels = [self.classes.index(name) for name in source.classes]

    def __len__(self) -> int:
        return len(self._source)

    def load(self, index: int) -> tuple[Image.Image, int]:
        image, label = self._source.load(index)
        return image, self._labels[label]

    def name(self, index: int) -> str:
        return self._source.name(index)


def _some(names: list[str], most: int = 10) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more


def _possible() -> str:
    return f"a directory, a .tar file, or one of {', '.join(NAMES)}"


def _unknown(source: str, start: str) -> str:
    if Path(source).is_file():
        return f"source {source!r} is a file but not a .tar file; it must be {_possible()}"
    close = get_close_matches(start, NAMES, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"source {source!r} does not exist; it must be {_possible()}{hint}"
