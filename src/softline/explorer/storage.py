"""The page's folder on disk: files that visitors upload and pictures of the page, removed with time and within a quota.

What lies in the folder is decided by visitors and by gradio, so nothing is assumed about it: links are removed and
never followed, files may vanish at any time, and what cannot be removed is logged and tried again later.
"""

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from softline.errors import UserError

log = logging.getLogger(__name__)

MAX_STORED_BYTES = 512 * 2**20
MAX_STORED_FILES = 5000
KEPT_SECONDS = 600
"""How long a file is kept after it was written."""
IN_USE_SECONDS = 30
"""How long a file is safe from others that need its room."""
CLEANING_SECONDS = 60
"""Time between two cleanings."""


class FullError(UserError):
    """There is no room for a file; the visitor reads the text."""


@dataclass(frozen=True)
class Stored:
    """An entry of the folder that is no directory; a link is an entry of its own."""

    path: str
    size: int
    written: float


class Storage:
    """A folder whose files have at most ``max_bytes`` together and number at most ``max_files``.

    A file is announced with `reserve` before it is written. If there is no room for it, the oldest files are removed,
    except those of the last half minute, which a visitor may be waiting for.
    """

    def __init__(self, folder: Path, *, max_bytes: int = MAX_STORED_BYTES, max_files: int = MAX_STORED_FILES) -> None:
        self.folder = folder.resolve()
        self.max_bytes, self.max_files = max_bytes, max_files
        self._lock = threading.Lock()
        # of files that are being written; what is on disk of them counts twice for a while
        self._reserved_bytes = self._reserved_files = 0

    def owns(self, path: str) -> bool:
        """Whether a path is that of a file of the folder after links are followed, or of none there."""
        if "\0" in path:
            return False
        real = os.path.realpath(path)
        if not Path(real).is_relative_to(self.folder) or real == str(self.folder):
            return False
        try:
            return stat.S_ISREG(os.lstat(real).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            # a name that is too long, or a folder that cannot be read
            return False

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Make room for a file of at most ``size`` bytes that is written in this context."""
        self.take(size)
        try:
            yield
        finally:
            self.give_back(size)

    def take(self, size: int) -> None:
        """Reserve ``size`` bytes for a file; `give_back` ends the reservation."""
        with self._lock:
            self._make_room(size)
            self._reserved_bytes += size
            self._reserved_files += 1

    def give_back(self, size: int) -> None:
        with self._lock:
            self._reserved_bytes -= size
            self._reserved_files -= 1

    def _make_room(self, size: int) -> None:
        stored = sorted(_walk(self.folder), key=lambda file: file.written)
        free_bytes = self.max_bytes - self._reserved_bytes - sum(file.size for file in stored)
        free_files = self.max_files - self._reserved_files - len(stored)
        now = time.time()
        for file in stored:
            if free_bytes >= size and free_files >= 1:
                return
            if now - file.written >= IN_USE_SECONDS and _remove(file.path, os.unlink):
                free_bytes, free_files = free_bytes + file.size, free_files + 1
        if free_bytes < size or free_files < 1:
            raise FullError("this page has no room for more files at the moment: try again in a minute")

    def clean(self, age: float = KEPT_SECONDS) -> None:
        """Remove everything that was written ``age`` seconds ago or earlier."""
        latest = time.time() - age
        for file in list(_walk(self.folder)):
            if file.written <= latest:
                _remove(file.path, os.unlink)
        for directory in _empty_directories(self.folder, latest):
            _remove(directory, os.rmdir)

    @contextmanager
    def cleaning(self, *others: Callable[[], None], seconds: float = CLEANING_SECONDS) -> Iterator[None]:
        """Clean regularly while the context is active.

        others: called after each cleaning.
        """
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(seconds):
                for step in (self.clean, *others):
                    try:
                        step()
                    except Exception:
                        # nothing that visitors leave behind may end the cleaning
                        log.exception("the clean-up of %s failed and is tried again", self.folder)

        thread = threading.Thread(target=run, name="explorer clean-up", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _entries(folder: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("cannot look into %s: %s", folder, error.strerror)
        return []


def _walk(folder: Path | str) -> Iterator[Stored]:
    """Everything below a folder that is no directory."""
    open_folders: list[Path | str] = [folder]
    while open_folders:
        for entry in _entries(open_folders.pop()):
            if entry.is_dir(follow_symlinks=False):
                open_folders.append(entry.path)
                continue
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError:
                # it has vanished
                continue
            # a file that is moved keeps the time of its last change
            yield Stored(entry.path, found.st_size, max(found.st_mtime, found.st_ctime))


def _empty_directories(folder: Path | str, latest: float) -> Iterator[str]:
    """Directories below a folder that have been empty since ``latest``."""
    for entry in _entries(folder):
        if not entry.is_dir(follow_symlinks=False):
            continue
        if _entries(entry.path):
            yield from _empty_directories(entry.path, latest)
            continue
        try:
            changed = entry.stat(follow_symlinks=False).st_mtime
        except OSError:
            continue
        if changed <= latest:
            yield entry.path


def _remove(path: str, remove: Callable[[str], None]) -> bool:
    """Whether a file or directory is gone; what stays is logged."""
    try:
        remove(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        log.warning("cannot remove %s: %s", path, error.strerror)
        return False
    return True
