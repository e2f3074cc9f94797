"""States of an adapter in the pool, and what is evicted first."""

import itertools
import random
from collections import OrderedDict

import pytest

from loraplex.core import AdapterDigest
from loraplex.core.reloads import MAX_EVICTED, OFTEN, SOON_S, Reloads
from loraplex.pool import AdapterResidency, AdapterState, EvictionReason, PagePool, Placement, ReloadCost
from loraplex.pool.adapter_state import AdapterEvent, next_state

A, B, C, D = (AdapterDigest(name * 64) for name in "abcd")
S, E = AdapterState, AdapterEvent
LIFE = {
    (S.ABSENT, E.BEGIN): S.LOADING,
    (S.ABSENT, E.PLACED): S.RESIDENT,
    (S.LOADING, E.READY): S.RESIDENT,
    (S.LOADING, E.FAIL): S.FAILED,
    (S.FAILED, E.RETRY): S.ABSENT,
    (S.RESIDENT, E.EVICT): S.ABSENT,
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(S, E)))
def test_every_transition_is_allowed_or_a_bug(state: AdapterState, event: AdapterEvent) -> None:
    if (state, event) in LIFE:
        assert next_state(state, event) is LIFE[state, event]
    else:
        with pytest.raises(AssertionError, match=f"is {state.value} cannot {event.value}"):
            next_state(state, event)


def make_residency(num_pages: int = 6, cost: ReloadCost | None = None) -> tuple[PagePool, AdapterResidency]:
    pool = PagePool(num_pages)
    return pool, AdapterResidency(pool, cost=cost)


def test_loading_adapter_holds_its_pages_and_is_not_resident() -> None:
    pool, residency = make_residency()
    assert residency.begin_load(A, 4, (), 0.0)
    assert (pool.num_free, residency.num_loading_pages, residency.num_pages) == (2, 4, 4)
    assert (residency.resident, residency.loading) == ((), (A,))
    assert not residency.make_room(3), "its pages are being written"
    with pytest.raises(AssertionError, match="acquired while it is loaded"):
        residency.acquire(A, 4)
    with pytest.raises(KeyError):
        residency.evict(A)
    residency.check_invariants()
    pages = residency.pages(A)
    residency.ready(A)
    acquired = residency.acquire(A, 4)
    assert acquired is not None
    assert (acquired.pages, acquired.is_cold) == (pages, False)
    residency.check_invariants()


def test_load_without_room_changes_nothing_and_spares_what_is_kept() -> None:
    pool, residency = make_residency()
    residency.acquire(A, 3)
    residency.release(A)
    assert not residency.begin_load(B, 4, (A,), 0.0)
    assert (residency.resident, pool.num_free, residency.state(B)) == ((A,), 3, S.ABSENT)
    assert residency.begin_load(B, 4, (), 0.0)
    assert residency.resident == ()
    assert residency.evictions == {EvictionReason.LOAD: 1}
    residency.check_invariants()


def test_failed_load_frees_its_pages_and_is_absent_again_in_time() -> None:
    pool, residency = make_residency()
    residency.begin_load(A, 4, (), 0.0)
    residency.fail(A, until=5.0)
    assert pool.num_free == 6
    assert [residency.state(A, now) for now in (0.0, 4.9, 5.0)] == [S.FAILED, S.FAILED, S.ABSENT]
    assert len(residency.failed(4.9)) == 1
    with pytest.raises(AssertionError, match="failed cannot begin"):
        residency.begin_load(A, 4, (), 4.0)
    assert residency.begin_load(A, 4, (), 5.0)
    assert residency.failed(0.0) == ()
    residency.check_invariants()


def test_evictions_are_counted_by_what_the_pages_were_wanted_for() -> None:
    _, residency = make_residency()
    for digest in (A, B, C):
        residency.acquire(digest, 2)
        residency.release(digest)
    residency.make_room(1, reason=EvictionReason.GROWTH)
    residency.make_room(4)
    residency.evict(C)
    assert residency.evictions == {EvictionReason.GROWTH: 1, EvictionReason.START: 1, EvictionReason.RETIRED: 1}
    assert residency.num_evictions == 3


def use(residency: AdapterResidency, digest: AdapterDigest, now: float) -> None:
    residency.acquire(digest, 2, now)
    residency.release(digest)


