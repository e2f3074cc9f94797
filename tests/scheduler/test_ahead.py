"""Loads beside steps and shared prefixes under random pressure (T19): every page, every answer, every end."""

import random
from dataclasses import replace
from itertools import chain

import pytest

from loraplex.core import FinishReason
from loraplex.pool import AdapterState
from loraplex.scheduler import Calibrator, CostModel, WaitReason
from loraplex.scheduler.admission import Admission

from ..idle import num_idle_pages
from .world import World, digest_of, make_request, make_world, random_request

A, B, C = digest_of(0), digest_of(1), digest_of(2)
LONG = {"max_tokens": 20, "ignore_eos": True}


# ---------------------------------------------------------------------- single steps
def test_step_goes_on_while_an_adapter_is_loaded() -> None:
    world = make_world(load_steps=3)
    (runs,) = world.add(make_request(4, None, **LONG))
    world.step()
    (waits,) = world.add(make_request(4, 0, max_tokens=1))
    for _ in range(3):
        plan = world.step()
        assert plan is not None
        assert [chunk.seq_id for chunk in plan.chunks] == [runs.seq_id]
        assert world.scheduler.residency.state(A) is AdapterState.LOADING
        assert (waits.wait, waits.is_cold) == (WaitReason.LOAD, True)
    plan = world.step()
    assert plan is not None
    assert {chunk.seq_id for chunk in plan.chunks} == {runs.seq_id, waits.seq_id}


def test_load_begins_when_the_request_is_queued_not_when_a_seat_is_free() -> None:
    world = make_world(max_num_seqs=1, load_steps=0)
    world.add(make_request(4, None, **LONG))
    world.step()
    (waits,) = world.add(make_request(4, 0, max_tokens=1))
    world.step()
    assert world.scheduler.residency.is_resident(A)
    assert waits.wait is WaitReason.BUDGET


def test_request_behind_one_whose_adapter_is_loaded_starts_first() -> None:
    world = make_world(load_steps=5)
    world.add(make_request(4, 0, max_tokens=1))
    (second,) = world.add(make_request(4, None, max_tokens=1))
    world.step()
    assert second.seq_id in world.ended


def test_loads_on_their_way_are_bounded_and_keep_the_order() -> None:
    world = make_world(load_steps=2, max_load_pages=4)
    for number in (2, 1, 0):  # 3, 2 and 1 pages
        world.add(make_request(2, number, max_tokens=1))
    begun = []
    for _ in range(9):
        before = set(world.loading)
        world.step()
        begun += [sorted(set(world.loading) - before)] if set(world.loading) - before else []
        assert world.scheduler.residency.num_loading_pages <= 4
    assert begun == [[C], sorted([A, B])], "the third waits for the second, which waits for the first"


def test_a_load_larger_than_the_bound_goes_alone() -> None:
    world = make_world(load_steps=0, max_load_pages=1)
    (seq,) = world.add(make_request(2, 2, max_tokens=1))
    world.step()
    assert seq.seq_id in world.ended


def test_an_adapter_that_one_in_front_waits_for_is_not_evicted_for_those_behind() -> None:
    world = make_world(num_pages=9, max_num_seqs=2, load_steps=0)
    for _ in range(2):  # two pages each, and no more later
        world.add(make_request(5, None, None, max_tokens=3, ignore_eos=True))
    world.step()
    world.add(make_request(4, 0, None, max_tokens=1))  # loaded, waits for a seat
    world.step()
    assert world.scheduler.residency.is_resident(A)
    assert world.scheduler.pool.num_free == 4
    world.add(make_request(4, 2, None, max_tokens=1))  # with two pages of KV, three more would need A's
    assert world.scheduler.start_loads(world.now) == ()
    assert world.scheduler.residency.is_resident(A)
    world.drain()


def test_failed_load_ends_only_its_own_and_frees_its_pages() -> None:
    world = make_world(load_steps=1, failure_share=1.0)
    (good,) = world.add(make_request(4, None, **LONG))
    (bad,) = world.add(make_request(4, 0, max_tokens=2))
    free = world.scheduler.pool.num_free
    world.step()
    world.step()
    assert world.failed == {bad.seq_id}
    assert good.finish_reason is None
    assert world.scheduler.residency.state(A, world.now) is AdapterState.FAILED
    assert len(world.scheduler.residency.failed(world.now)) == 1
    assert world.scheduler.residency.num_pages == 0
    assert world.scheduler.pool.num_free + len(good.pages) + world.scheduler.cache.num_pages >= free
    world.failure_share = 0.0
    (again,) = world.add(make_request(4, 0, max_tokens=2))
    world.step()
    assert world.loading == {}, "it backs off"
    world.now += 2.0
    world.drain()
    assert again.seq_id in world.ended


def test_request_whose_adapter_has_no_room_is_not_overtaken_for_ever() -> None:
    """Small requests of the base arrive without end; a large adapter must still find its pages."""
    world = make_world(num_pages=9, load_steps=1, adapter_patience_s=0.5, max_num_seqs=6)
    for _ in range(4):
        world.add(make_request(6, None, None, **LONG))
    world.step()
    (large,) = world.add(make_request(12, 2, max_tokens=1))
    for _ in range(120):
        if large.seq_id in world.ended:
            break
        if len(world.scheduler.sequences) < 8:
            world.add(make_request(3, None, None, max_tokens=8, ignore_eos=True))
        world.step()
    assert large.seq_id in world.ended


