"""A store that forgets what was not used for longest."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Values by key, the last used of them, as many as weigh no more than ``limit`` together; always the last one.

    weigh: of a value, in the unit of ``limit``; by default each weighs 1.
    """

    def __init__(self, limit: int, *, weigh: Callable[[V], int] = lambda _: 1) -> None:
        self.limit, self._weigh = limit, weigh
        self._values: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of ``key``, made if it is not there; nothing is kept if that fails."""
        if key not in self._values:
            self._values[key] = make()
        self._values.move_to_end(key)
        while len(self._values) > 1 and sum(map(self._weigh, self._values.values())) > self.limit:
            self._values.popitem(last=False)
        return self._values[key]
