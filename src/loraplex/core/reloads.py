"""Thrash: adapters that come back soon after they were evicted, and how much larger a cache would have kept them.

Of the pool, where sizes are in pages, and of host memory, where they are in bytes.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from loraplex.core.types import AdapterDigest

MAX_EVICTED = 16_384  # evictions that are remembered
SOON_S = 600.0  # what comes back later than that after it was evicted is no reload
RECENT_S = 60.0  # reloads older than this no longer count
OFTEN = 30  # reloads within that time are thrash
MAX_RECENT = 4096  # most reloads that are looked at


@dataclass(frozen=True, slots=True)
class _Evicted:
    place: int
    size: int
    at_s: float | None  # None: before the first load


class _Sums:
    """Sizes by place, and the sum of those from a place on: a Fenwick tree."""

    __slots__ = ("_size", "_sums", "total")

    def __init__(self, size: int) -> None:
        self._size = size
        self._sums = [0] * (size + 1)
        self.total = 0

    def add(self, place: int, size: int) -> None:
        """Change the size at a place, from 0 on."""
        self.total += size
        place += 1
        while place <= self._size:
            self._sums[place] += size
            place += place & -place

    def since(self, place: int) -> int:
        """The sum of the sizes at this place and behind it."""
        before = 0
        while place > 0:
            before += self._sums[place]
            place &= place - 1
        return self.total - before


class Reloads:
    """Counts loads of adapters that were evicted lately. All times are those that `loaded` was told.

    The distance of a reload is its size and that of all that was evicted since the adapter was and has not come back: a
    cache larger by as much, with the same order of eviction, would still have had it (Mattson's stack distance, 1970).
    """

    __slots__ = ("_evicted", "_next", "_now_s", "_place", "_recent", "_reported_s", "_sums", "count")

    def __init__(self) -> None:
        self.count = 0
        self._now_s: float | None = None
        self._next = 0
        self._place = 0
        self._sums = _Sums(2 * MAX_EVICTED)
        self._evicted: OrderedDict[AdapterDigest | int, _Evicted] = OrderedDict()  # in order; numbers: no adapters
        self._recent: deque[tuple[float, int]] = deque(maxlen=MAX_RECENT)  # when each was, and its distance
        self._reported_s = -math.inf

    def evicted(self, digest: AdapterDigest, size: int) -> None:
        """An adapter left because its room was wanted."""
        self._forget(digest)
        self._note(digest, size)

    def also_evicted(self, size: int) -> None:
        """Something else left because room was wanted, and is not expected back: a larger cache would have kept it."""
        newest = next(reversed(self._evicted), None)
        if isinstance(newest, int):
            before = self._evicted[newest]
            self._evicted[newest] = _Evicted(before.place, before.size + size, self._now_s)
            self._sums.add(before.place, size)
        else:
            self._next += 1
            self._note(self._next, size)

    def _note(self, what: AdapterDigest | int, size: int) -> None:
        if self._place == 2 * MAX_EVICTED:
            self._renumber()
        self._evicted[what] = _Evicted(self._place, size, self._now_s)
        self._sums.add(self._place, size)
        self._place += 1
        if len(self._evicted) > MAX_EVICTED:
            self._forget(next(iter(self._evicted)))

    def _forget(self, what: AdapterDigest | int) -> None:
        evicted = self._evicted.pop(what, None)
        if evicted is not None:
            self._sums.add(evicted.place, -evicted.size)

    def _renumber(self) -> None:
        """Give the places in front to what is remembered."""
        self._place, self._sums = len(self._evicted), _Sums(2 * MAX_EVICTED)
        for place, (what, evicted) in enumerate(self._evicted.items()):
            self._evicted[what] = _Evicted(place, evicted.size, evicted.at_s)
            self._sums.add(place, evicted.size)

    def loaded(self, digest: AdapterDigest, now: float) -> None:
        """A load of an adapter begins; before others are evicted for it."""
        self._now_s = now
        mine = self._evicted.get(digest)
        if mine is None:
            return
        if mine.at_s is None or now - mine.at_s <= SOON_S:
            self.count += 1
            self._recent.append((now, self._sums.since(mine.place)))
        self._forget(digest)

    def returned(self, digest: AdapterDigest) -> None:
        """What was evicted is back before it had left: that is no load."""
        self._forget(digest)

    def missing(self, now: float, share: float = 0.9) -> int:
        """What a cache must have more so that this share of the last minute's reloads would not have been.

        0 when there were none. From any thread.
        """
        ordered = sorted(distance for at_s, distance in self._recent.copy() if now - at_s <= RECENT_S)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0

    def thrash(self, now: float) -> int:
        """How many reloads the last minute had, if that is often and was not told within a minute; else 0."""
        while self._recent and now - self._recent[0][0] > RECENT_S:
            self._recent.popleft()
        if len(self._recent) < OFTEN or now - self._reported_s < RECENT_S:
            return 0
        self._reported_s = now
        return len(self._recent)
