"""Atomic file writes: after a crash, a kill or a full disk the previous version of a file is still there."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def write_whole(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Let ``write`` fill a temporary file next to ``path``, then rename it to ``path`` atomically."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with writing(path):
            with os.fdopen(handle, "wb") as file:
                write(file)
                sync_file(file)
            # mkstemp makes files readable by their owner only
            os.chmod(partial, 0o666 & ~_umask())
            os.replace(partial, path)
    finally:
        # already gone if it was renamed
        Path(partial).unlink(missing_ok=True)
    sync_directory(path.parent)


def remove_partial(path: Path) -> None:
    """Delete the temporary files that a killed `write_whole` left next to ``path``."""
    for partial in path.parent.glob(f".{path.name}.*"):
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    text = json.dumps(content, indent=2) + "\n"
    write_whole(path, lambda file: _write_all(file, text.encode()))


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda file: _write_all(file, text.encode()))


def make_directory(path: Path) -> None:
    """Create the directory and its parents if they do not exist."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        # without the errno, which would be printed before the text
        raise OSError(f"could not create the directory {path}: {error.strerror}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name ``path`` in any OSError raised while it is written."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"could not write {path}: {error.strerror or error}") from error


def _write_all(file: IO[bytes], data: bytes) -> None:
    file.write(data)


def sync_file(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Flush new and renamed entries of a directory to disk, on systems that support it."""
    if os.name != "posix":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
