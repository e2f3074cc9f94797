"""Pages and leases."""

import pytest

from loraplex.core import PageId
from loraplex.pool import Lease, PagePool


def lease_of(pool: PagePool, num_pages: int, namespace: str = "kv") -> Lease:
    lease = pool.allocate(num_pages, namespace)
    assert lease is not None
    return lease


def test_new_pool_is_free() -> None:
    pool = PagePool(3)
    assert (pool.num_pages, pool.num_free) == (3, 3)
    pool.check_invariants()


def test_lease_holds_distinct_pages_of_the_pool() -> None:
    pool = PagePool(5)
    first, second = lease_of(pool, 2), lease_of(pool, 3)
    assert set(first.pages) | set(second.pages) == set(range(5))
    assert (first.num_pages, second.num_pages, pool.num_free) == (2, 3, 0)
    pool.check_invariants()


def test_full_pool_refuses_without_side_effects() -> None:
    pool = PagePool(3)
    lease = lease_of(pool, 2)
    pages = lease.pages
    assert pool.allocate(2, "kv") is None
    assert not lease.extend(2)
    assert (lease.pages, pool.num_free) == (pages, 1)
    pool.check_invariants()
    assert lease.extend(1), "the refusals took nothing"


def test_lease_larger_than_the_pool_is_refused() -> None:
    assert PagePool(2).allocate(3, "kv") is None


def test_extended_lease_keeps_the_order_of_its_pages() -> None:
    pool = PagePool(6)
    lease = lease_of(pool, 2)
    before = lease.pages
    lease_of(pool, 1)
    assert lease.extend(3)
    assert lease.pages[:2] == before
    assert lease.num_pages == len(set(lease.pages)) == 5
    pool.check_invariants()


def test_empty_lease_can_grow_and_end() -> None:
    pool = PagePool(1)
    lease = lease_of(pool, 0)
    assert lease.extend(0)
    assert lease.extend(1)
    lease.release()
    lease_of(pool, 0).release()
    assert pool.num_free == 1
    pool.check_invariants()


def test_released_pages_can_be_leased_again() -> None:
    pool = PagePool(2)
    lease = lease_of(pool, 2)
    lease.release()
    assert lease.is_released
    assert lease.pages == ()
    assert pool.num_free == 2
    pool.check_invariants()
    assert set(lease_of(pool, 2).pages) == {0, 1}


def test_second_release_raises_and_spares_the_next_holder() -> None:
    pool = PagePool(1)
    first = lease_of(pool, 1)
    first.release()
    second = lease_of(pool, 1)
    with pytest.raises(AssertionError, match="released twice"):
        first.release()
    with pytest.raises(AssertionError, match="already released"):
        first.extend(1)
    assert second.pages == (0,)
    pool.check_invariants()


def test_negative_lease_raises() -> None:
    with pytest.raises(AssertionError):
        PagePool(2).allocate(-1, "kv")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda pool, lease: pool._free.append(pool._free[0]), "twice in the free list"),
        (lambda pool, lease: pool._free.append(lease.pages[0]), "both free and held"),
        (lambda pool, lease: pool._free.pop(), "leaked"),
        (lambda pool, lease: setattr(lease, "pages", lease.pages[:1]), "not listed by its lease"),
        (lambda pool, lease: setattr(lease, "pages", (*lease.pages, PageId(3))), "does not hold"),
        (lambda pool, lease: setattr(lease, "_pool", None), "held by a released lease"),
    ],
    ids=["double free", "free and held", "leak", "unlisted", "foreign", "released holder"],
)
def test_check_invariants_finds(harm, message: str) -> None:  # type: ignore[no-untyped-def]
    pool = PagePool(4)
    lease = lease_of(pool, 2)
    harm(pool, lease)
    with pytest.raises(AssertionError, match=message):
        pool.check_invariants()
