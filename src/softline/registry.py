"""Things by name, from softline and from other packages."""

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from softline.errors import UserError

T = TypeVar("T")
A = TypeVar("A")


class Registry(Mapping[str, T]):
    """Names and what they stand for; what packages declare as entry points is looked up on first use.

    kind: what error messages call an entry.
    group: the entry-point group in which packages declare theirs.
    """

    def __init__(self, kind: str, *, group: str) -> None:
        self.kind, self.group = kind, group
        self._entries: dict[str, T | EntryPoint] = {}
        self._found_entry_points = False

    def register(self, name: str) -> Callable[[A], A]:
        """A decorator that adds what it decorates under ``name``."""

        def add(entry: A) -> A:
            if name in self._entries:
                raise UserError(f"{self.kind} {name!r} is registered already")
            self._entries[name] = entry  # type: ignore[assignment]
            return entry

        return add

    def _all(self) -> dict[str, T | EntryPoint]:
        if not self._found_entry_points:
            for point in entry_points(group=self.group):
                if point.name in self._entries:
                    package = point.dist.name if point.dist else point.value
                    raise UserError(f"{self.kind} {point.name!r} of {package} is registered already; rename it")
            self._entries |= {point.name: point for point in entry_points(group=self.group)}
            self._found_entry_points = True
        return self._entries

    def __getitem__(self, name: str) -> T:
        entry = self._all()[name]
        # a package is imported when its entry is used, not when names are listed
        return entry.load() if isinstance(entry, EntryPoint) else entry

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return f"Registry({self.kind}: {', '.join(self)})"