def test_loading_adapter_is_never_evicted_and_may_lose_its_request() -> None:
    world = make_world(num_pages=8, load_steps=4)
    (seq,) = world.add(make_request(4, 2, max_tokens=1))
    world.step()
    world.scheduler.finish(seq.seq_id, FinishReason.ABORT)
    assert not world.scheduler.retire_adapter(C), "its pages are being written"
    world.add(make_request(20, None, max_tokens=4, ignore_eos=True))
    world.drain()
    assert world.scheduler.retire_adapter(C)
    assert world.scheduler.residency.num_pages == 0


# ---------------------------------------------------------------------- random walks
def walk(seed: int, num_steps: int, **settings: object) -> World:
    rng = random.Random(seed)
    world = make_world(
        seed,
        num_pages=rng.randint(13, 26),
        load_steps=rng.randint(0, 3),
        failure_share=0.1,
        max_loras=rng.randint(1, 3),
        max_num_seqs=rng.randint(2, 6),
        max_load_pages=rng.choice((None, 2, 5)),
        aging_s=3.0,
        **settings,
    )
    for _ in range(num_steps):
        if len(world.scheduler.sequences) < 14 and rng.random() < 0.6:
            world.add(random_request(rng, 7))
        if world.scheduler.sequences and rng.random() < 0.06:
            world.scheduler.finish(
                rng.choice(list(world.scheduler.sequences)), FinishReason.ABORT, keep_prefix=rng.random() < 0.5
            )
            world.scheduler.check_invariants()
        if rng.random() < 0.03:
            digest = digest_of(rng.randrange(7))
            if not world.scheduler.uses_adapter(digest):
                world.scheduler.retire_adapter(digest)
        world.step()
    world.drain()
    return world


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(8))
def test_walk_ends_everything_and_leaks_nothing(seed: int, depth: int) -> None:
    """Also where a step is planned before the tokens of the one before are known, as on CUDA."""
    world = walk(seed, 700, depth=depth)
    scheduler = world.scheduler
    assert len(world.ended) > 60
    assert world.num_loads > 20
    assert world.num_failures > 0
    assert scheduler.residency.num_evictions > 0
    assert scheduler.starts.num_cached_tokens > 0
    idle = num_idle_pages(scheduler.residency) + scheduler.cache.num_pages
    assert scheduler.pool.num_free + idle == scheduler.pool.num_pages
    assert scheduler.residency.make_room(scheduler.pool.num_pages)
    assert scheduler.cache.num_pages == 0
    assert scheduler.pool.num_free == scheduler.pool.num_pages


def test_walks_meet_preemption() -> None:
    worlds = [walk(seed, 150) for seed in range(20, 26)]
    assert sum(world.scheduler.num_preemptions for world in worlds) > 0


def test_same_seed_gives_the_same_trace() -> None:
    assert walk(3, 150).trace == walk(3, 150).trace


def walk_with_targets(seed: int, num_steps: int, patience_s: float) -> World:
    """Adapters of 8 to 24 ranks at a millisecond each, under a target that moves between steps."""
    rng = random.Random(seed)
    settings = {"max_num_seqs": 8, "max_loras": rng.choice((3, 8)), "aging_s": 3.0, "adapter_patience_s": patience_s}
    world = make_world(seed, num_pages=40, load_steps=1, **settings)
    scheduler = world.scheduler
    scheduler.costs = Calibrator(CostModel(1.0, 0.0, 0.0, 1.0), is_measured=True)
    for _ in range(num_steps):
        scheduler.config = replace(scheduler.config, tpot_target_ms=rng.choice((None, 20.0, 30.0, 50.0)))
        if len(scheduler.sequences) < 20 and rng.random() < 0.7:
            world.add(random_request(rng, 7))
        if scheduler.sequences and rng.random() < 0.05:
            scheduler.finish(rng.choice(list(scheduler.sequences)), FinishReason.ABORT)
        world.step()
        world.waits.append([seq.wait for seq in scheduler.waiting])
    world.drain()
    return world


@pytest.mark.parametrize("patience_s", [0.0, 100.0])
@pytest.mark.parametrize("seed", range(6))
def test_a_pass_that_is_left_out_would_have_started_nobody(
    seed: int, patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some other patience may begin a few steps later for one whose reason to wait changes meanwhile."""
    short = walk_with_targets(seed, 300, patience_s)
    monkeypatch.setattr(Admission, "_is_still_stuck", lambda self, turn: False)
    whole = walk_with_targets(seed, 300, patience_s)
    assert short.trace == whole.trace
    assert WaitReason.RANKS in chain.from_iterable(whole.waits)


def test_cache_changes_no_answer() -> None:
    """`World` checks each answer against the request alone, so the walks must only differ in work."""
    cached, plain = walk(5, 200), walk(5, 200, prefix_caching=False)
    assert cached.scheduler.starts.num_cached_tokens > 0
    assert plain.scheduler.starts.num_cached_tokens == 0
    assert plain.scheduler.cache.num_pages == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1030))
def test_long_walk(seed: int) -> None:
    walk(seed, 3000, depth=seed % 2)


@pytest.mark.slow
def test_hundred_thousand_requests_get_their_own_tokens() -> None:
    """Churn with cancellations, evictions, retired adapters and failed loads (T20, T33): no wrong token, no leak."""
    num_requests, num_ended, seed = 0, 0, 5000
    while num_requests < 100_000:
        world = walk(seed, 3000, depth=seed % 2)
        num_requests += len(world.requests)
        num_ended += len(world.ended)
        scheduler = world.scheduler
        assert scheduler.residency.make_room(scheduler.pool.num_pages)
        assert scheduler.pool.num_free == scheduler.pool.num_pages
        seed += 1
    assert num_ended > 0.6 * num_requests
