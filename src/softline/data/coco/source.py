"""Images with objects that a JSON file in COCO's "instances" format describes: boxes, classes, masks, crowds.

The whole file is checked when it is opened, so that an error in it cannot stop training later. COCO's own train2017
does not pass: one box in image 200365 and one in image 550395 have no height; ``skip_corrupt`` leaves them out.

Names of image files are relative to the folder of images, do not leave it, and do not pass through symbolic links; the
folder itself may be a link. Each file belongs to one image.
"""

import copy
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from softline.data.images.corrupt import remaining
from softline.data.images.interface import CorruptImageError, load_image
from softline.data.reading import FilesBelow, read_json
from softline.errors import UserError

# polygons [x, y, x, y, ...], or {"size": [height, width], "counts": list or text}; None if the file has only a box
Segmentation = list[list[float]] | dict[str, Any] | None

NEEDED = {
    "images": ("file_name", "height", "width"),
    "annotations": ("image_id", "category_id", "bbox"),
    "categories": ("name",),
}
# in pixels: COCO's own boxes and polygons are rounded and slightly exceed the border
MARGIN = 1.0
SHOWN = 10
EMPTY_BOX = "box of no area"
LARGEST = float(np.finfo(np.float32).max)

log = logging.getLogger(__name__)


class ImageSizeError(CorruptImageError):
    """An image whose size differs from the one in its annotations."""

    text = "{name} has another size than its annotations: {reason}; leave it out by --skip-corrupt"


class Instances(NamedTuple):
    """The n objects of an image."""

    boxes: Tensor
    """[n, 4], float32: left, top, right, bottom in pixels."""
    labels: Tensor
    """[n], int64: from 0 to the number of classes - 1."""
    crowd: Tensor
    """[n], bool: True for a region of many objects."""
    area: Tensor
    """[n], float32: pixels inside the outline, according to the file."""
    segmentations: tuple[Segmentation, ...]
    """Polygons or runs as in the file."""
    size: tuple[int, int]
    """Height and width of the image."""

    def only(self, keep: Tensor) -> "Instances":
        """The objects where ``keep`` [n], bool, is True."""
        segmentations = (self.segmentations[index] for index in keep.nonzero().flatten().tolist())
        return Instances(
            self.boxes[keep], self.labels[keep], self.crowd[keep], self.area[keep], tuple(segmentations), self.size
        )

    def masks(self) -> Tensor:
        """[n, height, width], uint8: 1 inside the object."""
        if not self.segmentations:
            return torch.zeros(0, *self.size, dtype=torch.uint8)
        return torch.from_numpy(np.stack([decode_mask(each, self.size) for each in self.segmentations]))


