"""Datasets with timm's names: torch/, hfds/, hfids/, tfds/ and wds/.

The shards of wds/ lie in a local directory. webdataset itself also takes addresses, and commands (``pipe:...``) that it
executes; a recipe inside a checkpoint could name one.
"""

import io
import os
from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image
from timm.data import create_dataset
from torch.utils.data import get_worker_info

from softline.checks import check_integer, check_option
from softline.data.images.interface import (
    ImageSource,
    ImageStream,
    decode,
    decoding,
    describe,
    load_image,
    open_image,
)
from softline.data.images.tar import check_end, read_tar
from softline.data.reading import FilesBelow, read_json, walk
from softline.errors import UserError
from softline.plain import check_entries

# the package that each kind needs: its import name and its name on PyPI
PACKAGES = {
    "torch": ("torchvision", "torchvision"),
    "hfds": ("datasets", "datasets"),
    "hfids": ("datasets", "datasets"),
    "tfds": ("tensorflow_datasets", "tensorflow-datasets"),
    "wds": ("webdataset", "webdataset"),
}
# limits of timm's reader of hfids/, by a word of its error
HFIDS = {
    "trust_remote_code": "timm cannot read hfids/ with this version of datasets",
    "num_samples": "hfids/ needs a dataset with a known number of images",
}
# possible names of the file that describes the shards of wds/, and the keys of each split
WDS_INFOS = ("_info.json", "info.json")
WDS_KEYS = {"name": str, "num_samples": int, "filenames": list[str], "shard_lengths": list[int]}
# possible names of the validation split
VALIDATION = ("val", "validation", "valid", "test")


class TorchImages:
    """A torchvision dataset; one of image files decodes them as softline's own sources do."""

    def __init__(self, dataset: Any, name: str) -> None:
        if hasattr(dataset, "samples"):
            # torchvision follows links to folders, even to those above, and has more endings for images
            for _ in walk(Path(dataset.root), wanted=lambda name: not name.startswith(".")):
                pass
        if hasattr(dataset, "loader"):
            dataset.loader = load_image
        self.classes = tuple(map(str, getattr(dataset, "classes", ())))
        self._dataset, self._name = dataset, name

    def __len__(self) -> int:
        return len(self._dataset)

    def load(self, index: int) -> tuple[Image.Image, int]:
        with decoding(self.name(index)):
            image, label = self._dataset[index]
        return image, int(label)

    def name(self, index: int) -> str:
        samples = getattr(self._dataset, "samples", None)
        return str(samples[index][0]) if samples else f"{self._name}/{index}"


class ReaderImages:
    """A timm reader with access by index."""

    def __init__(self, reader: Any, name: str) -> None:
        self.classes = _class_names(reader)
        self._reader, self._name = reader, name

    def __len__(self) -> int:
        return len(self._reader)

    def load(self, index: int) -> tuple[Image.Image, int]:
        file, label = self._reader[index]
        with file, decoding(self.name(index)):
            return decode(file), int(label)

    def name(self, index: int) -> str:
        return self._reader.filename(index) or f"{self._name}/{index}"


