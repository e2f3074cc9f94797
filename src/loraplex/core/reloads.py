"""Thrash: adapters that come back soon after they were evicted, and how much larger a cache would have kept them.

Of the pool, where sizes are in pages, and of host memory, where they are in bytes.
"""

import math
from collections import OrderedDict, deque

from loraplex.core.types import AdapterDigest

MAX_EVICTED = 4096  # evicted adapters that are remembered
RECENT_S = 60.0  # reloads older than this no longer count
OFTEN = 30  # reloads within that time are thrash
_RECENT = 128  # most reloads that the figure is taken from


class Reloads:
    """Counts loads of adapters that were evicted lately.

    The distance of a reload is how much was evicted since the adapter was: a cache larger by as much, with the same
    order of eviction, would still have had it (Mattson's stack distance, 1970).
    """

    __slots__ = ("_evicted", "_recent", "_reported_s", "_total", "count")

    def __init__(self) -> None:
        self.count = 0
        self._total = 0  # evicted so far, adapters or not
        self._evicted: OrderedDict[AdapterDigest, int] = OrderedDict()  # `_total` before each was evicted
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT)  # when each was, and its distance
        self._reported_s = -math.inf

    def evicted(self, digest: AdapterDigest, size: int) -> None:
        """An adapter left because its room was wanted."""
        self._evicted[digest] = self._total
        self._evicted.move_to_end(digest)
        self._total += size
        if len(self._evicted) > MAX_EVICTED:
            self._evicted.popitem(last=False)

    def also_evicted(self, size: int) -> None:
        """Something else left because room was wanted: a larger cache would have kept that too."""
        self._total += size

    def loaded(self, digest: AdapterDigest, now: float) -> None:
        """A load of an adapter begins; before others are evicted for it."""
        before = self._evicted.pop(digest, None)
        if before is not None:
            self.count += 1
            self._recent.append((now, self._total - before))

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