@pytest.mark.parametrize(("pause_s", "survivor"), [(1.0, A), (6000.0, B)])
def test_popular_adapter_outlives_a_recent_one_until_its_popularity_fades(
    pause_s: float, survivor: AdapterDigest
) -> None:
    _, residency = make_residency(4, ReloadCost(page_s=1.0))
    for now in (0.0, 1.0, 2.0, 2.0 + pause_s):
        use(residency, A, now)
    for _ in range(2):
        use(residency, B, 2.0 + pause_s)
    assert residency.make_room(2)
    assert residency.resident == (survivor,)


def test_small_adapter_is_worth_more_a_page_where_each_load_costs_a_fixed_time() -> None:
    _, residency = make_residency(6, ReloadCost(fixed_s=1.0, page_s=0.1))
    for digest, num_pages in ((A, 1), (B, 5)):
        residency.acquire(digest, num_pages)
        residency.release(digest)
    assert residency.make_room(1)
    assert residency.resident == (A,), "although B was used last"


def test_what_is_not_used_sinks_below_newcomers() -> None:
    pool, residency = make_residency(4, ReloadCost(page_s=1.0))
    for _ in range(4):
        residency.acquire(A, 2)
        residency.release(A)
    rounds = 0
    while residency.is_resident(A):
        for digest in (B, C):
            residency.acquire(digest, 2)
            residency.release(digest)
        rounds += 1
        assert rounds < 10, "one that was popular long ago stays for ever"
    assert rounds > 1
    assert pool.num_free == 0


# ---------------------------------------------------------------------- thrash
def cycle(num_pages: int, rounds: int) -> AdapterResidency:
    """Three adapters of two pages, asked for in turn."""
    _, residency = make_residency(num_pages)
    for _ in range(rounds):
        for digest in (A, B, C):
            use(residency, digest, 0.0)
    return residency


def test_reloads_are_counted_with_the_pages_that_would_have_spared_them() -> None:
    residency = cycle(4, 5)
    assert residency.reloads.count == 12, "all but the first three loads"
    missing = residency.reloads.missing(0.0)
    assert missing == 2
    assert cycle(4 + missing, 5).reloads.count == 0


def test_a_retired_adapter_that_is_added_again_is_no_reload() -> None:
    _, residency = make_residency()
    for reason in (None, EvictionReason.HOST):
        use(residency, A, 0.0)
        residency.evict(A, reason)
    use(residency, A, 0.0)
    assert residency.evictions == {EvictionReason.RETIRED: 1, EvictionReason.HOST: 1}
    assert (residency.reloads.count, residency.reloads.missing(0.0)) == (0, 0)


def test_thrash_is_told_once_a_minute_and_forgotten_after_one() -> None:
    reloads, told = Reloads(), []
    for number in range(OFTEN + 10):
        reloads.evicted(A, 3)
        reloads.loaded(A, 0.1 * number)
        told.append(reloads.thrash(0.1 * number))
    assert told == [0] * (OFTEN - 1) + [OFTEN] + [0] * 10
    assert reloads.missing(5.0) == 3
    assert (reloads.missing(100.0), reloads.thrash(100.0)) == (0, 0)
    assert reloads.count == OFTEN + 10


def test_what_comes_back_long_after_is_no_reload() -> None:
    reloads = Reloads()
    reloads.loaded(B, 0.0)
    reloads.evicted(A, 3)
    reloads.loaded(A, SOON_S + 1.0)
    assert (reloads.count, reloads.missing(SOON_S + 1.0)) == (0, 0)
    reloads.evicted(A, 3)
    reloads.loaded(A, 2.0 * SOON_S)
    assert (reloads.count, reloads.missing(2.0 * SOON_S)) == (1, 3)


def misses_again(trace: list[int], capacity: int, reloads: Reloads | None = None) -> int:
    """Misses of the second half of a trace, of what was asked for before: an LRU of things of size 1."""
    cached, seen, count = OrderedDict[int, None](), set[int](), 0
    for place, item in enumerate(trace):
        if item in cached:
            cached.move_to_end(item)
            continue
        count += place >= len(trace) // 2 and item in seen
        seen.add(item)
        if reloads is not None:
            reloads.loaded(AdapterDigest(str(item)), 0.01 * place)
        if len(cached) == capacity:
            oldest, _ = cached.popitem(last=False)
            if reloads is not None:
                reloads.evicted(AdapterDigest(str(oldest)), 1)
        cached[item] = None
    return count


