"""Thrash: adapters that come back soon after they were evicted, and how much larger a cache would have kept them.

Of the pool, where sizes are in pages, and of host memory, where they are in bytes.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from loraplex.core.types import AdapterDigest

MAX_EVICTED = 4096  # evictions that are remembered
SOON_S = 600.0  # what comes back later than that after it was evicted is no reload
RECENT_S = 60.0  # reloads older than this no longer count
OFTEN = 30  # reloads within that time are thrash
MAX_RECENT = 4096  # most reloads that are looked at


@dataclass(frozen=True, slots=True)
class _Evicted:
    size: int
    at_s: float | None  # None: before the first load


class Reloads:
    """Counts loads of adapters that were evicted lately. All times are those that `loaded` was told.

    The distance of a reload is its size and that of all that was evicted since the adapter was and has not come back: a
    cache larger by as much, with the same order of eviction, would still have had it (Mattson's stack distance, 1970).
    """

    __slots__ = ("_evicted", "_next", "_now_s", "_recent", "_reported_s", "count")

    def __init__(self) -> None:
        self.count = 0
        self._now_s: float | None = None
        self._next = 0
        self._evicted: OrderedDict[AdapterDigest | int, _Evicted] = OrderedDict()  # in order; numbers: no adapters
        self._recent: deque[tuple[float, int]] = deque(maxlen=MAX_RECENT)  # when each was, and its distance
        self._reported_s = -math.inf

    def evicted(self, digest: AdapterDigest, size: int) -> None:
        """An adapter left because its room was wanted."""
        self._evicted.pop(digest, None)
        self._note(digest, size)

    def also_evicted(self, size: int) -> None:
        """Something else left because room was wanted, and is not expected back: a larger cache would have kept it."""
        newest = next(reversed(self._evicted), None)
        if isinstance(newest, int):
            self._evicted[newest] = _Evicted(self._evicted[newest].size + size, self._now_s)
        else:
            self._next += 1
            self._note(self._next, size)

    def _note(self, what: AdapterDigest | int, size: int) -> None:
        self._evicted[what] = _Evicted(size, self._now_s)
        if len(self._evicted) > MAX_EVICTED:
            self._evicted.popitem(last=False)

    def loaded(self, digest: AdapterDigest, now: float) -> None:
        """A load of an adapter begins; before others are evicted for it."""
        self._now_s = now
        mine = self._evicted.get(digest)
        if mine is None:
            return
        if mine.at_s is None or now - mine.at_s <= SOON_S:
            self.count += 1
            self._recent.append((now, self._distance(digest)))
        del self._evicted[digest]

    def returned(self, digest: AdapterDigest) -> None:
        """What was evicted is back before it had left: that is no load."""
        self._evicted.pop(digest, None)

    def _distance(self, digest: AdapterDigest) -> int:
        total = 0
        for other, evicted in reversed(self._evicted.items()):
            total += evicted.size
            if other == digest:
                break
        return total

    def missing(self, now: float, share: float = 0.9) -> int:
        """What a cache must have more so that this share of the last minute's reloads would not have been.

        0 when there were none. From any thread.
        """
        ordered = sorted(self._distances(now))
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0

    def thrash(self, now: float) -> int:
        """How many reloads the last minute had, if that is often and was not told within a minute; else 0."""
        if len(self._recent) < OFTEN or now - self._reported_s < RECENT_S:
            return 0
        count = len(self._distances(now))
        if count < OFTEN:
            return 0
        self._reported_s = now
        return count

    def _distances(self, now: float) -> list[int]:
        return [distance for at_s, distance in self._recent.copy() if now - at_s <= RECENT_S]
