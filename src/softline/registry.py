"""A registry of named entries that other packages can extend through entry points."""

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from softline.errors import UserError

T = TypeVar("T")
A = TypeVar("A")


class Registry(Mapping[str, T]):
    """Entries by name; the entry points that packages declare are looked up on first use.

    kind: what an entry is called in error messages.
    group: entry-point group of the entries that other packages add.
    """

    def __init__(self, kind: str, *, group: str) -> None:
        self.kind, self.group = kind, group
        self._entries: dict[str, T | EntryPoint] = {}
        self._found_entry_points = False

    def register(self, name: str) -> Callable[[A], A]:
        """Return a decorator that adds the decorated object under ``name``."""

        def add(entry: A) -> A:
            if name in self._entries:
                raise UserError(f"{self.kind} {name!r} is registered already")
            self._entries[name] = entry  # type: ignore[assignment]
            return entry

        return add

    def _all(self) -> dict[str, T | EntryPoint]:
        if not self._found_entry_points:
            found: dict[str, EntryPoint] = {}
            for point in entry_points(group=self.group):
                if point.name in self._entries:
                    raise UserError(f"{self.kind} {point.name!r} of {_package(point)} is registered already; rename it")
                if point.name in found:
                    packages = f"{_package(found[point.name])} and {_package(point)}"
                    raise UserError(f"{self.kind} {point.name!r} is declared by {packages}; uninstall or rename one")
                found[point.name] = point
            self._entries |= found
            self._found_entry_points = True
        return self._entries

    def __getitem__(self, name: str) -> T:
        entry = self._all()[name]
        # a package is imported when its entry is used, not when the names are listed
        return entry.load() if isinstance(entry, EntryPoint) else entry

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return f"Registry({self.kind}: {', '.join(self)})"


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.value
