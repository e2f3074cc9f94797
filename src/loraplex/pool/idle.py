"""What may be evicted: idle adapters and cached prefixes in one queue, least worth first.

The order is GreedyDual-Size-Frequency (Cherkasova 1998): an entry's value is its worth, the seconds that bringing it
back would cost, times how often it is wanted, for each page, plus the value of what was evicted last before it came.
So what is not used for long sinks below what is, without a clock. With every worth 0 the order is least recently used.
"""

import heapq
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass

from loraplex.pool.pool import PagePool


@dataclass(slots=True, eq=False)
class _Entry:
    key: Hashable
    num_pages: int
    value: float
    evict: Callable[[], None]
    is_live: bool = True


class IdlePages:
    """Entries that nobody uses. `num_covered` pages lie behind entries: they can be evicted after those, not before."""

    __slots__ = ("_clock", "_entries", "_heap", "_next", "num_covered", "num_pages")

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}
        self._heap: list[tuple[float, int, _Entry]] = []
        self._clock = 0.0
        self._next = 0
        self.num_pages = 0
        self.num_covered = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def pages_of(self, key: Hashable) -> int:
        """Pages of an entry; 0 for what is not idle."""
        entry = self._entries.get(key)
        return entry.num_pages if entry is not None else 0

    def add(self, key: Hashable, num_pages: int, worth: float | None, evict: Callable[[], None]) -> None:
        """Make something evictable. `worth`: seconds a page; None goes before everything. `evict` must remove it."""
        assert key not in self._entries, "an entry is idle twice"
        value = float("-inf") if worth is None else self._clock + worth
        entry = self._entries[key] = _Entry(key, num_pages, value, evict)
        self.num_pages += num_pages
        self._push(entry)

    def _push(self, entry: _Entry) -> None:
        self._next += 1
        heapq.heappush(self._heap, (entry.value, self._next, entry))
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [item for item in self._heap if item[2].is_live]
            heapq.heapify(self._heap)

    def remove(self, key: Hashable) -> None:
        """It is used again, or was evicted. Raises KeyError for what is not idle."""
        entry = self._entries.pop(key)
        entry.is_live = False
        self.num_pages -= entry.num_pages

    def evictable(self, keep: Collection[Hashable] = ()) -> int:
        """Pages that eviction could free without `keep`."""
        return self.num_pages + self.num_covered - sum(self.pages_of(key) for key in keep)

    def evict_until(self, pool: PagePool, num_pages: int, keep: Collection[Hashable] = ()) -> None:
        """Evict the least worth until `num_pages` pages of the pool are free. There must be enough."""
        spared = []
        while pool.num_free < num_pages:
            item = heapq.heappop(self._heap)
            entry = item[2]
            if not entry.is_live:
                continue
            if entry.key in keep:
                spared.append(item)
                continue
            self._clock = max(self._clock, entry.value)
            entry.evict()
            assert not entry.is_live, "an evicted entry stayed"
        for item in spared:
            heapq.heappush(self._heap, item)

    def check_invariants(self) -> None:
        """Counts agree, and every entry can be found."""
        assert self.num_pages == sum(entry.num_pages for entry in self._entries.values())
        assert self.num_covered >= 0
        live = {id(item[2]) for item in self._heap if item[2].is_live}
        assert live == {id(entry) for entry in self._entries.values()}, "an idle entry is not in the queue"
