"""Which adapters are in the pool. Residency is a cache: idle adapters stay until their pages are wanted."""

from collections import OrderedDict
from dataclasses import dataclass

from loraplex.core import AdapterDigest, PageId
from loraplex.pool.pool import Lease, PagePool


@dataclass(frozen=True, slots=True)
class Acquired:
    """A pinned adapter. `is_cold`: its pages were just leased and must be filled before the next step runs."""

    digest: AdapterDigest
    pages: tuple[PageId, ...]
    is_cold: bool


@dataclass(slots=True, eq=False)
class _Resident:
    lease: Lease
    num_pins: int = 0


class AdapterResidency:
    """Adapters in the pool, by digest. Pinned ones are in use and never evicted; idle ones go least recently used."""

    __slots__ = ("_idle", "_pool", "_residents", "num_evictions")

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._residents: dict[AdapterDigest, _Resident] = {}
        self._idle: OrderedDict[AdapterDigest, None] = OrderedDict()  # least recently used first
        self.num_evictions = 0

    @property
    def resident(self) -> tuple[AdapterDigest, ...]:
        return tuple(self._residents)

    @property
    def num_pages(self) -> int:
        """Pages held by adapters, idle ones included."""
        return sum(r.lease.num_pages for r in self._residents.values())

    @property
    def num_idle_pages(self) -> int:
        """Pages that eviction could free."""
        return sum(self._residents[d].lease.num_pages for d in self._idle)

    def is_resident(self, digest: AdapterDigest) -> bool:
        return digest in self._residents

    def num_pins(self, digest: AdapterDigest) -> int:
        resident = self._residents.get(digest)
        return resident.num_pins if resident else 0

    def pages(self, digest: AdapterDigest) -> tuple[PageId, ...]:
        """Pages of a resident adapter, in the order of its layout."""
        return self._residents[digest].lease.pages

    def can_make_room(self, num_pages: int, keep: AdapterDigest | None = None) -> bool:
        """Whether `make_room` would succeed; changes nothing."""
        spared = self._residents[keep].lease.num_pages if keep is not None and keep in self._idle else 0
        return self._pool.num_free + self.num_idle_pages - spared >= num_pages

    def make_room(self, num_pages: int, keep: AdapterDigest | None = None) -> bool:
        """Evict idle adapters until `num_pages` pages are free. False, and nothing evicted, if that cannot be."""
        if not self.can_make_room(num_pages, keep):
            return False
        for digest in [d for d in self._idle if d != keep]:
            if self._pool.num_free >= num_pages:
                break
            self.evict(digest)
        return True

    def acquire(self, digest: AdapterDigest, num_pages: int) -> Acquired | None:
        """Pin an adapter of `num_pages` pages, evicting idle ones if need be. None when there is no room."""
        resident = self._residents.get(digest)
        is_cold = resident is None
        if resident is None:
            if not self.make_room(num_pages):
                return None
            lease = self._pool.allocate(num_pages, f"adapter:{digest}")
            assert lease is not None, "make_room promised the pages"
            resident = self._residents[digest] = _Resident(lease)
        resident.num_pins += 1
        self._idle.pop(digest, None)
        return Acquired(digest, resident.lease.pages, is_cold)

    def release(self, digest: AdapterDigest) -> None:
        """Undo one `acquire`. At the last one the adapter becomes idle, most recently used."""
        resident = self._residents[digest]
        assert resident.num_pins > 0, "adapter released more often than acquired"
        resident.num_pins -= 1
        if not resident.num_pins:
            self._idle[digest] = None

    def evict(self, digest: AdapterDigest) -> None:
        """Free an idle adapter's pages."""
        del self._idle[digest]
        self._residents.pop(digest).lease.release()
        self.num_evictions += 1

    def check_invariants(self) -> None:
        self._pool.check_invariants()
        for digest, resident in self._residents.items():
            assert resident.num_pins >= 0
            assert (resident.num_pins == 0) == (digest in self._idle), "idle list disagrees with pins"
            assert resident.lease.namespace == f"adapter:{digest}"
        assert set(self._idle) <= set(self._residents)