class CocoSource:
    """The images of a directory and their objects, described by a JSON file.

    Every load opens the image file again, so that threads and processes share no open files. Images without any object
    are included, as evaluation counts false detections in them.

    An annotation without iscrowd is not a crowd; the area of one without area is that of its mask, or else of its box.

    skip_corrupt: leave out the images and annotations that the file describes incorrectly, and report them to
        ``notify``; otherwise they raise a `UserError`. Images that cannot be decoded, or whose size differs from the
        file, are found by `find_corrupt` and left out by `without`.
    skip_empty_boxes: leave out only boxes without width or height.
    masks: require a mask of every object.

    The attribute ``classes`` has the names by label, in the order of COCO's ids, which may have gaps; ``category_ids``
    has COCO's id of each label.
    """

    def __init__(
        self,
        images: Path,
        annotations: Path,
        *,
        skip_corrupt: bool = False,
        skip_empty_boxes: bool = False,
        masks: bool = False,
        notify: Callable[[str], None] = log.info,
    ) -> None:
        content = _read(annotations)
        categories = _categories(content["categories"], annotations)
        self.category_ids, self.classes = tuple(categories), tuple(categories.values())
        problems = _Problems()
        entries = _sound_images(content["images"], images, problems)
        objects = _sound_annotations(content, entries, self.category_ids, problems, masks=masks)
        if problems.kinds:
            forgiven = skip_corrupt or (skip_empty_boxes and set(problems.kinds) == {EMPTY_BOX})
            _report(problems, annotations, forgiven, notify)
        if not entries:
            raise UserError(f"{annotations} describes no image of {images} that could be used")
        if content["annotations"] and not objects:
            raise UserError(f"{annotations}: none of its {len(content['annotations'])} annotations could be used")
        _fill_areas(objects, entries, annotations, notify)
        self._root, self._file = str(images), str(annotations)
        self._keep_images(list(entries.values()))
        self._keep_objects([entry for entry in objects if entry["image_id"] in entries])

    def _keep_images(self, entries: list[dict[str, Any]]) -> None:
        # arrays, because reference counting would gradually copy the objects of a list into every worker
        self._names = np.array([os.fsencode(entry["file_name"]) for entry in entries])
        self._ids = np.array([entry["id"] for entry in entries], dtype=np.int64)
        self._sizes = np.array([(entry["height"], entry["width"]) for entry in entries], dtype=np.int64)
        # indices of the images that `without` has not removed
        self._kept = np.arange(len(entries))

    def _keep_objects(self, entries: list[dict[str, Any]]) -> None:
        row = {image_id: index for index, image_id in enumerate(self._ids.tolist())}
        label = {category_id: index for index, category_id in enumerate(self.category_ids)}
        entries = sorted(entries, key=lambda entry: row[entry["image_id"]])
        rows = np.array([row[entry["image_id"]] for entry in entries], dtype=np.int64)
        # the objects of image i are starts[i] : starts[i + 1]
        self._starts = np.searchsorted(rows, np.arange(len(self._ids) + 1))
        corners = np.array([entry["bbox"] for entry in entries], dtype=np.float64).reshape(-1, 4)
        corners[:, 2:] += corners[:, :2]
        self._boxes = corners.astype(np.float32)
        self._labels = np.array([label[entry["category_id"]] for entry in entries], dtype=np.int64)
        self._crowd = np.array([entry.get("iscrowd", 0) for entry in entries], dtype=bool)
        self._area = np.array([entry["area"] for entry in entries], dtype=np.float32)
        self._has_objects = np.bincount(rows[~self._crowd], minlength=len(self._ids)) > 0
        # as text, which is exact and needs a quarter of the memory of lists of numbers
        texts = [json.dumps(entry.get("segmentation") or None, separators=(",", ":")).encode() for entry in entries]
        self._text = np.frombuffer(b"".join(texts), dtype=np.uint8)
        self._text_starts = np.cumsum([0, *map(len, texts)])
        self._without_mask = np.array(
            [entry["id"] for entry in entries if not entry.get("segmentation")], dtype=np.int64
        )

    def __len__(self) -> int:
        return len(self._kept)

    def name(self, index: int) -> str:
        return f"{self._root}/{os.fsdecode(self._names[self._kept[index]])}"

    def image_id(self, index: int) -> int:
        return int(self._ids[self._kept[index]])

    def size(self, index: int) -> tuple[int, int]:
        """Height and width according to the JSON file; the image is not read."""
        height, width = self._sizes[self._kept[index]].tolist()
        return height, width

    def load(self, index: int) -> tuple[Image.Image, Instances]:
        """Return the decoded image and its objects; `CorruptImageError` if it cannot be decoded or its size is wrong.

        EXIF orientation is ignored, as in COCO's own tools: boxes and masks refer to the stored pixels.
        """
        image = load_image(self.name(index))
        size = self.size(index)
        if (image.height, image.width) != size:
            reason = (
                f"{image.height} x {image.width} pixels (height x width), but {self._file} says "
                f"{size[0]} x {size[1]} for image {self.image_id(index)}"
            )
            raise ImageSizeError(self.name(index), reason)
        return image, self.instances(index)

    def instances(self, index: int) -> Instances:
        """The objects of an image; the image is not read."""
        row = self._kept[index]
        first, last = self._starts[row : row + 2].tolist()
        # copies, so that changes to a tensor do not reach the source
        return Instances(
            boxes=torch.tensor(self._boxes[first:last]),
            labels=torch.tensor(self._labels[first:last]),
            crowd=torch.tensor(self._crowd[first:last]),
            area=torch.tensor(self._area[first:last]),
            segmentations=tuple(map(self._segmentation, range(first, last))),
            size=self.size(index),
        )

    def _segmentation(self, place: int) -> Segmentation:
        first, last = self._text_starts[place : place + 2].tolist()
        segmentation: Segmentation = json.loads(self._text[first:last].tobytes())
        return segmentation

    def with_objects(self) -> list[int]:
        """Indices of the images that have at least one object which is not a crowd."""
        return np.flatnonzero(self._has_objects[self._kept]).tolist()

    def check_masks(self) -> None:
        """Check that every object has a mask."""
        if len(self._without_mask):
            raise UserError(
                f"{self._file}: masks need a segmentation of each object; annotation {self._without_mask[0]} has none"
                f" ({len(self._without_mask)} of {len(self._labels)} have none)"
            )

    def without(self, indices: Collection[int]) -> "CocoSource":
        """The source without the images at ``indices``; it keeps all classes, even those without any object left."""
        rest = copy.copy(self)
        rest._kept = self._kept[remaining(len(self), indices)]
        return rest


