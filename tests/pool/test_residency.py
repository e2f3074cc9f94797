"""Which adapters are in the pool."""

import pytest

from loraplex.core import AdapterDigest, InvalidRequest
from loraplex.pool import AdapterResidency, AdapterState, PagePool

from ..idle import num_idle_pages

A, B, C = (AdapterDigest(name * 64) for name in "abc")


def make_residency(num_pages: int = 6) -> tuple[PagePool, AdapterResidency]:
    pool = PagePool(num_pages)
    return pool, AdapterResidency(pool)


def make_idle(residency: AdapterResidency, *digests: AdapterDigest, num_pages: int = 2) -> None:
    """Adapters in the pool that nobody uses, the first least recently."""
    for digest in digests:
        assert residency.acquire(digest, num_pages) is not None
    for digest in digests:
        residency.release(digest)


def test_first_acquire_is_cold_and_later_ones_are_not() -> None:
    pool, residency = make_residency()
    first, second = residency.acquire(A, 2), residency.acquire(A, 2)
    assert first is not None
    assert second is not None
    assert (first.is_cold, second.is_cold) == (True, False)
    assert first.pages == second.pages == residency.pages(A)
    assert (residency.num_users(A), pool.num_free, residency.num_pages) == (2, 4, 2)
    residency.check_invariants()


def test_adapter_is_idle_only_after_its_last_release() -> None:
    _, residency = make_residency()
    residency.acquire(A, 2)
    residency.acquire(A, 2)
    residency.release(A)
    assert num_idle_pages(residency) == 0
    residency.release(A)
    assert num_idle_pages(residency) == 2
    residency.check_invariants()


def test_idle_adapter_stays_and_is_warm_again() -> None:
    _, residency = make_residency()
    make_idle(residency, A)
    pages = residency.pages(A)
    again = residency.acquire(A, 2)
    assert again is not None
    assert (again.is_cold, again.pages) == (False, pages)
    assert num_idle_pages(residency) == 0
    residency.check_invariants()


def test_evicted_adapter_is_cold_again() -> None:
    _, residency = make_residency()
    make_idle(residency, A)
    residency.evict(A)
    assert not residency.is_resident(A)
    again = residency.acquire(A, 2)
    assert again is not None
    assert again.is_cold


def test_least_recently_used_goes_first() -> None:
    _, residency = make_residency()
    make_idle(residency, A, B, C)
    residency.acquire(A, 2)
    residency.release(A)  # now B is the oldest
    assert residency.make_room(1)
    assert residency.resident == (A, C)
    assert residency.make_room(4)
    assert residency.resident == (A,)
    assert residency.num_evictions == 2
    residency.check_invariants()


def test_no_more_is_evicted_than_needed() -> None:
    pool, residency = make_residency(num_pages=7)
    make_idle(residency, A, B, C)
    assert residency.make_room(1)
    assert residency.num_evictions == 0
    assert residency.make_room(2)
    assert residency.resident == (B, C)
    assert pool.num_free == 3


def test_pinned_adapter_is_never_evicted() -> None:
    pool, residency = make_residency()
    residency.acquire(A, 2)
    make_idle(residency, B, C)
    assert not residency.make_room(5)
    assert residency.resident == (A, B, C), "a refusal evicts nothing"
    assert residency.make_room(4)
    assert residency.resident == (A,)
    assert pool.num_free == 4
    with pytest.raises(KeyError):
        residency.evict(A)
    residency.check_invariants()


def test_kept_adapter_is_spared() -> None:
    _, residency = make_residency()
    make_idle(residency, A, B, C)
    assert residency.can_make_room(4, keep=A)
    assert not residency.can_make_room(5, keep=A)
    assert not residency.make_room(5, keep=A)
    assert residency.resident == (A, B, C)
    assert residency.make_room(4, keep=A)
    assert residency.resident == (A,)
    residency.check_invariants()


@pytest.mark.parametrize("state", ["absent", "pinned"])
def test_keeping_what_is_not_idle_changes_nothing(state: str) -> None:
    _, residency = make_residency()
    if state == "pinned":
        residency.acquire(A, 2)
    make_idle(residency, B)
    free_or_idle = 6 if state == "absent" else 4
    assert residency.can_make_room(free_or_idle, keep=A)
    assert not residency.can_make_room(free_or_idle + 1, keep=A)


