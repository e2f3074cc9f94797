"""The page pool: who holds which page. It knows no tensors; the engine owns the buffer."""

from collections.abc import Iterable

from loraplex.core import PageId


class Lease:
    """Pages held by one owner. The only handle on them; it grows, and frees once."""

    __slots__ = ("_pool", "namespace", "pages")

    def __init__(self, pool: "PagePool", namespace: str, pages: tuple[PageId, ...]) -> None:
        self._pool: PagePool | None = pool
        self.pages = pages  # in the order they were granted; empty after release
        self.namespace = namespace

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    @property
    def is_released(self) -> bool:
        return self._pool is None

    def extend(self, num_pages: int) -> bool:
        """Add pages. False, and nothing changed, when the pool has not enough."""
        assert self._pool is not None, "lease already released"
        granted = self._pool._take(num_pages, self)
        if granted is None:
            return False
        self.pages += granted
        return True

    def hand_on(self, namespace: str) -> "Lease":
        """Give the first page to a new lease of its own, without freeing it."""
        assert self._pool is not None, "lease already released"
        page, self.pages = self.pages[0], self.pages[1:]
        lease = Lease(self._pool, namespace, (page,))
        self._pool._holders[page] = lease
        return lease

    def drop_first(self) -> None:
        """Give the first page back."""
        assert self._pool is not None, "lease already released"
        self._pool._give_back(self.pages[:1], self)
        self.pages = self.pages[1:]

    def release(self) -> None:
        """Give all pages back. A second call is a bug."""
        assert self._pool is not None, "lease released twice"
        self._pool._give_back(self.pages, self)
        self.pages = ()
        self._pool = None


class PagePool:
    """A fixed number of pages. `allocate` returns None when there are too few: ordinary back-pressure."""

    __slots__ = ("_free", "_holders", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free: list[PageId] = [PageId(i) for i in range(num_pages - 1, -1, -1)]
        self._holders: dict[PageId, Lease] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_pages: int, namespace: str) -> Lease | None:
        """Lease `num_pages` pages under a namespace, or None (and nothing changed) when too few are free."""
        lease = Lease(self, namespace, ())
        return lease if lease.extend(num_pages) else None

    def _take(self, num_pages: int, lease: Lease) -> tuple[PageId, ...] | None:
        assert num_pages >= 0
        if num_pages > len(self._free):
            return None
        granted = tuple([self._free.pop() for _ in range(num_pages)])
        for page in granted:
            self._holders[page] = lease
        return granted

    def _give_back(self, pages: Iterable[PageId], lease: Lease) -> None:
        for page in pages:
            holder = self._holders.pop(page, None)
            assert holder is lease, f"page {page} is not held by this lease"
            self._free.append(page)

    def check_invariants(self) -> None:
        """Every page is free or held by exactly one lease that lists it."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        assert free.isdisjoint(self._holders), "a page is both free and held"
        assert len(free) + len(self._holders) == self.num_pages, "a page leaked"
        held: dict[int, int] = {}
        for page, lease in self._holders.items():
            assert not lease.is_released, f"page {page} is held by a released lease"
            assert page in lease.pages, f"page {page} is not listed by its lease"
            held[id(lease)] = held.get(id(lease), 0) + 1
        for lease in self._holders.values():
            assert held[id(lease)] == lease.num_pages, "a lease lists a page it does not hold"
