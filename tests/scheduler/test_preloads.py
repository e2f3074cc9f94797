"""Adapters that come without a request: pins, which stay, and preloads, which are in nobody's way."""

import random
from typing import Any

import pytest

from loraplex.core import ContextTooLong, FinishReason, InvalidRequest, Overloaded
from loraplex.pool import AdapterState

from .world import World, adapter_pages, digest_of, make_request, make_world, random_request

A, B, C, D = (digest_of(number) for number in range(4))  # 1, 2, 3 and 1 pages
LONG = {"max_tokens": 20, "ignore_eos": True}


def pin(world: World, *digests: Any) -> None:
    for digest in digests:
        world.scheduler.pin_adapter(digest, adapter_pages(digest))
        world.scheduler.check_invariants()


def preload(world: World, *digests: Any, only_free: bool = False) -> None:
    for digest in digests:
        world.scheduler.preload_adapter(digest, adapter_pages(digest), only_free=only_free)
        world.scheduler.check_invariants()


def fill(world: World, num_requests: int, prompt: int, max_tokens: int = 1) -> None:
    """Requests of the base."""
    for _ in range(num_requests):
        world.add(make_request(prompt, None, None, max_tokens=max_tokens, ignore_eos=True))


# ---------------------------------------------------------------------- pins
def test_pinned_adapter_is_loaded_at_once_and_never_evicted() -> None:
    world = make_world(num_pages=12, load_steps=0)
    pin(world, B)
    world.step()
    assert world.scheduler.residency.is_resident(B)
    for number in (2, 5, 8, 2):  # three pages each
        world.add(make_request(16, number, max_tokens=1))
        world.drain()
        assert world.scheduler.residency.is_resident(B)
    assert world.scheduler.residency.num_evictions > 0
    assert not world.scheduler.residency.can_make_room(12)
    world.scheduler.unpin_adapter(B)
    assert world.scheduler.residency.can_make_room(12)


def test_pinned_adapter_finds_its_pages_while_requests_arrive_without_end() -> None:
    world = make_world(num_pages=10, load_steps=1, max_num_seqs=6)
    fill(world, 6, prompt=4, max_tokens=8)
    world.step()
    pin(world, C)
    for _ in range(40):
        if world.scheduler.residency.is_resident(C):
            break
        if len(world.scheduler.sequences) < 9:
            fill(world, 1, prompt=3, max_tokens=8)
        world.step()
    assert world.scheduler.residency.is_resident(C)
    assert len(world.scheduler.sequences) > 4


def test_failed_load_of_a_pinned_adapter_is_tried_again() -> None:
    world = make_world(load_steps=0, failure_share=1.0)
    pin(world, A)
    world.step()
    assert world.num_failures == 1
    world.step()
    assert (world.num_loads, world.scheduler.residency.state(A, world.now)) == (1, AdapterState.FAILED)
    world.failure_share, world.now = 0.0, 5.0
    world.step()
    assert world.scheduler.residency.is_resident(A)
    assert world.num_loads == 2


def test_retired_adapter_is_pinned_no_more() -> None:
    world = make_world(load_steps=0)
    pin(world, A, B)
    world.step()
    assert world.scheduler.retire_adapter(A)
    world.scheduler.check_invariants()
    assert world.scheduler.residency.pinned == (B,)
    assert not world.scheduler.residency.is_placed(A)


def test_pin_of_more_than_half_of_the_pool_is_refused_and_changes_nothing() -> None:
    world = make_world(num_pages=8)
    pin(world, C)
    with pytest.raises(InvalidRequest, match="takes 2 pages and 3 are pinned"):
        pin(world, B)
    world.step()
    assert (world.scheduler.residency.pinned, set(world.loading)) == ((C,), {C})


def test_pin_waits_for_a_request_that_could_not_end_beside_it() -> None:
    world = make_world(num_pages=12)
    (large,) = world.add(make_request(4, None, max_tokens=36, ignore_eos=True))  # ten pages
    pin(world, D)
    with pytest.raises(Overloaded, match=r"3 pages would be pinned.* needs 10 of the pool's 12"):
        pin(world, B)
    world.scheduler.finish(large.seq_id, FinishReason.ABORT)
    pin(world, B)


def test_request_that_cannot_end_beside_what_is_pinned_is_refused() -> None:
    world = make_world(num_pages=12)
    pin(world, C)
    with pytest.raises(ContextTooLong, match="and 3 for pinned ones; the pool of 12 pages holds 36"):
        world.add(make_request(4, None, max_tokens=36))
    (seq,) = world.add(make_request(4, 2, max_tokens=32))  # its own adapter's pages count once
    assert seq.max_len == 36


def test_without_loads_ahead_a_pinned_adapter_comes_with_its_first_request() -> None:
    world = make_world(load_ahead=False)
    pin(world, A)
    preload(world, B)
    assert world.scheduler.start_loads(0.0) == ()
    assert world.scheduler.preloads.num_missing_pages == 0
    assert not world.scheduler.preloads.can_begin


# ---------------------------------------------------------------------- preloads
def test_preloads_come_one_at_a_time_in_order() -> None:
    world = make_world(load_steps=1)
    preload(world, C, A, B)
    seen = []
    for _ in range(9):
        world.step()
        seen += [set(world.loading)] if world.loading and set(world.loading) not in seen else []
    assert seen == [{C}, {A}, {B}]
    assert set(world.scheduler.residency.resident) == {A, B, C}
    (seq,) = world.add(make_request(4, 2, max_tokens=1))
    world.step()
    assert (seq.is_cold, seq.seq_id in world.ended) == (False, True)


