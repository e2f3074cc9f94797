"""Adapters in host memory: one read for all who wait, leases, and the least recently used first."""

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from loraplex.adapters import Adapter
from loraplex.core import AdapterDigest, Overloaded, ServerError
from loraplex.core.registry_errors import ArtifactCorrupt
from loraplex.server.host_adapters import HostAdapters
from loraplex.testing import FakeEngine

from .helpers import until

pytestmark = pytest.mark.anyio

A, B, C = (AdapterDigest(letter * 64) for letter in "abc")


def adapter(digest: AdapterDigest) -> Adapter:
    return Adapter(digest, (), 1, 0, (), None)


class Store:
    """Where adapters are read from: it counts, may fail, and may be made to wait."""

    def __init__(self) -> None:
        self.reads: list[AdapterDigest] = []
        self.failure: Exception | None = None
        self.open = threading.Event()
        self.open.set()

    def read(self, digest: AdapterDigest, given: AdapterDigest | None = None) -> Callable[[], Adapter]:
        """What reads `digest`, or finds `given` in its place."""

        def load() -> Adapter:
            self.reads.append(digest)
            assert self.open.wait(5)
            if self.failure is not None:
                raise self.failure
            return adapter(given or digest)

        return load


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def store() -> Store:
    return Store()


async def test_the_first_waits_and_the_next_do_not(engine: FakeEngine, store: Store) -> None:
    host = HostAdapters(engine, 2)
    first = await host.acquire(A, "x", store.read(A))
    assert first is not None
    assert first > 0
    assert await host.acquire(A, "x", store.read(A)) is None
    assert (store.reads, set(engine.held), host.num_ready) == ([A], {A}, 1)


async def test_the_least_recently_used_goes_first(engine: FakeEngine, store: Store) -> None:
    host = HostAdapters(engine, 2)
    for digest in (A, B, A, C):
        await host.acquire(digest, "x", store.read(digest))
        host.release(digest)
    assert engine.retired == [B]
    assert set(engine.held) == {A, C}


async def test_what_is_leased_or_being_read_stays(engine: FakeEngine, store: Store) -> None:
    host = HostAdapters(engine, 2)
    await host.acquire(A, "x", store.read(A))
    store.open.clear()
    reading = asyncio.create_task(host.acquire(B, "x", store.read(B)))
    await until(lambda: B in store.reads)
    with pytest.raises(Overloaded, match="--max-cpu-loras"):
        await host.acquire(C, "x", store.read(C))
    store.open.set()
    await reading
    host.release(B)
    await host.acquire(C, "x", store.read(C))
    assert engine.retired == [B]


async def test_two_leases_are_given_back_one_by_one(engine: FakeEngine, store: Store) -> None:
    host = HostAdapters(engine, 1)
    for _ in range(2):
        await host.acquire(A, "x", store.read(A))
    host.release(A)
    with pytest.raises(Overloaded):
        await host.acquire(B, "x", store.read(B))
    host.release(A)
    await host.acquire(B, "x", store.read(B))


async def test_a_failure_is_told_to_all_who_wait_and_leaves_nothing(engine: FakeEngine, store: Store) -> None:
    host = HostAdapters(engine, 1)
    store.failure = ArtifactCorrupt("it is broken")
    store.open.clear()
    waiting = [asyncio.create_task(host.acquire(A, "x", store.read(A))) for _ in range(5)]
    await until(lambda: bool(store.reads))
    store.open.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [ArtifactCorrupt] * 5
    assert (store.reads, engine.held, host.num_ready) == ([A], {}, 0)
    store.failure = None
    await host.acquire(B, "x", store.read(B))  # no place was lost
    host.release(B)
    await host.acquire(A, "x", store.read(A))


async def test_a_failure_of_one_source_is_not_that_of_another(engine: FakeEngine, store: Store) -> None:
    """Two tenants may keep the same weights; that the files of one are broken is no matter of the other."""
    host = HostAdapters(engine, 1)
    broken, whole = Store(), Store()
    broken.failure = ArtifactCorrupt("it is broken")
    whole.open.clear()
    waiting = asyncio.create_task(host.acquire(A, "whole", whole.read(A)))
    await until(lambda: bool(whole.reads))
    with pytest.raises(ArtifactCorrupt):
        await host.acquire(A, "broken", broken.read(A))
    whole.open.set()
    assert await waiting is not None
    assert await host.acquire(A, "broken", broken.read(A)) is None
    assert set(engine.held) == {A}


async def test_who_leaves_while_waiting_takes_nothing_with_it(engine: FakeEngine, store: Store) -> None:
    host = HostAdapters(engine, 1)
    store.open.clear()
    leaving, staying = (asyncio.create_task(host.acquire(A, "x", store.read(A))) for _ in range(2))
    await until(lambda: bool(store.reads))
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    store.open.set()
    assert await staying is not None
    host.release(A)
    await host.acquire(B, "x", store.read(B))
    assert engine.retired == [A]


async def test_a_read_that_nobody_waits_for_any_more_ends_and_is_kept(engine: FakeEngine, store: Store) -> None:
    host = HostAdapters(engine, 1)
    store.open.clear()
    leaving = asyncio.create_task(host.acquire(A, "x", store.read(A)))
    await until(lambda: bool(store.reads))
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    store.open.set()
    await until(lambda: host.num_ready == 1)
    assert await host.acquire(A, "x", store.read(A)) is None


async def test_other_weights_than_were_asked_for_are_refused(engine: FakeEngine, store: Store) -> None:
    host = HostAdapters(engine, 1)
    with pytest.raises(ServerError, match="was read where"):
        await host.acquire(A, "x", store.read(A, given=B))
    assert engine.held == {}


@pytest.mark.parametrize("seed", range(5))
async def test_random_requests_that_fail_leave_and_wait_leave_no_lease(engine: FakeEngine, seed: int) -> None:
    rng, max_adapters = random.Random(seed), 3
    host, in_use = HostAdapters(engine, max_adapters), Counter[AdapterDigest]()
    digests = [AdapterDigest(letter * 64) for letter in "abcdef"]
    outcomes: Counter[str] = Counter()

    def read(digest: AdapterDigest) -> Callable[[], Adapter]:
        delay_s, fails = rng.random() * 0.004, rng.random() < 0.2

        def load() -> Adapter:
            time.sleep(delay_s)
            if fails:
                raise ArtifactCorrupt("it is broken")
            return adapter(digest)

        return load

    async def request() -> None:
        digest = rng.choice(digests)
        await host.acquire(digest, rng.choice("xy"), read(digest))
        in_use[digest] += 1
        try:
            await asyncio.sleep(rng.random() * 0.005)
            assert digest in engine.held, "weights went while they were leased"
        finally:
            in_use[digest] -= 1
            host.release(digest)

    async def client() -> None:
        for _ in range(30):
            task = asyncio.create_task(request())
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.004)
                task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            assert not isinstance(result, AssertionError), result
            outcomes[type(result).__name__] += 1
            assert len(engine.held) <= max_adapters

    await asyncio.gather(*(client() for _ in range(6)))
    await until(lambda: all(not entry.loads for entry in host._entries.values()))
    assert outcomes["NoneType"] >= 40
    assert outcomes.keys() == {"NoneType", "ArtifactCorrupt", "CancelledError", "Overloaded"}
    assert all(entry.is_ready and not entry.leases for entry in host._entries.values())
    assert set(host._entries) == set(engine.held)
