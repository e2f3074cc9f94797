"""Which adapters are in the pool. Residency is a cache: idle adapters stay until their pages are wanted."""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum

from loraplex.core import AdapterDigest, InvalidRequest, PageId
from loraplex.core.reloads import Reloads
from loraplex.pool.adapter_state import AdapterEvent, AdapterState, next_state
from loraplex.pool.idle import IdlePages
from loraplex.pool.pool import Lease, PagePool

HALF_LIFE_S = 60.0  # of an adapter's popularity


class EvictionReason(Enum):
    """What the pages were wanted for.

    RETIRED and HOST: nothing; the adapter was taken away, or left host memory for others.
    """

    LOAD = "load"
    START = "start"
    GROWTH = "growth"
    RETIRED = "retired"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Acquired:
    """An adapter in use. `is_cold`: its pages were just leased and must be filled before the next step runs."""

    digest: AdapterDigest
    pages: tuple[PageId, ...]
    is_cold: bool


@dataclass(frozen=True, slots=True)
class ReloadCost:
    """Seconds that bringing an adapter back takes. All 0: adapters are evicted least recently used first."""

    fixed_s: float = 0.0
    page_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one adapter stands. `popularity` counts starts, the older the less; `used_s` is the time of the last.

    `retry_at_s` is when one that failed may be loaded again.
    """

    state: AdapterState
    num_pages: int
    num_users: int
    popularity: float
    used_s: float | None
    retry_at_s: float | None = None


@dataclass(slots=True, eq=False)
class _Placed:
    lease: Lease
    state: AdapterState
    num_users: int = 0
    popularity: float = 0.0
    used_s: float = 0.0

    def use(self, now: float) -> None:
        self.popularity = self.popularity_at(now) + 1.0
        self.used_s = now

    def popularity_at(self, now: float) -> float:
        age_s = max(0.0, now - self.used_s)
        return self.popularity * math.pow(0.5, age_s / HALF_LIFE_S)


class AdapterResidency:
    """Adapters in the pool, by digest. Those in use, loading or pinned are never evicted; idle ones go by `IdlePages`.

    A pinned adapter stays once it is in the pool, used or not. Pins are bounded: the pool is for requests too.
    What only reads may be called while another thread is in one of the methods that change something.
    """

    __slots__ = (
        "_failed",
        "_idle",
        "_pinned",
        "_placed",
        "_pool",
        "_reason",
        "cost",
        "evictions",
        "num_loading_pages",
        "num_pages",
        "num_pinned_pages",
        "on_evict",
        "reloads",
    )

    def __init__(self, pool: PagePool, idle: IdlePages | None = None, cost: ReloadCost | None = None) -> None:
        self._pool = pool
        self._idle = IdlePages() if idle is None else idle
        self.cost = cost or ReloadCost()  # what newly idle adapters are valued by
        self._placed: dict[AdapterDigest, _Placed] = {}
        self._failed: dict[AdapterDigest, float] = {}  # until when no load is tried
        self._pinned: dict[AdapterDigest, int] = {}  # and their pages, in the pool or not yet
        self._reason = EvictionReason.RETIRED  # of evictions now
        self.num_loading_pages = 0
        self.num_pinned_pages = 0  # of pinned adapters, in the pool or not yet
        self.num_pages = 0  # held by adapters, idle ones and those being filled included
        self.evictions: Counter[EvictionReason] = Counter()
        self.reloads = Reloads()
        self.on_evict: Callable[[AdapterDigest], None] = lambda digest: None

    @property
    def resident(self) -> tuple[AdapterDigest, ...]:
        return tuple(d for d, placed in self._placed.copy().items() if placed.state is AdapterState.RESIDENT)

    @property
    def loading(self) -> tuple[AdapterDigest, ...]:
        return tuple(d for d, placed in self._placed.copy().items() if placed.state is AdapterState.LOADING)

    @property
    def num_evictions(self) -> int:
        return sum(self.evictions.values())

    def state(self, digest: AdapterDigest, now: float = 0.0) -> AdapterState:
        """Where an adapter stands. A failed one is absent again when its time has come."""
        placed = self._placed.get(digest)
        if placed is not None:
            return placed.state
        until = self._failed.get(digest)
        return AdapterState.FAILED if until is not None and now < until else AdapterState.ABSENT

    def is_placed(self, digest: AdapterDigest) -> bool:
        """Whether an adapter has pages, filled or being filled."""
        return digest in self._placed

    def is_resident(self, digest: AdapterDigest) -> bool:
        return self.state(digest) is AdapterState.RESIDENT

    def num_users(self, digest: AdapterDigest) -> int:
        placed = self._placed.get(digest)
        return placed.num_users if placed else 0

    def is_pinned(self, digest: AdapterDigest) -> bool:
        return digest in self._pinned

    @property
    def pinned(self) -> tuple[AdapterDigest, ...]:
        """In the order in which they were pinned."""
        return tuple(self._pinned.copy())

    @property
    def max_pinned_pages(self) -> int:
        """Most pages of pinned adapters: half of the pool."""
        return self._pool.num_pages // 2

    def pinned_pages(self, digest: AdapterDigest) -> int:
        """Pages that an adapter's pin counts for; 0 for one that is not pinned."""
        return self._pinned.get(digest, 0)

    def is_unused(self, digest: AdapterDigest) -> bool:
        """Whether an adapter is in the pool and was never acquired since it came."""
        placed = self._placed.get(digest)
        return placed is not None and not placed.popularity

    def failed(self, now: float) -> tuple[AdapterDigest, ...]:
        """Adapters whose load may not be tried now."""
        return tuple(digest for digest, until in self._failed.copy().items() if now < until)

    def most_popular(self, num_adapters: int, now: float) -> list[tuple[AdapterDigest, float]]:
        """Resident adapters with their popularity, 0 for those that were never used, the most popular first."""
        placed = self._placed.copy().items()
        there = [(one.popularity_at(now), digest) for digest, one in placed if one.state is AdapterState.RESIDENT]
        return [(digest, popularity) for popularity, digest in heapq.nlargest(num_adapters, there)]

    def placements(self, now: float) -> dict[AdapterDigest, Placement]:
        """Every adapter that has pages, and those whose load has failed and may not be tried now."""
        found = {
            digest: Placement(AdapterState.FAILED, 0, 0, 0.0, None, until)
            for digest, until in self._failed.copy().items()
            if now < until
        }
        for digest, placed in self._placed.copy().items():
            pages, popularity = placed.lease.num_pages, placed.popularity_at(now)
            used_s = placed.used_s if placed.popularity else None
            found[digest] = Placement(placed.state, pages, placed.num_users, popularity, used_s)
        return found

    def pages(self, digest: AdapterDigest) -> tuple[PageId, ...]:
        """Pages of an adapter in the pool, in the order of its layout."""
        return self._placed[digest].lease.pages

    # ------------------------------------------------------------------ room
    @property
    def num_evictable_pages(self) -> int:
        """Pages that eviction could free, those of cached prefixes included."""
        return self._idle.evictable()

    def can_make_room(self, num_pages: int, keep: AdapterDigest | Collection[AdapterDigest] | None = None) -> bool:
        """Whether `make_room` would succeed; changes nothing."""
        return self._pool.num_free + self._idle.evictable(_keys(keep)) >= num_pages

    def make_room(
        self,
        num_pages: int,
        keep: AdapterDigest | Collection[AdapterDigest] | None = None,
        reason: EvictionReason = EvictionReason.START,
    ) -> bool:
        """Evict what is idle until `num_pages` pages are free. False, and nothing evicted, if that cannot be."""
        if not self.can_make_room(num_pages, keep):
            return False
        self._reason = reason
        self._idle.evict_until(self._pool, num_pages, _keys(keep))
        self._reason = EvictionReason.RETIRED
        return True

    # ------------------------------------------------------------------ loads
    def begin_load(self, digest: AdapterDigest, num_pages: int, keep: Collection[AdapterDigest], now: float) -> bool:
        """Lease pages that are to be filled, sparing the idle adapters `keep`. False, and nothing changed: no room."""
        state = self.state(digest, now)
        after = next_state(state, AdapterEvent.BEGIN)
        if not self.can_make_room(num_pages, keep):
            return False
        self.reloads.loaded(digest, now)
        self.make_room(num_pages, keep, EvictionReason.LOAD)
        if self._failed.pop(digest, None) is not None:
            assert next_state(AdapterState.FAILED, AdapterEvent.RETRY) is state
        self._failed = {other: until for other, until in self._failed.items() if now < until}
        self._place(digest, num_pages, after)
        self.num_loading_pages += num_pages
        return True

    def ready(self, digest: AdapterDigest) -> None:
        """The pages of a loading adapter are filled. It is idle until it is acquired."""
        placed = self._placed[digest]
        placed.state = next_state(placed.state, AdapterEvent.READY)
        self.num_loading_pages -= placed.lease.num_pages
        self._rest(digest, placed)

    def fail(self, digest: AdapterDigest, until: float) -> None:
        """The load went wrong: its pages are free, and it is not tried again before `until`."""
        placed = self._placed[digest]
        next_state(placed.state, AdapterEvent.FAIL)
        self.num_loading_pages -= placed.lease.num_pages
        del self._placed[digest]
        self.num_pages -= placed.lease.num_pages
        placed.lease.release()
        self._failed[digest] = until

    def _place(self, digest: AdapterDigest, num_pages: int, state: AdapterState) -> _Placed:
        lease = self._pool.allocate(num_pages, f"adapter:{digest}")
        assert lease is not None, "make_room promised the pages"
        placed = self._placed[digest] = _Placed(lease, state)
        self.num_pages += num_pages
        return placed

    # ------------------------------------------------------------------ use
    def acquire(self, digest: AdapterDigest, num_pages: int, now: float = 0.0) -> Acquired | None:
        """Use an adapter of `num_pages` pages, evicting what is idle if need be. None when there is no room.

        One that is loading cannot be acquired.
        """
        placed = self._placed.get(digest)
        is_cold = placed is None
        if placed is None:
            after = next_state(AdapterState.ABSENT, AdapterEvent.PLACED)
            if not self.can_make_room(num_pages):
                return None
            self.reloads.loaded(digest, now)
            self.make_room(num_pages)
            self._failed.pop(digest, None)
            placed = self._place(digest, num_pages, after)
        assert placed.state is AdapterState.RESIDENT, "acquired while it is loaded"
        placed.num_users += 1
        placed.use(now)
        if digest in self._idle:
            self._idle.remove(digest)
        return Acquired(digest, placed.lease.pages, is_cold)

    def release(self, digest: AdapterDigest) -> None:
        """Undo one `acquire`. At the last one the adapter becomes idle, most recently used."""
        placed = self._placed[digest]
        assert placed.num_users > 0, "adapter released more often than acquired"
        placed.num_users -= 1
        if not placed.num_users:
            self._rest(digest, placed)

    def _rest(self, digest: AdapterDigest, placed: _Placed) -> None:
        """Nobody uses it now: it may be evicted, unless it is pinned."""
        if digest in self._pinned:
            return
        num_pages = placed.lease.num_pages
        worth = max(placed.popularity, 1.0) * (self.cost.fixed_s / max(num_pages, 1) + self.cost.page_s)
        self._idle.add(digest, num_pages, worth, lambda: self.evict(digest))

    def evict(self, digest: AdapterDigest, reason: EvictionReason | None = None) -> None:
        """Free an idle adapter's pages. Raises KeyError for one that is not idle."""
        reason = self._reason if reason is None else reason
        self._idle.remove(digest)
        placed = self._placed.pop(digest)
        next_state(placed.state, AdapterEvent.EVICT)
        if reason not in (EvictionReason.RETIRED, EvictionReason.HOST):  # a larger pool would not have kept those
            self.reloads.evicted(digest, placed.lease.num_pages)
        self.num_pages -= placed.lease.num_pages
        placed.lease.release()
        self.evictions[reason] += 1
        self.on_evict(digest)

    # ------------------------------------------------------------------ pins
    def pin(self, digest: AdapterDigest, num_pages: int) -> None:
        """Keep an adapter in the pool, from its next load if it is not there; pinning again changes nothing.

        Raises InvalidRequest where that would be too many pages.
        """
        if digest in self._pinned:
            return
        if self.num_pinned_pages + num_pages > self.max_pinned_pages:
            raise InvalidRequest(
                f"The adapter takes {num_pages} pages and {self.num_pinned_pages} are pinned; at most half of the pool "
                f"may be, {self.max_pinned_pages} of {self._pool.num_pages} pages (--kv-pages, --memory).",
                "pin",
            )
        self._pinned[digest] = num_pages
        self.num_pinned_pages += num_pages
        if digest in self._idle:
            self._idle.remove(digest)

    def unpin(self, digest: AdapterDigest) -> None:
        """It may be evicted like others. One that is not pinned is ignored."""
        num_pages = self._pinned.pop(digest, None)
        if num_pages is None:
            return
        self.num_pinned_pages -= num_pages
        placed = self._placed.get(digest)
        if placed is not None and placed.state is AdapterState.RESIDENT and not placed.num_users:
            self._rest(digest, placed)

    def check_invariants(self) -> None:
        self._pool.check_invariants()
        self._idle.check_invariants()
        loading = 0
        for digest, placed in self._placed.items():
            assert placed.num_users >= 0
            is_idle = placed.state is AdapterState.RESIDENT and placed.num_users == 0 and digest not in self._pinned
            assert is_idle == (digest in self._idle), "idle entries disagree with users and pins"
            assert self._pinned.get(digest, placed.lease.num_pages) == placed.lease.num_pages
            assert placed.lease.namespace == f"adapter:{digest}"
            assert digest not in self._failed, "an adapter in the pool counts as failed"
            loading += placed.lease.num_pages if placed.state is AdapterState.LOADING else 0
        assert loading == self.num_loading_pages
        assert self.num_pinned_pages == sum(self._pinned.values()) <= self.max_pinned_pages
        assert self.num_pages == sum(placed.lease.num_pages for placed in self._placed.values())


def _keys(keep: AdapterDigest | Collection[AdapterDigest] | None) -> Collection[AdapterDigest]:
    if keep is None:
        return ()
    return (keep,) if isinstance(keep, str) else keep
