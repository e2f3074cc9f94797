"""Many threads and processes at once (RELIABILITY.md, T29): compare-and-set histories are linearizable."""

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random

import pytest

from loraplex.registry import Registry, Role, Unauthenticated, VersionConflict, adapter_admin, repository

from .helpers import BASE, OPERATOR, MakeWorld, World

NUM_VERSIONS = 4
NUM_THREADS = 8
OPS_PER_THREAD = 15


@dataclass(frozen=True)
class Event:
    """A compare-and-set as its caller saw it; times from one monotonic clock."""

    start: float
    end: float
    expected: int | None
    target: int
    revision: int | None  # None where it was told of a conflict
    current: int | None = None  # what it was told is active


def fill(world: World) -> None:
    world.tenant("acme")
    for seed in range(1, NUM_VERSIONS + 1):
        world.verified("acme", "sup", seed)


def worker(registry: Registry, seed: int, start: threading.Barrier) -> list[Event]:
    """Reads the pointer and moves it, again and again."""
    rng, events = Random(seed), []
    start.wait()
    for _ in range(OPS_PER_THREAD):
        expected = registry.adapters.show(OPERATOR, "acme", "sup").info.alias.active
        target = rng.randint(1, NUM_VERSIONS)
        began = time.monotonic()
        try:
            alias = registry.adapters.activate(OPERATOR, "acme", "sup", target, expected=expected)
            events.append(Event(began, time.monotonic(), expected, target, alias.revision))
        except VersionConflict as conflict:
            events.append(Event(began, time.monotonic(), expected, target, None, conflict.current))
    return events


def run(registries: list[Registry]) -> list[Event]:
    """All workers at once, spread over the registries."""
    start = threading.Barrier(NUM_THREADS)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        jobs = [pool.submit(worker, registries[i % len(registries)], i, start) for i in range(NUM_THREADS)]
        return [event for job in jobs for event in job.result()]


def illegal(events: list[Event], final: int | None) -> list[str]:
    """What contradicts one order of all moves. Revisions give the order, so it need not be searched for."""
    moves = sorted((event for event in events if event.revision is not None), key=lambda event: event.revision or 0)
    problems = []
    if [event.revision for event in moves] != list(range(1, len(moves) + 1)):
        problems.append("revisions have gaps or repeat")
    values: list[int | None] = [None]
    for move in moves:
        if move.expected != values[-1]:
            problems.append(f"revision {move.revision} expected {move.expected}, but {values[-1]} was active")
        values.append(move.target)
    for earlier, later in itertools.pairwise(moves):
        if later.end < earlier.start:
            problems.append(f"revision {later.revision} ended before {earlier.revision} began")
    for event in events:
        if event.revision is None:
            # A conflict is true if the value it was told was active at some moment between its start and its end.
            first = sum(move.end < event.start for move in moves)
            last = sum(move.start <= event.end for move in moves)
            if event.current == event.expected or event.current not in values[first : last + 1]:
                problems.append(f"was told {event.current}, of {values[first : last + 1]}")
    if values[-1] != final:
        problems.append(f"{final} is active, but {values[-1]} was set last")
    return problems


def check(world: World, registries: list[Registry]) -> tuple[list[str], int, int]:
    """(problems, moves, conflicts)."""
    events = run(registries)
    final = world.registry.adapters.show(OPERATOR, "acme", "sup").info.alias.active
    moves = sum(event.revision is not None for event in events)
    assert len(events) == NUM_THREADS * OPS_PER_THREAD
    return illegal(events, final), moves, len(events) - moves


def test_moves_of_many_threads_and_processes_have_one_order(make_world: MakeWorld) -> None:
    world = make_world()
    fill(world)
    with world.reopen() as other:
        began = time.monotonic()
        problems, moves, conflicts = check(world, [world.registry, other])
        rate = (moves + conflicts) / (time.monotonic() - began)
    assert problems == []
    assert moves >= 15  # the floor: moves and conflicts both happened
    assert conflicts >= 5
    assert rate > 5
    assert world.registry.verify_audit(OPERATOR).ok


def test_without_the_comparison_the_history_is_illegal(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: the checker finds a set without its compare."""
    world = make_world()
    fill(world)
    monkeypatch.setattr(adapter_admin, "_check_expected", lambda subject, expected: None)
    problems, _, conflicts = check(world, [world.registry])
    assert conflicts == 0
    assert problems != []


def test_the_pointer_itself_compares_revisions(world: World) -> None:
    """The second guard, inside the statement: a stale revision moves nothing."""
    fill(world)
    with world.registry._store.change(OPERATOR) as change:
        owner = repository.Owner(world.registry.tenants.list(OPERATOR)[0].tenant_id, "acme")
        adapter = repository.find_adapter(change.connection, owner, "sup")
        assert adapter is not None
        move = adapter_admin.AliasMove(1, "activate", None, 1, 0.0, OPERATOR.key_id)
        assert repository.move_alias(change.connection, owner, adapter, move)
        assert not repository.move_alias(change.connection, owner, adapter, move)
        change.record(owner.tenant_id, OPERATOR.key_id, "test")


def in_threads(num: int, job: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(num) as pool:
        list(pool.map(job, range(num)))


def test_versions_published_at_once_get_different_numbers(world: World) -> None:
    world.tenant("acme")
    numbers: list[int] = []
    in_threads(6, lambda i: numbers.append(world.publish("acme", "sup", seed=i).number))
    assert sorted(numbers) == [1, 2, 3, 4, 5, 6]


def test_tenants_made_at_once_are_one(make_world: MakeWorld) -> None:
    world = make_world()
    made: list[object] = []

    def create(i: int) -> None:
        try:
            made.append(world.registry.tenants.create(OPERATOR, "acme"))
        except Exception as error:
            assert "exists already" in str(error)

    in_threads(8, create)
    assert len(made) == 1


def test_readers_see_whole_states_while_writers_write(world: World) -> None:
    """Resolving never shows anything but a version that was active, and a revoked key never comes back."""
    fill(world)
    world.registry.adapters.activate(OPERATOR, "acme", "sup", 1, expected=None)
    key = world.key("acme")
    principal = world.registry.authenticate(key)
    versions = world.registry.adapters.show(OPERATOR, "acme", "sup").versions
    digests = {version.number: version.facts.digest for version in versions if version.facts is not None}
    stop, seen = threading.Event(), [0, 0]

    def read() -> None:
        while not stop.is_set():
            resolved = world.registry.resolve(principal, "sup", BASE)
            assert resolved is not None
            assert digests[resolved.ref.version] == resolved.ref.digest
            seen[0] += 1

    def authenticate() -> None:
        while not stop.is_set():
            fresh = world.registry.keys.create(OPERATOR, "acme", Role.TENANT).key
            world.registry.authenticate(fresh.reveal())
            world.registry.keys.revoke(OPERATOR, "acme", fresh.key_id)
            for _ in range(3):
                with pytest.raises(Unauthenticated):
                    world.registry.authenticate(fresh.reveal())
            seen[1] += 1

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(job) for job in (read, read, authenticate, authenticate)]
        current = 1
        try:
            for _ in range(15):
                target = current % NUM_VERSIONS + 1
                world.registry.adapters.activate(OPERATOR, "acme", "sup", target, expected=current)
                resolved = world.registry.resolve(principal, "sup", BASE)
                assert resolved is not None
                assert resolved.ref.version == target  # a change of one's own is seen at once
                current = target
        finally:
            stop.set()
        for job in jobs:
            job.result()
    assert seen[0] >= 50
    assert seen[1] >= 3