def test_preload_begins_only_while_nothing_waits() -> None:
    world = make_world(max_num_seqs=1, load_steps=0)
    fill(world, 2, prompt=4, max_tokens=4)
    world.step()
    preload(world, A)
    while world.scheduler.waiting:
        world.step()
        assert not world.scheduler.residency.is_placed(A)
    world.step()
    assert world.scheduler.residency.is_placed(A)


def test_preload_on_its_way_does_not_count_for_the_bound_of_what_is_waited_for() -> None:
    world = make_world(load_steps=5, max_load_pages=3)
    preload(world, C)
    world.step()
    assert set(world.loading) == {C}
    world.add(make_request(4, 1, max_tokens=1))
    world.step()
    assert set(world.loading) == {B, C}


def test_preload_evicts_what_is_worth_least_but_no_preload_that_nobody_has_used() -> None:
    world = make_world(num_pages=7, load_steps=0, prefix_caching=False)
    world.add(make_request(4, 1, max_tokens=1))
    world.drain()
    preload(world, C, digest_of(5), A)  # 3, 3 and 1 pages; B has 2
    for _ in range(5):
        world.step()
    assert set(world.scheduler.residency.resident) == {C, digest_of(5), A}
    preload(world, B)
    world.step()
    assert set(world.scheduler.residency.resident) == {C, digest_of(5), A}
    assert not world.scheduler.preloads.can_begin, "it has no room, so it is dropped"
    assert world.scheduler.preloads.take_dropped() == (B,)
    assert world.scheduler.preloads.take_dropped() == ()


def test_dropped_preloads_are_told_unless_they_came_after_all() -> None:
    world = make_world(num_pages=7, load_steps=0, prefix_caching=False)
    preloads = world.scheduler.preloads
    preload(world, C, digest_of(5), B, digest_of(4))  # 3, 3, 2 and 2 pages
    for _ in range(4):
        world.step()
        world.scheduler.check_invariants()
    world.add(make_request(4, 1, max_tokens=1))
    world.drain()
    world.scheduler.check_invariants()
    assert preloads.take_dropped() == (digest_of(4),), "B came with a request"
    preload(world, A, D)
    world.scheduler.retire_adapter(A)
    assert preloads.take_dropped() == (A,), "it has left before its turn"


def test_preload_into_free_pages_alone_evicts_nothing() -> None:
    world = make_world(num_pages=6, load_steps=0, prefix_caching=False)
    world.add(make_request(4, 2, max_tokens=1))
    world.drain()
    preload(world, digest_of(5), B, only_free=True)
    for _ in range(3):
        world.step()
    assert set(world.scheduler.residency.resident) == {C, digest_of(5)}
    assert world.scheduler.residency.num_evictions == 0
    assert world.scheduler.preloads.take_dropped() == ()


def test_preload_that_fails_is_forgotten_and_the_next_one_comes() -> None:
    world = make_world(load_steps=0, failure_share=1.0)
    preload(world, A, B)
    world.step()
    world.failure_share = 0.0
    world.step()
    assert world.scheduler.residency.resident == (B,)
    assert world.num_loads == 2


def test_pin_of_what_is_to_be_preloaded_comes_first() -> None:
    world = make_world(load_steps=0)
    preload(world, A, B)
    pin(world, B)
    world.step()
    assert world.scheduler.residency.resident == (B, A)


# ---------------------------------------------------------------------- random walks
def pin_or_preload(world: World, rng: random.Random) -> None:
    digest = digest_of(rng.randrange(7))
    kind = rng.random()
    if kind < 0.4:
        try:
            pin(world, digest)
        except (InvalidRequest, Overloaded):
            assert not world.scheduler.residency.is_pinned(digest)
    elif kind < 0.7:
        world.scheduler.unpin_adapter(digest)
    else:
        preload(world, digest, only_free=rng.random() < 0.5)


def walk(seed: int, num_steps: int, **settings: Any) -> World:
    rng = random.Random(seed)
    options = {"num_pages": rng.randint(18, 30), "load_steps": rng.randint(0, 3), "max_loras": rng.randint(1, 3)}
    options |= {"max_num_seqs": rng.randint(2, 6), "max_load_pages": rng.choice((None, 2, 5))}
    world = make_world(seed, failure_share=0.1, aging_s=3.0, **options, **settings)
    residency = world.scheduler.residency
    for _ in range(num_steps):
        if len(world.scheduler.sequences) < 10 and rng.random() < 0.4:
            try:
                world.add(random_request(rng, 7))
            except ContextTooLong:
                assert residency.num_pinned_pages
        if rng.random() < 0.15:
            pin_or_preload(world, rng)
            world.scheduler.check_invariants()
        if rng.random() < 0.03:
            digest = digest_of(rng.randrange(7))
            if not world.scheduler.uses_adapter(digest):
                world.scheduler.retire_adapter(digest)
        kept = {digest for digest in residency.pinned if residency.is_resident(digest)}
        world.step()
        assert kept <= set(residency.resident), "a pinned adapter was evicted"
    world.drain()
    for digest in residency.pinned:
        world.scheduler.unpin_adapter(digest)
    return world


@pytest.mark.parametrize("seed", range(8))
def test_walk_with_pins_and_preloads_ends_everything_and_leaks_nothing(seed: int) -> None:
    world = walk(seed, 400, depth=seed % 2)
    scheduler = world.scheduler
    assert len(world.ended) > 40
    assert scheduler.residency.num_evictions > 0
    while world.loading:
        world.step()
    assert scheduler.residency.make_room(scheduler.pool.num_pages)
    assert scheduler.pool.num_free == scheduler.pool.num_pages


def test_same_seed_gives_the_same_trace_with_pins_and_preloads() -> None:
    assert walk(3, 150).trace == walk(3, 150).trace


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2000, 2020))
def test_long_walk_with_pins_and_preloads(seed: int) -> None:
    walk(seed, 3000, depth=seed % 2)