class ReaderStream:
    """A timm reader that yields images in order, and itself divides them among processes and workers.

    Its length is the number of images of one process.
    """

    def __init__(self, reader: Any, name: str) -> None:
        self.classes = _class_names(reader)
        self._reader, self._name = reader, name

    def __len__(self) -> int:
        return len(self._reader)

    def __iter__(self) -> Iterator[tuple[Image.Image, int]]:
        # a dataset prepared in the main process is not divided among workers
        if get_worker_info() is not None and self._reader.worker_info is None:
            self._reader.ds = None
        if self._name.startswith("wds/") and self._reader.ds is None:
            # timm has no public method for it
            self._reader._lazy_init()
            self._change_stages()
        for image, label in self._once() if self._name.startswith("wds/") else self._reader:
            yield image, int(label)

    def _once(self) -> Any:
        """In evaluation, all shards of this process; timm would cut or repeat them to equal lengths."""
        if self._reader.is_training:
            return self._reader
        return ((sample["image"], sample["target"]) for sample in self._reader.ds)

    def set_epoch(self, epoch: int) -> None:
        self._reader.set_epoch(epoch)

    def _change_stages(self) -> None:
        """Raise an error for what cannot be read or decoded, which timm skips, and check the format of images."""

        def refuse(error: Exception) -> bool:
            raise UserError(
                f"an image of {self._name} cannot be decoded ({describe(error)}); "
                "repair the shards: --skip-corrupt does not apply to streams"
            ) from error

        pipeline = self._reader.ds.pipeline
        # where a worker knows its shards
        pipeline.insert(pipeline.index(self._reader._split_by_node_and_worker) + 1, self._check_shards)
        for stage in pipeline:
            if "handler" in getattr(stage, "kw", {}):
                stage.kw["handler"] = refuse
                # timm's decoder takes every format that Pillow has
                stage.args = tuple(_checked(step, self._reader.input_key) for step in stage.args)

    def _check_shards(self, shards: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield shards that are whole; webdataset takes a damaged header for the end of its shard."""
        info = self._reader.split_info
        lengths = {
            os.path.join(self._reader.root, name): length
            for name, length in zip(info.filenames, info.shard_lengths, strict=True)
        }
        for shard in shards:
            found, expected = _count_samples(shard["url"]), lengths[shard["url"]]
            if found is not None and found != expected:
                raise UserError(f"{shard['url']} holds {found} samples, and shard_lengths says {expected}")
            yield shard


def _count_samples(path: str) -> int | None:
    """Count the samples of a shard, whose files have one name up to its first dot; None if it is compressed."""
    if not path.endswith(".tar"):
        return None
    entries, _ = read_tar(path, lambda _: True)
    return len({(*entry.parts[:-1], entry.parts[-1].partition(".")[0]) for entry in entries})


def _checked(step: Callable[[Any], Any], keys: str) -> Callable[[Any], Any]:
    """Call ``step`` with samples whose image has a known format.

    keys: possible names of the image in a sample, between semicolons.
    """

    def check_and_step(sample: dict[str, Any]) -> Any:
        content = next((sample[key] for key in keys.split(";") if key in sample), None)
        if content is not None:
            open_image(io.BytesIO(content))
        return step(sample)

    return check_and_step


def open_timm(source: str, split: str, *, root: str | None) -> ImageSource | ImageStream:
    """Open a dataset such as torch/cifar10 or hfds/ORGANISATION/NAME.

    root: directory to which it is downloaded, or where it already is; torch/ and wds/ need it.
    """
    kind, _, name = source.partition("/")
    module, package = PACKAGES[kind]
    if find_spec(module) is None:
        raise UserError(f"the source {source!r} needs the package {package}: pip install {package}")
    if kind in ("torch", "wds") and not root:
        raise UserError(f"the source {source!r} needs root: the directory that holds the data")
    if kind == "torch":
        return _open_torch(source, split, root)
    if kind == "wds":
        root = _local(source, root)
    split = _split_name(source, split, _splits(kind, name, root))
    if kind == "wds":
        _check_shards(Path(str(root)), split)
    reader = _create_reader(kind, name=name, root=root, split=split)
    place = f"{source}/{split}"
    return ReaderImages(reader, place) if kind == "hfds" else ReaderStream(reader, place)


def _create_reader(kind: str, **options: Any) -> Any:
    # by its class, because timm.data.create_reader converts names and paths to lower case
    reader = getattr(import_module(f"timm.data.readers.reader_{kind}"), f"Reader{kind.capitalize()}")
    if kind == "hfds":
        return reader(**options)
    try:
        # images keep their mode until the dataset converts them; with tfds/ they would remain arrays
        mode = "RGB" if kind == "tfds" else ""
        return reader(**options, is_training=options["split"] == "train", input_img_mode=mode)
    except ValueError as error:
        reason = next((reason for word, reason in HFIDS.items() if word in str(error)), None)
        if kind != "hfids" or reason is None:
            raise
        raise UserError(f"{reason}; use hfds/{options['name']}") from error


def _open_torch(source: str, split: str, root: str | None) -> TorchImages:
    # timm treats any other name as the test split, and a directory without the split's folder as the split itself
    check_option("split", split, ("train", "val", "test"))
    if source in ("torch/folder", "torch/image_folder"):
        raise UserError(f"the source {source!r} must be given as a directory: {root}")
    try:
        # timm's names of the evaluation split are val and validation, not test
        dataset = create_dataset(source, root=root, split="val" if split == "test" else split, download=True)
    except AssertionError as error:
        raise UserError(f"timm cannot open {source!r}: {error}") from error
    except (OSError, RuntimeError) as error:
        raise UserError(f"{source} is not in {root} and could not be downloaded: {error}") from error
    return TorchImages(dataset, f"{source}/{split}")


def _splits(kind: str, name: str, root: str | None) -> Collection[str]:
    """Names of the splits of a dataset."""
    if kind == "wds":
        return _wds_info(root)["splits"].keys()
    if kind == "tfds":
        builder = import_module("tensorflow_datasets").builder(name, data_dir=root)
        builder.download_and_prepare()
        return builder.info.splits.keys()
    return import_module("datasets").get_dataset_split_names(name)


def _local(source: str, root: str | None) -> str:
    """The absolute path of a local directory, which webdataset cannot take for an address or a command."""
    if not root or not Path(root).is_dir():
        raise UserError(f"root of the source {source!r} must be a local directory, got {root!r}")
    return os.path.abspath(root)


def _wds_info(root: str | None) -> dict[str, Any]:
    path = next((path for name in WDS_INFOS if (path := Path(str(root), name)).exists()), None)
    info = None if path is None else read_json(path)
    if not isinstance(info, dict) or not isinstance(info.get("splits"), dict):
        raise UserError(
            f'{root} must hold {WDS_INFOS[0]} with {{"splits": {{"train": {{"name": ..., "num_samples": ..., '
            '"filenames": [...], "shard_lengths": [...]}, ...}}'
        )
    return info


def _check_shards(root: Path, split: str) -> None:
    """Check the description of a split, and that its shards are complete files below ``root``."""
    where = f"{root}: the description of the split {split!r}"
    if "tar" in split or ".." in split:
        raise UserError(f"{root}: the split {split!r} must have another name: timm takes 'tar' and '..' for files")
    info = _wds_info(str(root))["splits"][split]
    check_entries(info, WDS_KEYS, where)
    check_integer(f"num_samples in {where}", info["num_samples"], 1)
    if len(info["filenames"]) != len(info["shard_lengths"]):
        counts = f"{len(info['filenames'])} filenames and {len(info['shard_lengths'])} shard_lengths"
        raise UserError(f"{where} must have a length for each file, it has {counts}")
    shards = FilesBelow(root, f"each of filenames in {where}")
    for name in info["filenames"]:
        path = shards.check(name)
        if path.suffix == ".tar":
            check_end(str(path))


def _split_name(source: str, split: str, known: Collection[str]) -> str:
    names = VALIDATION if split == "val" else (split,)
    found = next((name for name in names if name in known), None)
    if found is None:
        raise UserError(f"{source} has no split {split!r}; it has {', '.join(sorted(known)) or 'none'}")
    return found


def _class_names(reader: Any) -> tuple[str, ...]:
    """Class names by label; empty for wds/, whose labels have no names."""
    by_name: dict[str, int] = reader.class_to_idx
    if not by_name and hasattr(reader, "builder"):
        features = reader.builder.info.features or {}
        return tuple(getattr(features.get("label"), "names", ()))
    return tuple(sorted(by_name, key=lambda name: by_name[name]))
