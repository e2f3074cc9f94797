"""Random operations on the pool and the residency against a model of sets (T19)."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loraplex.core import AdapterDigest, InvalidRequest
from loraplex.pool import AdapterResidency, Lease, PagePool

from ..idle import num_idle_pages

ADAPTER_PAGES = {AdapterDigest(name * 64): pages for name, pages in zip("abcdef", (0, 1, 2, 2, 3, 5), strict=True)}


class PoolMachine(RuleBasedStateMachine):
    """The model knows every page's namespace, every adapter's users and the order of use, and foretells each answer."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.residency = AdapterResidency(self.pool)
        self.owner: dict[int, str] = {}
        self.leases: dict[str, Lease] = {}
        self.released: list[Lease] = []
        self.users: dict[AdapterDigest, int] = {}  # sequences of resident adapters
        self.idle: list[AdapterDigest] = []  # least recently used first
        self.kept: set[AdapterDigest] = set()  # pinned by an operator, in the pool or not
        self.num_evictions = 0
        self.num_leases = 0

    # ------------------------------------------------------------------ the model
    @property
    def num_free(self) -> int:
        return self.pool.num_pages - len(self.owner)

    def own(self, pages: tuple[int, ...], namespace: str) -> None:
        for page in pages:
            assert 0 <= page < self.pool.num_pages
            assert page not in self.owner, f"page {page} of {self.owner.get(page)} was given to {namespace}"
            self.owner[page] = namespace

    def disown(self, namespace: str) -> None:
        self.owner = {page: owner for page, owner in self.owner.items() if owner != namespace}

    def forget(self, digest: AdapterDigest) -> None:
        self.idle.remove(digest)
        del self.users[digest]
        self.disown(f"adapter:{digest}")
        self.num_evictions += 1

    def expect_room(self, num_pages: int, keep: AdapterDigest | None = None) -> bool:
        """Evict in the model as `make_room` should; whether there is room."""
        spendable = [digest for digest in self.idle if digest != keep]
        if self.num_free + sum(ADAPTER_PAGES[digest] for digest in spendable) < num_pages:
            return False
        for digest in spendable:
            if self.num_free >= num_pages:
                break
            self.forget(digest)
        return True

    # ------------------------------------------------------------------ leases
    @rule(num_pages=st.integers(0, 6))
    def allocate(self, num_pages: int) -> None:
        namespace = f"kv:{self.num_leases}"
        self.num_leases += 1
        fits = num_pages <= self.num_free
        lease = self.pool.allocate(num_pages, namespace)
        assert (lease is not None) == fits
        if lease is not None:
            assert lease.num_pages == num_pages
            self.own(lease.pages, namespace)
            self.leases[namespace] = lease

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), num_pages=st.integers(0, 4))
    def extend(self, data: st.DataObject, num_pages: int) -> None:
        namespace = data.draw(st.sampled_from(sorted(self.leases)))
        lease, before = self.leases[namespace], self.leases[namespace].pages
        fits = num_pages <= self.num_free
        assert lease.extend(num_pages) == fits
        assert lease.pages[: len(before)] == before
        self.own(lease.pages[len(before) :], namespace)
        assert len(lease.pages) == len(before) + (num_pages if fits else 0)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        namespace = data.draw(st.sampled_from(sorted(self.leases)))
        lease = self.leases.pop(namespace)
        lease.release()
        self.disown(namespace)
        self.released.append(lease)

    @precondition(lambda self: self.released)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        with pytest.raises(AssertionError):
            data.draw(st.sampled_from(self.released)).release()

    # ------------------------------------------------------------------ adapters
    @rule(digest=st.sampled_from(sorted(ADAPTER_PAGES)))
    def acquire(self, digest: AdapterDigest) -> None:
        was_resident = digest in self.users
        fits = was_resident or self.expect_room(ADAPTER_PAGES[digest])
        acquired = self.residency.acquire(digest, ADAPTER_PAGES[digest])
        assert (acquired is not None) == fits
        if acquired is None:
            return
        assert acquired.is_cold == (not was_resident)
        assert len(acquired.pages) == ADAPTER_PAGES[digest]
        if acquired.is_cold:
            self.own(acquired.pages, f"adapter:{digest}")
        self.users[digest] = self.users.get(digest, 0) + 1
        self.idle = [other for other in self.idle if other != digest]

    @precondition(lambda self: any(self.users.values()))
    @rule(data=st.data())
    def release_adapter(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(sorted(digest for digest, count in self.users.items() if count)))
        self.residency.release(digest)
        self.users[digest] -= 1
        if not self.users[digest] and digest not in self.kept:
            self.idle.append(digest)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(self.idle))
        self.residency.evict(digest)
        self.forget(digest)

    @precondition(lambda self: any(self.users.values()))
    @rule(data=st.data())
    def evict_used(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(sorted(digest for digest, count in self.users.items() if count)))
        with pytest.raises(KeyError):
            self.residency.evict(digest)

    @rule(digest=st.sampled_from(sorted(ADAPTER_PAGES)))
    def pin(self, digest: AdapterDigest) -> None:
        pages = sum(ADAPTER_PAGES[other] for other in self.kept | {digest})
        if pages > self.pool.num_pages // 2 and digest not in self.kept:
            with pytest.raises(InvalidRequest, match="--kv-pages"):
                self.residency.pin(digest, ADAPTER_PAGES[digest])
            return
        self.residency.pin(digest, ADAPTER_PAGES[digest])
        self.kept.add(digest)
        self.idle = [other for other in self.idle if other != digest]

    @rule(digest=st.sampled_from(sorted(ADAPTER_PAGES)))
    def unpin(self, digest: AdapterDigest) -> None:
        self.residency.unpin(digest)
        if digest in self.kept and self.users.get(digest) == 0:
            self.idle.append(digest)
        self.kept.discard(digest)

    @precondition(lambda self: self.kept & self.users.keys())
    @rule(data=st.data())
    def evict_kept(self, data: st.DataObject) -> None:
        with pytest.raises(KeyError):
            self.residency.evict(data.draw(st.sampled_from(sorted(self.kept & self.users.keys()))))

    @rule(num_pages=st.integers(0, 13), keep=st.none() | st.sampled_from(sorted(ADAPTER_PAGES)))
    def make_room(self, num_pages: int, keep: AdapterDigest | None) -> None:
        foretold = self.residency.can_make_room(num_pages, keep)
        assert self.expect_room(num_pages, keep) == foretold
        assert self.residency.make_room(num_pages, keep) == foretold

    # ------------------------------------------------------------------ after each rule
    @invariant()
    def agrees_with_the_model(self) -> None:
        self.residency.check_invariants()
        owner = {page: name for name, lease in self.leases.items() for page in lease.pages}
        for digest in self.residency.resident:
            for page in self.residency.pages(digest):
                assert page not in owner, "a page is shared between namespaces"
                owner[page] = f"adapter:{digest}"
        assert owner == self.owner
        assert self.pool.num_free == self.num_free
        assert set(self.residency.resident) == set(self.users)
        assert all(self.residency.num_users(digest) == self.users.get(digest, 0) for digest in ADAPTER_PAGES)
        assert self.residency.num_pages == sum(ADAPTER_PAGES[digest] for digest in self.users)
        assert num_idle_pages(self.residency) == sum(ADAPTER_PAGES[digest] for digest in self.idle)
        assert self.residency.num_evictions == self.num_evictions
        assert set(self.residency.pinned) == self.kept
        assert self.residency.num_pinned_pages == sum(ADAPTER_PAGES[digest] for digest in self.kept)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for lease in self.leases.values():
            lease.release()
        for digest, count in self.users.items():
            for _ in range(count):
                self.residency.release(digest)
        for digest in self.kept:
            self.residency.unpin(digest)
        assert self.residency.make_room(self.pool.num_pages)
        assert self.pool.num_free == self.pool.num_pages, "a page leaked"
        self.residency.check_invariants()


class LongPoolMachine(PoolMachine):
    """The same, for longer."""


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

TestPoolLong = pytest.mark.slow(LongPoolMachine.TestCase)
TestPoolLong.settings = settings(max_examples=600, stateful_step_count=80, deadline=None)
