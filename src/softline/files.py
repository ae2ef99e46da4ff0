"""Atomic file writes, and locks that keep two processes from writing to one place.

After a crash, a kill or a full disk the previous version of a file is still there. Locks are those of the kernel, which
releases them when a process ends, however it ends; a lock file that a killed process leaves behind locks nothing.
"""

import errno
import json
import logging
import os
import re
import socket
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from softline.errors import UserError

log = logging.getLogger(__name__)

LOCK = ".lock"
"""Name of the lock file in a directory that is held."""
# in them, names stand for devices and for what is open; in shared memory, there are files
SYSTEM_PLACES, SHARED_MEMORY = (("dev",), ("proc",), ("sys",)), ("dev", "shm")
# what systems say where files cannot be locked, as on some network file systems
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
# the holder may remove the file while we open it, and the next one too
ATTEMPTS = 100
# a link would have another file overwritten
FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
# beyond the description of the holder, because Windows lets nobody else read what is locked
LOCKED_BYTE = 2**20


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
    _check_name(path)
    if not path.resolve().parent.is_dir():
        raise UserError(f"no such directory: {path.parent}")
    handle, partial = _make_partial(path)
    os.close(handle)
    Path(partial).unlink(missing_ok=True)


def _check_name(path: Path) -> None:
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
    write_whole(path, lambda file: _write_all(file, text.encode()))


def make_directory(path: Path) -> list[Path]:
    """Create the directory and its parents if they do not exist; return those that were created, the deepest first."""
    _check_name(path)
    try:
        missing = [place for place in (path, *path.parents) if not place.exists()]
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        # without the errno, which would be printed before the text
        raise OSError(f"could not create the directory {path}: {error.strerror}") from error
    return missing


# locks


@contextmanager
def hold_directory(directory: Path, *, notify: Callable[[str], None] = log.warning) -> Iterator[None]:
    """Keep everyone else who asks for this directory out of it; raise a `UserError` that names who is in it.

    The directory is created if it does not exist. If nothing was written to it in the end, it is removed again.

    A thread that holds a directory may ask for it again.

    notify: receives a text if the file system has no locks, and then nothing is kept out.
    """
    with _hold(directory, directory / LOCK, notify):
        yield


@contextmanager
def hold_file(path: Path, *, notify: Callable[[str], None] = log.warning) -> Iterator[None]:
    """Do for one file what `hold_directory` does for a directory, by a lock file next to it."""
    with _hold(path, path.with_name(f".{path.name}{LOCK}"), notify):
        yield


class _HeldByThread(threading.local):
    def __init__(self) -> None:
        self.paths: set[Path] = set()


_held = _HeldByThread()
_locked: "weakref.WeakSet[IO[bytes]]" = weakref.WeakSet()


def is_holding() -> bool:
    """Return whether any thread of this process holds a directory or a file."""
    return len(_locked) > 0


def _leave_locks() -> None:
    """Close the lock files in a forked process: a lock is released when the last process has closed its file."""
    for file in list(_locked):
        _locked.discard(file)
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks)


@contextmanager
def _hold(what: Path, lock: Path, notify: Callable[[str], None]) -> Iterator[None]:
    _check_name(what)
    key = what.resolve()
    if key in _held.paths:
        yield
        return
    created: list[Path] = []
    file = _open_locked(what, lock, notify, created)
    _held.paths.add(key)
    try:
        yield
    finally:
        _held.paths.discard(key)
        _release(file, lock, created)


def _open_locked(what: Path, lock: Path, notify: Callable[[str], None], created: list[Path]) -> IO[bytes]:
    """Return the lock file, open and locked; ``created`` receives the directories that were made for it."""
    for _ in range(ATTEMPTS):
        created[:0] = make_directory(lock.parent)
        file: IO[bytes] | None = None
        try:
            with writing(what):
                # unbuffered, so that nothing is written when a forked process closes it
                file = open(os.open(lock, FLAGS, 0o666), "r+b", buffering=0)  # noqa: SIM115
            _locked.add(file)
            locked = _lock(file)
            if locked is None:
                notify(f"{what}: this file system has no locks, so make sure that no other command writes there")
            elif not locked:
                raise UserError(f"{what} is in use by {_holder(file)}")
            elif not _is_at(file, lock):
                # whoever held it has removed it in the meantime
                _close(file)
                continue
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {_now()}\n".encode())
            return file
        except FileNotFoundError:
            # whoever held it has removed the directory in the meantime
            if file is not None:
                _close(file)
        except BaseException:
            if file is not None:
                _close(file)
            _remove_empty(created)
            raise
    raise UserError(f"{what} is in use by others, who create and remove it again and again")


def _lock(file: IO[bytes]) -> bool | None:
    """Lock an open file without waiting; False if somebody else has locked it, None if the system cannot."""
    try:
        if os.name == "nt":
            import msvcrt

            file.seek(LOCKED_BYTE)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
            file.seek(0)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
            return False
        if error.errno in NO_LOCKS:
            return None
        raise
    return True


def _holder(file: IO[bytes]) -> str:
    """Return who wrote the lock file, if that has happened already."""
    file.seek(0)
    text = file.read(1000).decode(errors="replace").strip()
    return text if re.fullmatch(r"process \d+ on \S+ since [\d: -]+ UTC", text) else "another process"


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Return whether the path still names this open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _release(file: IO[bytes], lock: Path, created: list[Path]) -> None:
    if os.name == "nt":
        # an open file cannot be removed there
        _close(file)
    # removed while it is locked: otherwise it could be the lock of somebody else
    with suppress(OSError):
        lock.unlink()
    _remove_empty(created)
    _close(file)


def _close(file: IO[bytes]) -> None:
    _locked.discard(file)
    file.close()


def _remove_empty(directories: list[Path]) -> None:
    """Remove directories, the deepest first, until one has something in it."""
    with suppress(OSError):
        for directory in directories:
            directory.rmdir()


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"


# parts


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
