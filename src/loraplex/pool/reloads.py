"""Thrash: adapters that come back soon after they were evicted, and how much larger a pool would have kept them."""

from collections import OrderedDict, deque

from loraplex.core import AdapterDigest

MAX_EVICTED = 4096  # evicted adapters that are remembered
_RECENT = 128  # reloads that the figure is taken from


class Reloads:
    """Counts loads of adapters that were evicted lately.

    The distance of a reload is how many pages were evicted since the adapter was: a pool larger by as much, with the
    same order of eviction, would still have had it (Mattson's stack distance, 1970).
    """

    __slots__ = ("_distances", "_evicted", "_total", "count")

    def __init__(self) -> None:
        self.count = 0
        self._total = 0  # pages evicted so far
        self._evicted: OrderedDict[AdapterDigest, int] = OrderedDict()  # `_total` before each was evicted
        self._distances: deque[int] = deque(maxlen=_RECENT)

    def evicted(self, digest: AdapterDigest, num_pages: int) -> None:
        """An adapter left because its pages were wanted."""
        self._evicted[digest] = self._total
        self._evicted.move_to_end(digest)
        self._total += num_pages
        if len(self._evicted) > MAX_EVICTED:
            self._evicted.popitem(last=False)

    def loaded(self, digest: AdapterDigest) -> None:
        """A load of an adapter begins; before pages are evicted for it."""
        before = self._evicted.pop(digest, None)
        if before is not None:
            self.count += 1
            self._distances.append(self._total - before)

    def missing_pages(self, share: float = 0.9) -> int:
        """Pages more with which this share of the last reloads would not have been; 0 when there were none."""
        ordered = sorted(self._distances)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0
