"""Files that are whole or not there: a crash, a kill or a full disk leaves the previous version."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def write_whole(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Let ``write`` fill a new file beside ``path``, then put it in its place at once."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp's files are for their owner alone
        os.chmod(partial, 0o666 & ~_umask())
        os.replace(partial, path)
    except OSError as error:
        raise OSError(error.errno, f"could not write {path}: {error.strerror or error}") from error
    finally:
        # gone already if it is in its place
        Path(partial).unlink(missing_ok=True)
    _sync_directory(path.parent)


def remove_partial(path: Path) -> None:
    """Delete what a killed `write_whole` left beside ``path``."""
    for partial in path.parent.glob(f".{path.name}.*"):
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    text = json.dumps(content, indent=2) + "\n"
    write_whole(path, lambda file: _write_all(file, text.encode()))


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda file: _write_all(file, text.encode()))


def make_directory(path: Path) -> None:
    """Make the directory and those above it, unless it is there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        # the number would stand before the text
        raise OSError(f"could not create the directory {path}: {error.strerror}") from None


def _write_all(file: IO[bytes], data: bytes) -> None:
    file.write(data)


def _sync_directory(directory: Path) -> None:
    """The new name survives a power cut as well, where the system can promise it."""
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
