"""A store that forgets the values that were not used for the longest time."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The most recently used values by key, whose total weight is at most ``limit``; the last one is always kept.

    weigh: the weight of a value; 1 by default.
    """

    def __init__(self, limit: int, *, weigh: Callable[[V], int] = lambda _: 1) -> None:
        self.limit, self._weigh = limit, weigh
        self._values: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of ``key``, created by ``make`` if it is missing; nothing is stored if that fails."""
        if key not in self._values:
            self._values[key] = make()
        self._values.move_to_end(key)
        while len(self._values) > 1 and sum(map(self._weigh, self._values.values())) > self.limit:
            self._values.popitem(last=False)
        return self._values[key]