@pytest.mark.parametrize(
    ("num", "capacity", "alpha"), [(400, 100, 1.0), (400, 100, 0.7), (200, 160, 1.0), (60, 50, 0.5), (10_000, 500, 0.8)]
)
def test_the_figure_is_what_an_lru_cache_lacks_and_not_much_more(num: int, capacity: int, alpha: float) -> None:
    rng, reloads = random.Random(num), Reloads()
    trace = rng.choices(range(num), [(k + 1) ** -alpha for k in range(num)], k=max(20_000, 6 * num))
    before = misses_again(trace, capacity, reloads)
    missing = reloads.missing(0.01 * len(trace))
    assert 0 < missing <= num - capacity
    assert misses_again(trace, capacity + missing) <= 0.15 * before
    assert misses_again(trace, capacity + int(0.8 * missing)) > 0.1 * before


def test_distances_are_those_of_all_that_is_still_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a plain list, through many more evictions than are remembered."""
    monkeypatch.setattr("loraplex.core.reloads.MAX_EVICTED", 12)
    monkeypatch.setattr("loraplex.core.reloads.SOON_S", float("inf"))
    rng, reloads, gone = random.Random(4), Reloads(), list[tuple[str | None, int]]()
    for number in range(3000):
        digest, size = AdapterDigest(str(rng.randrange(20))), rng.randint(1, 9)
        what = rng.choice(("evicted", "evicted", "also", "returned", "loaded"))
        if what == "evicted":
            reloads.evicted(digest, size)
            gone = [one for one in gone if one[0] != digest] + [(digest, size)]
        elif what == "also":
            reloads.also_evicted(size)
            if gone and gone[-1][0] is None:
                size += gone.pop()[1]
            gone.append((None, size))
        elif what == "returned":
            reloads.returned(digest)
            gone = [one for one in gone if one[0] != digest]
        else:
            known = [name for name, _ in gone]
            reloads.loaded(digest, 100.0 * number)
            wanted = sum(size for _, size in gone[known.index(digest) :]) if digest in known else 0
            assert reloads.missing(100.0 * number, share=1.0) == wanted
            gone = [one for one in gone if one[0] != digest]
        gone = gone[-12:]


def test_memory_of_evicted_adapters_is_bounded() -> None:
    reloads = Reloads()
    for number in range(3 * MAX_EVICTED):
        reloads.evicted(AdapterDigest(str(number)), 1)
    reloads.loaded(AdapterDigest("0"), 0.0)
    assert reloads.count == 0
    reloads.loaded(AdapterDigest(str(3 * MAX_EVICTED - 1)), 0.0)
    assert (reloads.count, reloads.missing(0.0), len(reloads._evicted)) == (1, 1, MAX_EVICTED - 1)


# ---------------------------------------------------------------------- what is told of them
def test_placements_tell_state_use_and_popularity_of_every_adapter() -> None:
    residency = AdapterResidency(PagePool(12))
    for digest in (A, B, C):
        assert residency.begin_load(digest, 2, (), 0.0)
    residency.ready(A)
    residency.fail(C, until=9.0)
    residency.acquire(A, 2, 1.0)
    residency.acquire(A, 2, 61.0)
    residency.release(A)
    found = residency.placements(121.0)
    assert found == {
        A: Placement(AdapterState.RESIDENT, 2, 1, pytest.approx(0.75), 61.0),
        B: Placement(AdapterState.LOADING, 2, 0, 0.0, None),
    }
    assert residency.most_popular(5, 121.0) == [(A, pytest.approx(0.75))]
    assert residency.placements(8.0)[C] == Placement(AdapterState.FAILED, 0, 0, 0.0, None, 9.0)
    assert (len(residency.failed(8.0)), residency.failed(9.0)) == (1, ())
    assert residency.begin_load(D, 2, (), 10.0)
    assert residency.placements(8.0).keys() == {A, B, D}, "failures of the past are forgotten"
    residency.check_invariants()