def decode_mask(segmentation: Segmentation, size: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Mask [height, width], uint8: 1 inside the object. Polygons are filled as by COCO's tools."""
    from faster_coco_eval.core import mask

    if segmentation is None:
        raise UserError("an object that has only a box has no mask")
    if isinstance(segmentation, list):
        runs = mask.merge(mask.frPyObjects(segmentation, *size))
    elif isinstance(segmentation["counts"], list):
        runs = mask.frPyObjects(segmentation, *size)
    else:
        runs = segmentation
    decoded: np.ndarray[Any, Any] = mask.decode(runs)
    return decoded


def encode_mask(mask: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Encode a mask [height, width], bool, as COCO's runs, which can be written as JSON."""
    from faster_coco_eval.core import mask as runs

    encoded = runs.encode(np.asfortranarray(mask, dtype=np.uint8))
    return {"size": list(mask.shape), "counts": encoded["counts"].decode()}


class _Problem(Exception):
    """An incorrect entry of the file."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text


class _Problems:
    """Number of problems of each kind, and descriptions of the first few."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.first: list[str] = []

    def add(self, where: str, problem: _Problem) -> None:
        self.kinds[problem.kind] += 1
        if len(self.first) < SHOWN:
            self.first.append(f"{where}: {problem.text}")

    def __str__(self) -> str:
        counts = ", ".join(f"{count:,} x {kind}" for kind, count in self.kinds.items())
        more = self.kinds.total() - len(self.first)
        return "; ".join([counts, *self.first, *([f"and {more:,} more"] if more else [])])


def _report(problems: _Problems, file: Path, forgiven: bool, notify: Callable[[str], None]) -> None:
    if not forgiven:
        raise UserError(f"{file}: {problems}; repair these, or leave them out by --skip-corrupt")
    notify(f"{file}: left out, together with all objects of an image: {problems}")


def _fill_areas(
    objects: list[dict[str, Any]], images: dict[int, dict[str, Any]], file: Path, notify: Callable[[str], None]
) -> None:
    missing = [entry for entry in objects if "area" not in entry and entry["image_id"] in images]
    for entry in missing:
        image = images[entry["image_id"]]
        if entry.get("segmentation"):
            entry["area"] = _area(entry["segmentation"], (image["height"], image["width"]))
        else:
            entry["area"] = entry["bbox"][2] * entry["bbox"][3]
    if missing:
        notify(f"{file}: {len(missing):,} annotations have no area: using that of their mask, or else of their box")


def _read(file: Path) -> dict[str, list[Any]]:
    if not file.exists():
        raise UserError(
            f"{file} does not exist: it must be JSON in COCO's format, such as annotations/instances_train2017.json"
        )
    content = read_json(file)
    for key in NEEDED:
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise UserError(f"{file} must be a JSON object with the lists {', '.join(NEEDED)}; {key} is not a list")
    lists: dict[str, list[Any]] = content
    return lists


def _categories(entries: list[Any], file: Path) -> dict[int, str]:
    """Category names by id, in the order of the ids."""
    names: dict[int, str] = {}
    for position, entry in enumerate(entries):
        try:
            _check_entry(entry, "categories", names)
            if not isinstance(entry["name"], str) or not entry["name"]:
                raise _Problem("wrong name", f"name must be text that is not empty, got {_short(entry['name'])}")
        except _Problem as problem:
            raise UserError(f"{file}: {_where('categories', position, entry)}: {problem.text}") from None
        if entry["name"] in names.values():
            raise UserError(f"{file}: categories must have different names, {entry['name']!r} appears twice")
        names[entry["id"]] = entry["name"]
    if not names:
        raise UserError(f"{file} names no categories")
    return dict(sorted(names.items()))


def _sound_images(entries: list[Any], folder: Path, problems: _Problems) -> dict[int, dict[str, Any]]:
    """The valid images by id."""

    files, used = FilesBelow(folder, "file_name"), set[Path]()

    def check(entry: dict[str, Any]) -> None:
        for key in ("height", "width"):
            if not _is_whole(entry[key]) or entry[key] < 1:
                raise _Problem("image without a size", f"{key} must be a positive whole number, got {entry[key]!r}")
        most = Image.MAX_IMAGE_PIXELS
        if most is not None and entry["height"] * entry["width"] > most:
            size = f"{entry['height']} x {entry['width']} (height x width)"
            raise _Problem("image too large", f"an image must have at most {most:,} pixels, got {size}")
        try:
            path = files.check(entry["file_name"])
        except UserError as error:
            raise _Problem("wrong file name", str(error)) from None
        except OSError as error:
            reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
            raise _Problem("missing image file", f"{folder / entry['file_name']} {reason}") from None
        if path in used:
            raise _Problem("repeated file", f"{path} already belongs to another image")
        used.add(path)

    return {entry["id"]: entry for entry in _sound(entries, "images", check, problems)}


def _sound_annotations(
    content: dict[str, list[Any]],
    images: dict[int, dict[str, Any]],
    categories: Collection[int],
    problems: _Problems,
    *,
    masks: bool,
) -> list[dict[str, Any]]:
    """The valid annotations, including those of invalid images, for which only the image is reported."""
    listed = {entry.get("id") for entry in content["images"] if isinstance(entry, dict) and _is_whole(entry.get("id"))}
    known = frozenset(categories)

    def check(entry: dict[str, Any]) -> None:
        for key, ids in (("image_id", listed), ("category_id", known)):
            if not _is_whole(entry[key]) or entry[key] not in ids:
                raise _Problem(f"unknown {key}", f"{key} {_short(entry[key])} is not in the file")
        if entry.get("iscrowd", 0) not in (0, 1):
            raise _Problem("wrong iscrowd", f"iscrowd must be 0 or 1, got {_short(entry['iscrowd'])}")
        area = entry.get("area", 0)
        if not _are_numbers([area]) or not 0 <= area <= LARGEST:
            raise _Problem("wrong area", f"area must be a finite number, at least 0, got {_short(area)}")
        if image := images.get(entry["image_id"]):
            _check_box(entry["bbox"], image["height"], image["width"])
            _check_segmentation(entry.get("segmentation"), image["height"], image["width"])
        if masks and not entry.get("segmentation"):
            raise _Problem("object without a mask", "it has only a box, and masks are required")

    return _sound(content["annotations"], "annotations", check, problems)


def _sound(
    entries: Iterable[Any], kind: str, check: Callable[[dict[str, Any]], None], problems: _Problems
) -> list[dict[str, Any]]:
    sound, seen = [], set[int]()
    for position, entry in enumerate(entries):
        try:
            _check_entry(entry, kind, seen)
            seen.add(entry["id"])
            check(entry)
            sound.append(entry)
        except _Problem as problem:
            problems.add(_where(kind, position, entry), problem)
    return sound


def _check_entry(entry: Any, kind: str, seen: Collection[int]) -> None:
    """Check that an entry has a unique id and the keys that its kind needs."""
    if not isinstance(entry, dict):
        raise _Problem(f"entry of {kind} that is not an object", f"must be a JSON object, got {_short(entry)}")
    for key in ("id", *NEEDED[kind]):
        if key not in entry:
            raise _Problem(f"missing key in {kind}", f"has no {key!r}")
    if not _is_whole(entry["id"]):
        raise _Problem(f"wrong id in {kind}", f"id must be a whole number, got {_short(entry['id'])}")
    if entry["id"] in seen:
        raise _Problem(f"repeated id in {kind}", f"id {entry['id']} appears twice")


def _check_box(box: Any, height: int, width: int) -> None:
    if not isinstance(box, list) or len(box) != 4 or not _are_numbers(box):
        raise _Problem("wrong box", f"bbox must be 4 finite numbers (x, y, width, height), got {_short(box)}")
    if max(map(abs, box)) > LARGEST / 2:
        raise _Problem("wrong box", f"bbox must be numbers of at most {LARGEST / 2:.1e}, got {_short(box)}")
    corners = ([box[0], box[0] + box[2]], [box[1], box[1] + box[3]])
    # in the precision in which they are stored
    if any(np.float32(low) >= np.float32(high) for low, high in corners):
        raise _Problem(EMPTY_BOX, f"width and height of bbox must be positive, got {box}")
    if not _is_inside(*corners, height, width):
        raise _Problem("box outside its image", f"bbox {box} exceeds its image of {height} x {width} (height x width)")


def _check_segmentation(segmentation: Any, height: int, width: int) -> None:
    # tools that support only boxes write an empty list
    if segmentation is None or segmentation == []:
        return
    if isinstance(segmentation, list):
        for polygon in segmentation:
            _check_polygon(polygon, height, width)
    elif isinstance(segmentation, dict) and isinstance(segmentation.get("counts"), (list, str)):
        _check_runs(segmentation, height, width)
    else:
        raise _Problem("wrong segmentation", f"segmentation must be polygons or runs, got {_short(segmentation)}")


def _check_polygon(polygon: Any, height: int, width: int) -> None:
    # COCO's tools interpret 4 numbers as a box
    if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2 or not _are_numbers(polygon):
        rule = "a polygon must be finite numbers x, y, x, y, ... of at least 3 points"
        raise _Problem("wrong polygon", f"{rule}, got {_short(polygon)}")
    if not _is_inside(polygon[::2], polygon[1::2], height, width):
        text = f"polygon {_short(polygon)} exceeds its image of {height} x {width} (height x width)"
        raise _Problem("polygon outside its image", text)


def _check_runs(segmentation: dict[str, Any], height: int, width: int) -> None:
    if segmentation.get("size") != [height, width]:
        got = f"the mask has {_short(segmentation.get('size'))} (height, width), its image {[height, width]}"
        raise _Problem("mask of another size than its image", got)
    counts = segmentation["counts"]
    if isinstance(counts, list):
        if not all(_is_whole(count) and count >= 0 for count in counts) or sum(counts) != height * width:
            rule = f"counts of a mask must be whole numbers with the sum {height * width}"
            raise _Problem("wrong mask", f"{rule}, got {_short(counts)}")
        runs: list[int] | None = counts
    else:
        runs = _unpack_runs(counts)
        if runs is None or min(runs, default=0) < 0 or sum(runs) != height * width:
            rule = f"must be packed runs with the sum {height * width}"
            raise _Problem("wrong mask", f"counts {_short(counts)} cannot be decoded: they {rule}")
    assert runs is not None, "refused otherwise"
    if not sum(runs[1::2]):
        raise _Problem("empty segmentation", f"segmentation is empty: counts {_short(counts)}")


def _area(segmentation: Any, size: tuple[int, int]) -> float:
    """Count the pixels of a mask from its runs, which takes no memory for the pixels."""
    from faster_coco_eval.core import mask

    if isinstance(segmentation, list):
        return float(mask.area(mask.merge(mask.frPyObjects(segmentation, *size))))
    counts = segmentation["counts"]
    runs = counts if isinstance(counts, list) else _unpack_runs(counts)
    assert runs is not None, "checked before"
    return float(sum(runs[1::2]))


def _unpack_runs(packed: Any) -> list[int] | None:
    """Unpack COCO's text of runs: numbers in groups of five bits, from the third on as differences to the last but one.

    None if it is no such text.
    """
    if not isinstance(packed, str):
        return None
    runs: list[int] = []
    value = shift = 0
    for character in packed.encode(errors="replace"):
        group = character - 48
        # a number of a mask has 32 bits
        if not 0 <= group < 64 or shift > 35:
            return None
        value |= (group & 31) << shift
        shift += 5
        if not group & 32:
            # the highest bit of the last group is the sign
            value -= (group >> 4 & 1) << shift
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    return None if shift else runs


def _is_inside(xs: list[float], ys: list[float], height: int, width: int) -> bool:
    return min(xs) >= -MARGIN and max(xs) <= width + MARGIN and min(ys) >= -MARGIN and max(ys) <= height + MARGIN


def _are_numbers(values: list[Any]) -> bool:
    # without a Python function per number, as COCO has about 40 million coordinates
    try:
        return set(map(type, values)) <= {int, float} and all(map(math.isfinite, values))
    except OverflowError:
        # an integer with hundreds of digits
        return False


def _is_whole(value: Any) -> bool:
    # a bool is an int in Python; larger numbers do not fit an array
    return type(value) is int and abs(value) < 2**63


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _where(kind: str, position: int, entry: Any) -> str:
    """Describe which entry this is, even if it has no id."""
    if not isinstance(entry, dict) or "id" not in entry:
        return f"entry {position} of {kind}"
    singular = {"images": "image", "annotations": "annotation", "categories": "category"}[kind]
    image = f" of image {_short(entry['image_id'])}" if "image_id" in entry else ""
    return f"{singular} {_short(entry['id'])}{image}"
