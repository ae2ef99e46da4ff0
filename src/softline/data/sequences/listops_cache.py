"""Generated ListOps samples on disk: made once, whole or not there, checked whenever they are opened.

A cache is a folder of ``SPLIT_tokens.npy``, ``SPLIT_starts.npy`` and ``SPLIT_labels.npy`` for each split, as in
`ListOpsSamples`, with ``listops.json``: the settings and the sha256 of every file.
"""

import hashlib
import json
import logging
import os
import platform
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from softline.checks import check_integer, check_option
from softline.data.sequences.interface import Notify, SequenceSource, Split, Tokens
from softline.data.sequences.listops import (
    CLASSES,
    VOCABULARY,
    ListOpsSamples,
    ListOpsSettings,
    Progress,
    check_index,
    generate_listops,
)
from softline.errors import UserError

SPLITS: tuple[Split, ...] = ("train", "val", "test")
DESCRIPTION = "listops.json"
FORMAT = 1
"""Changes with the files, and with what the generator draws for the same settings."""
ARRAYS = ("tokens", "starts", "labels")

logger = logging.getLogger(__name__)


class ListOpsSplit:
    """Samples of a cache's split. Its files are mapped: processes share their pages.

    max_length: as in the settings; every sequence is shorter.
    """

    classes, vocabulary, parts = CLASSES, VOCABULARY, 1

    def __init__(self, directory: Path, split: Split, max_length: int) -> None:
        self.max_length = max_length
        self._directory, self._split = directory, split
        self._tokens, self._starts, self._labels = (
            np.load(directory / _file_name(split, array), mmap_mode="r") for array in ARRAYS
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # a mapped array would be sent with all its content
        return type(self), (self._directory, self._split, self.max_length)

    def __len__(self) -> int:
        return len(self._labels)

    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self._starts)

    def name(self, index: int) -> str:
        return f"{self._directory / _file_name(self._split, 'tokens')}, sample {index}"

    def load(self, index: int) -> tuple[tuple[Tokens, ...], int]:
        check_index(index, len(self))
        start, end = self._starts[index : index + 2].tolist()
        return (np.array(self._tokens[start:end], np.uint16),), int(self._labels[index])


def open_listops(
    directory: Path,
    split: Split,
    *,
    settings: ListOpsSettings,
    make: bool = True,
    workers: int = 1,
    progress: Progress | None = None,
    notify: Notify = logger.info,
) -> SequenceSource:
    """A split of the samples in ``directory``; all splits are generated first if it is empty or not there.

    Several processes may do so at the same time; the first that ends provides the samples of all.

    make: False refuses a directory without samples instead.
    workers, progress: for `generate_listops`.
    """
    check_option("split", split, SPLITS)
    check_integer("workers", workers, 1)
    directory = Path(directory)
    if not _holds_cache(directory):
        if not make:
            raise UserError(f"{directory} holds no ListOps samples")
        _make(directory, settings, lambda: generate_listops(settings, workers=workers, progress=progress), notify)
    _check(directory, split, settings)
    return ListOpsSplit(directory, split, settings.max_length)


def _file_name(split: str, array: str) -> str:
    return f"{split}_{array}.npy"


def _holds_cache(directory: Path) -> bool:
    """False if it is empty or not there; an error if it holds something else."""
    if not directory.exists():
        return False
    if not directory.is_dir():
        raise UserError(f"{directory} must be a directory for ListOps samples, it is a file")
    # listed once: another process may put its cache here at any time
    names = sorted(path.name for path in directory.iterdir())
    if names and DESCRIPTION not in names:
        held = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        rule = f"must be empty or hold ListOps samples with their {DESCRIPTION}"
        raise UserError(f"{directory} {rule}, it holds {held}; choose another directory")
    return bool(names)