def test_can_make_room_evicts_nothing() -> None:
    _, residency = make_residency()
    make_idle(residency, A, B, C)
    assert residency.can_make_room(6)
    assert residency.resident == (A, B, C)


def test_acquire_evicts_idle_ones_for_room() -> None:
    _, residency = make_residency()
    make_idle(residency, A, B, C)
    acquired = residency.acquire(AdapterDigest("d" * 64), 3)
    assert acquired is not None
    assert acquired.is_cold
    assert residency.resident == (C, AdapterDigest("d" * 64))
    residency.check_invariants()


def test_acquire_without_room_changes_nothing() -> None:
    pool, residency = make_residency()
    residency.acquire(A, 3)
    make_idle(residency, B)
    assert residency.acquire(C, 4) is None
    assert residency.resident == (A, B)
    assert (pool.num_free, residency.num_users(C), residency.num_evictions) == (1, 0, 0)
    residency.check_invariants()


def test_release_without_acquire_raises() -> None:
    _, residency = make_residency()
    make_idle(residency, A)
    with pytest.raises(AssertionError, match="more often"):
        residency.release(A)
    with pytest.raises(KeyError):
        residency.release(B)
    residency.check_invariants()


def test_adapters_and_kv_share_one_budget() -> None:
    pool, residency = make_residency()
    kv = pool.allocate(5, "kv:a")
    assert kv is not None
    assert residency.acquire(A, 2) is None
    kv.release()
    assert residency.acquire(A, 2) is not None
    assert pool.allocate(5, "kv:a") is None


def test_adapter_of_no_pages_is_served() -> None:
    _, residency = make_residency(num_pages=1)
    acquired = residency.acquire(A, 0)
    assert acquired is not None
    assert acquired.pages == ()
    residency.release(A)
    residency.check_invariants()


# ---------------------------------------------------------------------- pins
def test_pinned_adapter_stays_and_goes_like_others_when_it_is_unpinned() -> None:
    pool = PagePool(8)
    residency = AdapterResidency(pool)
    residency.pin(A, 2)
    assert residency.state(A) is AdapterState.ABSENT, "a pin alone brings nothing"
    residency.acquire(A, 2)
    residency.release(A)
    assert not residency.make_room(7)
    with pytest.raises(KeyError):
        residency.evict(A)
    assert residency.make_room(6)
    residency.unpin(A)
    assert residency.make_room(8)
    assert residency.resident == ()
    residency.unpin(A)
    residency.check_invariants()


def test_pin_of_an_idle_and_of_a_used_adapter() -> None:
    residency = AdapterResidency(PagePool(8))
    for digest in (A, B):
        residency.acquire(digest, 2)
    residency.release(A)
    for digest in (A, B, A):
        residency.pin(digest, 2)
    assert (residency.num_pinned_pages, num_idle_pages(residency), residency.pinned) == (4, 0, (A, B))
    residency.unpin(B)
    assert num_idle_pages(residency) == 0, "it is in use"
    residency.release(B)
    assert num_idle_pages(residency) == 2
    residency.check_invariants()


def test_pins_beyond_half_of_the_pool_are_refused() -> None:
    residency = AdapterResidency(PagePool(9))
    residency.pin(A, 3)
    with pytest.raises(InvalidRequest, match=r"takes 2 pages and 3 are pinned.* 4 of 9 pages \(--kv-pages, --memory\)"):
        residency.pin(B, 2)
    residency.pin(C, 1)
    assert (residency.pinned, residency.pinned_pages(B), residency.num_pinned_pages) == ((A, C), 0, 4)


def test_pin_of_an_adapter_that_is_loading_holds_when_it_is_ready_and_when_it_failed() -> None:
    residency = AdapterResidency(PagePool(8))
    assert residency.begin_load(A, 2, (), 0.0)
    residency.pin(A, 2)
    residency.fail(A, 1.0)
    residency.check_invariants()
    assert residency.begin_load(A, 2, (), 1.0)
    residency.ready(A)
    assert residency.is_unused(A)
    assert num_idle_pages(residency) == 0
    residency.check_invariants()
