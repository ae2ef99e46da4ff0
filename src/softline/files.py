"""Reading regular files only, and writing files atomically.

A named pipe would block a reader for ever, and a device may have no end. After a crash, a kill or a full disk the
previous version of a written file is still there.
"""

import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from softline.errors import UserError

KINDS: dict[Callable[[int], bool], str] = {
    stat.S_ISDIR: "a directory",
    stat.S_ISLNK: "a symbolic link",
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}
# in them, names stand for devices and for what is open; in shared memory, there are files
SYSTEM_PLACES, SHARED_MEMORY = (("dev",), ("proc",), ("sys",)), ("dev", "shm")


def check_regular(path: str | Path) -> None:
    """Check that an existing path is a regular file, or a link to one."""
    check_name(path)
    _check_mode(path, os.stat(path).st_mode)


def _check_mode(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for check, name in KINDS.items() if check(mode)), "something else")
        raise UserError(f"{path} must be a regular file, it is {kind}")


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file for reading bytes; anything else is an error, and never blocks."""
    # before it is opened, because opening a device may already have an effect
    check_regular(path)
    return open(path, "rb", opener=_open_checked)


def _open_checked(path: str, flags: int) -> int:
    # without waiting for whoever writes to a named pipe, which may have replaced the file since it was checked;
    # Windows has no such flag and no named pipes among its files
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    try:
        _check_mode(path, os.fstat(handle).st_mode)
    except UserError:
        os.close(handle)
        raise
    return handle


def read_bytes(path: str | Path) -> bytes:
    """Read a whole regular file."""
    with open_regular(path) as file:
        return file.read()


def write_whole(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Let ``write`` fill a temporary file next to ``path``, then rename it to ``path`` atomically."""
    handle, partial = _make_partial(path)
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


def check_writable(path: Path) -> None:
    """Raise what `write_whole` would raise, before the work whose result is to be written."""
    check_name(path)
    if not path.resolve().parent.is_dir():
        raise UserError(f"no such directory: {path.parent}")
    handle, partial = _make_partial(path)
    os.close(handle)
    Path(partial).unlink(missing_ok=True)


def check_name(path: str | Path) -> None:
    # Python's own error does not say which name it is about
    if "\0" in str(path):
        raise UserError(f"a file's name must not contain a null character, got {str(path)!r}")


def _check_target(path: Path) -> None:
    """Refuse to rename a file over a directory or over a device, such as /dev/null and /dev/stdout."""
    kind = None
    with suppress(FileNotFoundError, NotADirectoryError):
        kind = path.stat().st_mode
    # /dev/stdout is a link that may lead to a regular file
    places = [place.parts[1:3] for place in (path.absolute(), path.resolve())]
    system = any(parts[:1] in SYSTEM_PLACES and parts != SHARED_MEMORY for parts in places)
    if system or (kind is not None and not stat.S_ISREG(kind)):
        raise UserError(f"{path} is {'a directory' if path.is_dir() else 'not a regular file'}: name a file")


def _make_partial(path: Path) -> tuple[int, str]:
    with writing(path):
        _check_target(path)
        return tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")


def remove_partial(path: Path) -> None:
    """Delete the temporary files that a killed `write_whole` left next to ``path``."""
    for partial in path.parent.glob(f".{path.name}.*"):
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    text = json.dumps(content, indent=2) + "\n"
    write_whole(path, lambda file: _write_all(file, text.encode()))


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    write_whole(path, lambda file: _write_all(file, data))


def make_directory(path: Path) -> list[Path]:
    """Create the directory and its parents if they do not exist; return those that were created, the deepest first."""
    check_name(path)
    try:
        missing = [place for place in (path, *path.parents) if not place.exists()]
        while True:
            try:
                path.mkdir(parents=True, exist_ok=True)
                break
            except FileExistsError:
                # if it is gone, another process has removed it since mkdir found it
                if os.path.lexists(path):
                    raise
    except OSError as error:
        # without the errno, which would be printed before the text
        raise OSError(f"could not create the directory {path}: {error.strerror}") from error
    return missing


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