def _make(directory: Path, settings: ListOpsSettings, generate: Callable[[], ListOpsSamples], notify: Notify) -> None:
    """Generate a cache beside its place, then put it there at once."""
    # a link stays where it is, its target is made
    target = Path(os.path.realpath(directory))
    mine = f".{target.name}.{platform.node()}"
    partial = target.with_name(f"{mine}.{os.getpid()}.{uuid.uuid4().hex}")
    # before the long work, so that a place that cannot be written to is known at once
    with _writing(directory):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent, mine)
        partial.mkdir()
    try:
        notify(f"generating {sum(settings.samples)} ListOps samples for {directory}")
        samples = generate()
        with _writing(directory):
            _write(partial, settings, samples)
            first = _publish(partial, target)
    finally:
        # gone already if it is in its place
        shutil.rmtree(partial, ignore_errors=True)
    rate = f"accepted {samples.accepted} of {samples.candidates} candidates"
    notify(f"{rate}; {directory} is complete" if first else f"{directory} was made by another process meanwhile")


def _remove_abandoned(folder: Path, prefix: str) -> None:
    """What processes of this machine left that were killed."""
    for partial in folder.glob(f"{prefix}.*.*"):
        process = partial.name.split(".")[-2]
        if process.isdigit() and not _runs(int(process)):
            shutil.rmtree(partial, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"could not write {directory}: {error.strerror or error}") from error


def _publish(partial: Path, target: Path) -> bool:
    """Give a cache its name; False if another process has made one."""
    try:
        os.rename(partial, target)
    except OSError:
        if (target / DESCRIPTION).is_file():
            return False
        raise
    _sync_directory(target.parent)
    return True


def _write(directory: Path, settings: ListOpsSettings, samples: ListOpsSamples) -> None:
    hashes = {}
    ends = np.cumsum(settings.samples).tolist()
    for split, number, end in zip(SPLITS, settings.samples, ends, strict=True):
        starts = samples.starts[end - number : end + 1]
        arrays = {
            "tokens": samples.tokens[starts[0] : starts[-1]],
            "starts": starts - starts[0],
            "labels": samples.labels[end - number : end],
        }
        for array in ARRAYS:
            path = directory / _file_name(split, array)
            with open(path, "wb") as file:
                np.save(file, arrays[array])
                _sync(file)
            hashes[path.name] = _sha256(path)
    description = {
        "format": FORMAT,
        "settings": asdict(settings),
        "accepted": samples.accepted,
        "candidates": samples.candidates,
        "counts": dict(zip(SPLITS, settings.samples, strict=True)),
        "sha256": hashes,
    }
    with open(directory / DESCRIPTION, "wb") as file:
        file.write((json.dumps(description, indent=2) + "\n").encode())
        _sync(file)
    _sync_directory(directory)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    """The names survive a power cut as well, where the system can promise it."""
    if os.name != "posix":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(directory: Path, split: Split, settings: ListOpsSettings) -> None:
    """The cache has these settings and the split's files are as they were written."""
    advice = f"delete {directory}, so that it is generated again"
    description = _read_description(directory / DESCRIPTION, advice)
    _check_settings(directory, description["settings"], settings)
    for array in ARRAYS:
        path = directory / _file_name(split, array)
        if not path.is_file():
            raise UserError(f"{path} is missing; {advice}")
        expected, found = description["sha256"].get(path.name), _sha256(path)
        if found != expected:
            raise UserError(f"{path} is damaged: {DESCRIPTION} has sha256 {expected} for it, found {found}; {advice}")


def _read_description(path: Path, advice: str) -> dict[str, Any]:
    try:
        description = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); {advice}") from error
    if not isinstance(description, dict) or "format" not in description:
        raise UserError(f"{path} is damaged (it has no format); {advice}")
    if description["format"] != FORMAT:
        found = description["format"]
        raise UserError(f"{path} must have format {FORMAT}, got {found!r}; choose another directory, or {advice}")
    for name in ("settings", "sha256"):
        if not isinstance(description.get(name), dict):
            raise UserError(f"{path} is damaged (it has no {name}); {advice}")
    return description


def _check_settings(directory: Path, there: dict[str, Any], settings: ListOpsSettings) -> None:
    # as JSON writes them
    asked = json.loads(json.dumps(asdict(settings)))
    differing = [name for name in {**asked, **there} if there.get(name) != asked.get(name)]
    if differing:
        values = "; ".join(f"{name} is {there.get(name)}, asked for {asked.get(name)}" for name in differing)
        advice = "choose another directory, or delete this one to have it generated again"
        raise UserError(f"{directory} holds ListOps samples of other settings: {values}; {advice}")
