"""Loads that no sequence waits for: pinned adapters that are not in the pool, and adapters that may be wanted soon.

A pinned adapter's load begins as soon as there is room beside the growth of what runs, and newcomers leave free what
it lacks. A preload begins only while nothing waits, one at a time, in the order asked for; it takes free pages, and of
idle ones only those worth least.
"""

from collections.abc import Callable

from loraplex.core import AdapterDigest
from loraplex.pool import AdapterResidency, AdapterState, PagePool
from loraplex.scheduler.config import SchedulerConfig
from loraplex.scheduler.plan import AdapterLoad


class Preloads:
    """What is to be loaded without a request. With `load_ahead` off nothing is: adapters come with their steps."""

    __slots__ = ("_config", "_dropped", "_missing", "_on_its_way", "_pool", "_residency", "_unused", "_wanted")

    def __init__(self, config: SchedulerConfig, pool: PagePool, residency: AdapterResidency) -> None:
        self._config = config
        self._pool = pool
        self._residency = residency
        self._missing: dict[AdapterDigest, int] = {}  # pinned, not in the pool: their pages
        self._wanted: dict[AdapterDigest, tuple[int, bool]] = {}  # pages, and whether only free ones may be taken
        self._dropped: dict[AdapterDigest, None] = {}  # that were to take more than free pages, until `take_dropped`
        self._on_its_way: AdapterDigest | None = None
        self._unused: set[AdapterDigest] = set()  # preloaded, and not used when last looked at

    @property
    def num_loading_pages(self) -> int:
        """Pages of the preload that is on its way: they count for nobody else's bound."""
        return 0 if self._on_its_way is None else len(self._residency.pages(self._on_its_way))

    @property
    def num_missing_pages(self) -> int:
        """Pages that pinned adapters lack."""
        return sum(self._missing.values()) if self._missing and self._config.load_ahead else 0

    @property
    def can_begin(self) -> bool:
        """Whether the next preload only waits for a step in which nothing waits."""
        return bool(self._wanted) and self._on_its_way is None and not self._missing

    def pinned(self, digest: AdapterDigest, num_pages: int) -> None:
        """An adapter was pinned."""
        if not self._residency.is_placed(digest):
            self._missing[digest] = num_pages
        self._wanted.pop(digest, None)
        self._dropped.pop(digest, None)

    def want(self, digest: AdapterDigest, num_pages: int, *, only_free: bool) -> None:
        """Load an adapter when there is time and room; one that is in the pool, or pinned, needs nothing."""
        if self._config.load_ahead and not self._residency.is_placed(digest) and digest not in self._missing:
            self._wanted[digest] = (num_pages, only_free)
            self._dropped.pop(digest, None)

    def drop(self, digest: AdapterDigest) -> None:
        """Nobody wants it any more. A load on its way ends as it does."""
        self._missing.pop(digest, None)
        self._unused.discard(digest)
        _, only_free = self._wanted.pop(digest, (0, True))
        if not only_free:
            self._dropped[digest] = None

    def placed(self, digest: AdapterDigest) -> None:
        """An adapter's pages are leased, whoever asked for it."""
        self._missing.pop(digest, None)
        self._wanted.pop(digest, None)
        self._dropped.pop(digest, None)

    def take_dropped(self) -> tuple[AdapterDigest, ...]:
        """Preloads that found no room in the pool, or left host memory before their turn, since the last call.

        Without those for free pages alone, and those that came with a request after all.
        """
        dropped, self._dropped = tuple(self._dropped), {}
        return dropped

    def ended(self, digest: AdapterDigest) -> None:
        """A load is ready, or has failed: a pinned adapter's is tried again when its time has come."""
        if digest == self._on_its_way:
            self._on_its_way = None
            self._unused.add(digest)
        if self._residency.is_pinned(digest) and not self._residency.is_placed(digest):
            self._missing[digest] = self._residency.pinned_pages(digest)

    # ------------------------------------------------------------------ beginning
    def start_pinned(self, spare_pages: Callable[[], int], now: float) -> list[AdapterLoad]:
        """Begin the loads of pinned adapters, in the order in which they were pinned, while they fit."""
        if not self._missing or not self._config.load_ahead:
            return []
        loads, spare = [], spare_pages()
        for digest, num_pages in tuple(self._missing.items()):
            if self._residency.state(digest, now) is not AdapterState.ABSENT:
                continue  # its load has failed a moment ago
            if not self._is_within_bound(num_pages) or not self._residency.can_make_room(num_pages + spare):
                break
            loads.append(self._begin(digest, num_pages, set(), now))
        return loads

    def start_next(self, spare_pages: Callable[[], int], now: float) -> list[AdapterLoad]:
        """Begin the next preload, while nothing waits. One that does not fit, or whose load has failed, is dropped."""
        if self._on_its_way is not None or self._missing:
            return []
        while self._wanted:
            digest, (num_pages, only_free) = next(iter(self._wanted.items()))
            if not self._is_within_bound(num_pages):
                return []
            del self._wanted[digest]
            self._unused = {one for one in self._unused if self._residency.is_unused(one)}
            room = num_pages + spare_pages()
            fits = self._pool.num_free >= room if only_free else self._residency.can_make_room(room, self._unused)
            if not fits and not only_free:
                self._dropped[digest] = None
            if fits and self._residency.state(digest, now) is AdapterState.ABSENT:
                self._on_its_way = digest
                return [self._begin(digest, num_pages, self._unused, now)]
        return []

    def _is_within_bound(self, num_pages: int) -> bool:
        bound, loading = self._config.max_load_pages, self._residency.num_loading_pages
        return bound is None or not loading or loading + num_pages <= bound

    def _begin(self, digest: AdapterDigest, num_pages: int, keep: set[AdapterDigest], now: float) -> AdapterLoad:
        has_begun = self._residency.begin_load(digest, num_pages, keep, now)
        assert has_begun, "can_make_room promised the pages"
        self.placed(digest)
        return AdapterLoad(digest, self._residency.pages(digest))

    def check_invariants(self) -> None:
        """Raises AssertionError unless pinned adapters are in the pool, on their way, or known to be missing."""
        pinned = set(self._residency.pinned)
        assert self._missing.keys() == {digest for digest in pinned if not self._residency.is_placed(digest)}
        assert not self._wanted.keys() & pinned
        assert not any(map(self._residency.is_placed, self._dropped))
        if self._on_its_way is not None:
            assert self._residency.state(self._on_its_way) is AdapterState.LOADING
