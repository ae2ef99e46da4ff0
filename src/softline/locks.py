"""Locks that keep two processes from writing to one place.

They are those of the kernel, which releases them when a process ends, however it ends. A lock file that a killed
process leaves behind locks nothing.
"""

import errno
import logging
import os
import re
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from softline.errors import UserError
from softline.files import check_name, make_directory, writing

log = logging.getLogger(__name__)

LOCK = ".lock"
"""Name of the lock file in a directory that is held."""
# what systems say where files cannot be locked, as on some network file systems
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
# the holder may remove the file while we open it, and the next one too
ATTEMPTS = 100
# a link would have another file overwritten
FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
# beyond the description of the holder, because Windows lets nobody else read what is locked
LOCKED_BYTE = 2**20


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
    check_name(what)
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
