"""Reading the files and folders of a dataset.

Only regular files are read: a named pipe would block for ever, and a device may have no end. Below the folder that a
user or a layout names, symbolic links are refused: a link to a folder further up would repeat images under wrong
classes, and a link out of the dataset would read something else. The named folder may itself be a link, unless it
leads to a folder that contains it.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from softline import plain
from softline.errors import UserError
from softline.files import check_regular, read_bytes

# of POSIX and of Windows
SEPARATOR = re.compile(r"[/\\]")
ABSOLUTE = re.compile(r"([A-Za-z]:)?[/\\]")


class Folder(NamedTuple):
    """A folder that `walk` found."""

    path: Path
    parts: tuple[str, ...]
    """Folders between the top and this one, and its name."""
    subfolders: list[str]
    files: list[str]
    """Wanted files, sorted."""
    others: int
    """Number of other files that are not hidden."""


def walk(top: Path, *, wanted: Callable[[str], bool], root: Path | None = None) -> Iterator[Folder]:
    """Yield a folder and those below it, by name; a link or a special file with a wanted name is an error.

    root: the dataset of which ``top`` is a folder.
    """
    _check_top(Path(top), root)
    waiting: list[tuple[tuple[str, ...], Path]] = [((), Path(top))]
    while waiting:
        parts, path = waiting.pop()
        subfolders, files, others = [], [], 0
        with os.scandir(path) as entries:
            for entry in entries:
                # a link that leads nowhere may be a class that is not mounted
                if entry.is_symlink() and (wanted(entry.name) or not os.path.isfile(entry.path)):
                    raise linked(entry.path)
                if entry.is_dir():
                    subfolders.append(entry.name)
                elif wanted(entry.name):
                    if not entry.is_file():
                        check_regular(entry.path)
                    files.append(entry.name)
                else:
                    others += not entry.name.startswith(".")
        subfolders.sort()
        yield Folder(path, parts, subfolders, sorted(files), others)
        waiting += [((*parts, name), path / name) for name in reversed(subfolders)]


def _check_top(top: Path, root: Path | None) -> None:
    """Check that a folder below ``root`` does not lead back to ``root`` or to a folder above it."""
    if root is None or Path(root) == top:
        return
    target, above = Path(os.path.realpath(top)), Path(os.path.realpath(root))
    if target in (above, *above.parents):
        raise UserError(f"{top} is a symbolic link to {target}, which contains it: a folder must not contain itself")


def linked(path: str) -> UserError:
    """The error for a symbolic link inside a dataset."""
    try:
        target = os.readlink(path)
    except OSError as error:
        target = f"an unreadable target ({error.strerror})"
    rule = "links inside a dataset are not followed; replace it by what it refers to"
    return UserError(f"{path} is a symbolic link to {target}: {rule}")


def read_json(path: str | Path) -> Any:
    """Read a JSON file in UTF-8, UTF-16 or UTF-32."""
    return plain.read_json(read_bytes(path), str(path))


def misplaced(name: object) -> str | None:
    """Say why ``name`` cannot be the name of a file below a folder; None if it can."""
    if not isinstance(name, str) or not name:
        return "it must be text that is not empty"
    # on every system, so that a dataset means the same on all; without pathlib, as a dataset has millions of names
    if ABSOLUTE.match(name):
        return "it must not be an absolute path"
    if ".." in name and ".." in SEPARATOR.split(name):
        return "it must not contain '..'"
    if not name.strip("./"):
        return "it must name a file"
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        return "it must be Unicode text"
    return "it must not contain a null character" if b"\0" in encoded else None


class FilesBelow:
    """Checks of files that a list names, which must be regular files below ``folder``.

    kind: what errors call a name.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind = folder, kind
        # each folder is checked once, as many files share it
        self._checked = set[Path]()

    def check(self, name: object) -> Path:
        """Return the path; UserError if it leaves the folder, passes through a link or is no regular file."""
        if reason := misplaced(name):
            raise UserError(f"{self._kind} must be a file below {self._folder}: {reason}, got {name!r:.80}")
        *folders, file = Path(str(name)).parts
        place = self._folder
        for folder in folders:
            place /= folder
            if place not in self._checked:
                _check_no_link(place)
                self._checked.add(place)
        place /= file
        _check_no_link(place)
        check_regular(place)
        return place


def _check_no_link(path: Path) -> None:
    if path.is_symlink():
        raise linked(str(path))
