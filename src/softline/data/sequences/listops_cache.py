"""A cache of generated ListOps samples on disk: written atomically, and verified whenever it is opened.

A cache is a folder with ``SPLIT_tokens.npy``, ``SPLIT_starts.npy`` and ``SPLIT_labels.npy`` for each split, as in
`ListOpsSamples`, and ``listops.json``, which has the settings and the SHA-256 of every file.
"""

import hashlib
import json
import logging
import os
import platform
import shutil
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softline.checks import check_integer, check_option
from softline.data.reading import read_json
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
from softline.files import open_regular, sync_directory, sync_file, writing

SPLITS: tuple[Split, ...] = ("train", "val", "test")
DESCRIPTION = "listops.json"
FORMAT = 1
"""Version of the files; it also changes if the generator yields other samples for the same settings."""
ARRAYS = ("tokens", "starts", "labels")

logger = logging.getLogger(__name__)


class ListOpsSplit:
    """Samples of a split in a cache; its files are memory-mapped, so that processes share their pages.

    max_length: as in the settings; every sequence is shorter.
    """

    classes, vocabulary, parts = CLASSES, VOCABULARY, 1

    def __init__(self, directory: Path, split: Split, max_length: int) -> None:
        self.max_length = max_length
        self._directory, self._split = directory, split
        self._tokens, self._starts, self._labels = (_map(directory / _file_name(split, array)) for array in ARRAYS)
        last = self._starts[-1] if len(self._starts) else -1
        if len(self._starts) != len(self._labels) + 1 or last != len(self._tokens) or (np.diff(self._starts) < 1).any():
            raise UserError(f"{directory}: the arrays of the split {split!r} must belong together, they do not")

    def __reduce__(self) -> tuple[Any, ...]:
        # a memory-mapped array would be pickled with all its content
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


def _map(path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r")
    except (ValueError, EOFError, SyntaxError) as error:
        raise UserError(f"{path} must be an array in numpy's format: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(f"{path} must be a list of whole numbers, it has type {array.dtype} {list(array.shape)}")
    return array


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
    """Open a split of the samples in ``directory``; if it is empty or missing, all splits are generated first.

    Several processes may do so at the same time; all of them use the samples of the first that finishes.

    make: False raises an error for a directory without samples instead.
    workers, progress: see `generate_listops`.
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
    """Whether a directory holds a cache; False if it is empty or missing, an error if it holds something else."""
    if not directory.exists():
        return False
    if not directory.is_dir():
        raise UserError(f"{directory} must be a directory for ListOps samples, it is a file")
    # listed only once, as another process may put its cache here at any time
    names = sorted(path.name for path in directory.iterdir())
    if names and DESCRIPTION not in names:
        held = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        rule = f"must be empty or hold ListOps samples with their {DESCRIPTION}"
        raise UserError(f"{directory} {rule}, it holds {held}; choose another directory")
    return bool(names)


def _make(directory: Path, settings: ListOpsSettings, generate: Callable[[], ListOpsSamples], notify: Notify) -> None:
    """Generate a cache in a temporary folder next to its target, then rename it atomically."""
    # a symbolic link is kept and its target is created
    target = Path(os.path.realpath(directory))
    mine = f".{target.name}.{platform.node()}"
    partial = target.with_name(f"{mine}.{os.getpid()}.{uuid.uuid4().hex}")
    # before generating, so that a directory that cannot be written is reported immediately
    with writing(directory):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent, mine)
        partial.mkdir()
    try:
        notify(f"generating {sum(settings.samples)} ListOps samples for {directory}")
        samples = generate()
        with writing(directory):
            _write(partial, settings, samples)
            first = _publish(partial, target)
    finally:
        # already gone if it was renamed
        shutil.rmtree(partial, ignore_errors=True)
    rate = f"accepted {samples.accepted} of {samples.candidates} candidates"
    notify(f"{rate}; {directory} is complete" if first else f"{directory} was meanwhile created by another process")


def _remove_abandoned(folder: Path, prefix: str) -> None:
    """Delete the temporary folders that killed processes left on this machine."""
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


def _publish(partial: Path, target: Path) -> bool:
    """Rename a complete cache to its target; False if another process was faster."""
    try:
        os.rename(partial, target)
    except OSError:
        if (target / DESCRIPTION).is_file():
            return False
        raise
    sync_directory(target.parent)
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
                sync_file(file)
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
        sync_file(file)
    sync_directory(directory)


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(directory: Path, split: Split, settings: ListOpsSettings) -> None:
    """Check that the cache has these settings and that the files of the split are unchanged."""
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
        description = read_json(path)
    except UserError as error:
        raise UserError(f"{error}; {advice}") from error
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
    # as JSON stores them
    asked = json.loads(json.dumps(asdict(settings)))
    differing = [name for name in {**asked, **there} if there.get(name) != asked.get(name)]
    if differing:
        values = "; ".join(f"{name} is {there.get(name)}, asked for {asked.get(name)}" for name in differing)
        advice = "choose another directory, or delete this one to have it generated again"
        raise UserError(f"{directory} holds ListOps samples of other settings: {values}; {advice}")
