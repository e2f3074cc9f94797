"""Adapters in host memory: one read for all who wait, leases, and the least recently used first."""

import asyncio
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from loraplex.adapters import Adapter
from loraplex.core import AdapterDigest, AdapterRefused, CallerLimitReached, Overloaded, ServerError
from loraplex.core.registry_errors import ArtifactCorrupt
from loraplex.core.reloads import OFTEN
from loraplex.server import seen_adapters
from loraplex.server.adapter_reads import AdapterSource
from loraplex.server.host_adapters import HostAdapters, HostLoad
from loraplex.server.host_room import HostRoom, share_of
from loraplex.server.pace import Pace
from loraplex.server.seen_adapters import SeenAdapters
from loraplex.testing import FakeEngine

from .helpers import until

pytestmark = pytest.mark.anyio

A, B, C, D = (AdapterDigest(letter * 64) for letter in "abcd")
TENANT = "acme"


class Host:
    """HostAdapters for one tenant, or for several that are named."""

    def __init__(
        self, engine: FakeEngine, max_adapters: int | None, *, max_bytes: int = 10**9, patience_s: float = 0.02
    ) -> None:
        self.now = 0.0
        self.adapters = HostAdapters(engine, HostRoom(max_adapters, max_bytes), patience_s, 5.0, lambda: self.now)

    @property
    def num_ready(self) -> int:
        return self.adapters.num_ready

    async def load(
        self, digest: AdapterDigest, key: str, read: Callable[[], Adapter], tenant: str = TENANT, num_bytes: int = 1
    ) -> HostLoad:
        source = AdapterSource(digest, num_bytes, key, lambda: partial(given, read()))
        return await self.adapters.acquire(tenant, source)

    async def acquire(self, digest: AdapterDigest, key: str, read: Callable[[], Adapter]) -> float | None:
        """The seconds that a request of the one tenant waited for the read; None where there was none."""
        load = await self.load(digest, key, read)
        return load.waited_s if load.was_read else None

    def release(self, digest: AdapterDigest, tenant: str = TENANT) -> None:
        self.adapters.release(tenant, digest)


def given(adapter: Adapter) -> Adapter:
    return adapter


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
    host = Host(engine, 2)
    first = await host.acquire(A, "x", store.read(A))
    assert first is not None
    assert first > 0
    assert await host.acquire(A, "x", store.read(A)) is None
    assert (store.reads, set(engine.held), host.num_ready) == ([A], {A}, 1)


async def test_the_least_recently_used_goes_first(engine: FakeEngine, store: Store) -> None:
    host = Host(engine, 2)
    for digest in (A, B, A, C):
        await host.acquire(digest, "x", store.read(digest))
        host.release(digest)
    assert engine.retired == [B]
    assert set(engine.held) == {A, C}


async def test_what_is_leased_or_being_read_stays(engine: FakeEngine, store: Store) -> None:
    host = Host(engine, 3)
    await host.load(D, "x", store.read(D), "other")
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
    host = Host(engine, 1)
    for _ in range(2):
        await host.acquire(A, "x", store.read(A))
    host.release(A)
    with pytest.raises(Overloaded):
        await host.acquire(B, "x", store.read(B))
    host.release(A)
    await host.acquire(B, "x", store.read(B))


async def test_a_failure_is_told_to_all_who_wait_and_leaves_nothing(engine: FakeEngine, store: Store) -> None:
    host = Host(engine, 1)
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
    host.now = 0.5
    await host.acquire(A, "x", store.read(A))


async def test_a_failure_of_one_source_is_not_that_of_another(engine: FakeEngine, store: Store) -> None:
    """Two tenants may keep the same weights; that the files of one are broken is no matter of the other."""
    host = Host(engine, 1)
    broken, whole = Store(), Store()
    broken.failure = ArtifactCorrupt("it is broken")
    whole.open.clear()
    waiting = asyncio.create_task(host.acquire(A, "whole", whole.read(A)))
    await until(lambda: bool(whole.reads))
    with pytest.raises(ArtifactCorrupt):
        await host.acquire(A, "broken", broken.read(A))
    assert host.adapters.failures().keys() == host.adapters.figures().failed_adapters == {A}
    whole.open.set()
    assert await waiting is not None
    assert await host.acquire(A, "broken", broken.read(A)) is None
    assert set(engine.held) == {A}
    assert host.adapters.failures() == {}, "it came from elsewhere"


async def test_who_leaves_while_waiting_takes_nothing_with_it(engine: FakeEngine, store: Store) -> None:
    host = Host(engine, 1)
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
    host = Host(engine, 1)
    store.open.clear()
    leaving = asyncio.create_task(host.acquire(A, "x", store.read(A)))
    await until(lambda: bool(store.reads))
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    store.open.set()
    await until(lambda: host.num_ready == 1)
    assert await host.acquire(A, "x", store.read(A)) is None


async def test_reads_that_nobody_waits_for_any_more_count_to_their_tenants_share(
    engine: FakeEngine, store: Store
) -> None:
    """Else one tenant, by asking and leaving, could fill the room with reads from a store that hangs."""
    host = Host(engine, 4)
    store.open.clear()
    leaving = [asyncio.create_task(host.acquire(digest, "x", store.read(digest))) for digest in (A, B, C)]
    await until(lambda: len(store.reads) == 3)
    for one in leaving:
        one.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    with pytest.raises(CallerLimitReached):
        await host.acquire(D, "x", store.read(D))
    store.open.set()
    await until(lambda: host.num_ready == 3)
    await host.acquire(D, "x", store.read(D))


async def test_other_weights_than_were_asked_for_are_refused(engine: FakeEngine, store: Store) -> None:
    host = Host(engine, 1)
    with pytest.raises(ServerError, match="was read where"):
        await host.acquire(A, "x", store.read(A, given=B))
    assert engine.held == {}


# ---------------------------------------------------------------------- shares, bytes, who is next
async def lease(host: Host, store: Store, tenant: str, *digests: AdapterDigest, num_bytes: int = 1) -> None:
    for digest in digests:
        await host.load(digest, "x", store.read(digest), tenant, num_bytes)


@pytest.mark.parametrize(("total", "share"), [(1, 1), (2, 1), (3, 2), (4, 3), (256, 192)])
def test_a_share_is_three_quarters_and_leaves_something(total: int, share: int) -> None:
    assert share_of(total) == share


async def test_one_tenant_cannot_use_all_places(engine: FakeEngine, store: Store) -> None:
    host = Host(engine, 3)
    await lease(host, store, "greedy", A, B)
    with pytest.raises(CallerLimitReached, match="--max-cpu-loras"):
        await lease(host, store, "greedy", C)
    await lease(host, store, "greedy", A)  # one more request on what it uses takes no more of the share
    await lease(host, store, "other", C)
    with pytest.raises(Overloaded, match="--max-cpu-loras"):
        await lease(host, store, "other", D)
    assert set(engine.held) == {A, B, C}


async def test_what_lies_idle_is_no_part_of_a_share(engine: FakeEngine, store: Store) -> None:
    host = Host(engine, 3)
    for digest in (A, B, C):
        await lease(host, store, "greedy", digest)
        host.release(digest, "greedy")
    assert set(engine.held) == {A, B, C}
    await lease(host, store, "other", D)
    assert engine.retired == [A]


async def test_a_request_waits_a_little_for_a_place(engine: FakeEngine, store: Store) -> None:
    host = Host(engine, 1, patience_s=5)
    await lease(host, store, "a", A)
    waiting = asyncio.create_task(lease(host, store, "b", B))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    host.release(A, "a")
    await waiting
    assert set(engine.held) == {B}


async def test_a_free_place_goes_to_the_tenant_that_uses_least(engine: FakeEngine, store: Store) -> None:
    host = Host(engine, 4, patience_s=5)
    await lease(host, store, "greedy", A, B)
    await lease(host, store, "other", C, D)
    e, f = (AdapterDigest(letter * 64) for letter in "ef")
    first = asyncio.create_task(lease(host, store, "greedy", e))
    await asyncio.sleep(0)
    second = asyncio.create_task(lease(host, store, "third", f))
    await asyncio.sleep(0.01)
    host.release(C, "other")
    await second
    assert not first.done()
    host.release(D, "other")
    await first


async def test_who_is_cancelled_while_waiting_or_just_let_in_holds_nothing(engine: FakeEngine, store: Store) -> None:
    host = Host(engine, 1, patience_s=5)
    await lease(host, store, "a", A)
    for let_in in (False, True):
        waiting = asyncio.create_task(lease(host, store, "b", B))
        await asyncio.sleep(0.01)
        if let_in:
            host.release(A, "a")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await lease(host, store, "c", C)
    assert set(engine.held) == {C}


async def test_bytes_are_bounded_and_idle_adapters_make_room(engine: FakeEngine, store: Store) -> None:
    host = Host(engine, 100, max_bytes=100)
    for digest in (A, B):
        await lease(host, store, TENANT, digest, num_bytes=45)
        host.release(digest)
    await lease(host, store, TENANT, C, num_bytes=40)
    assert (engine.retired, set(engine.held)) == ([A], {B, C})
    with pytest.raises(CallerLimitReached, match="75 bytes"):
        await lease(host, store, TENANT, D, num_bytes=36)
    await lease(host, store, "other", D, num_bytes=60)
    assert engine.retired == [A, B]
    with pytest.raises(Overloaded, match="--cpu-lora-memory"):
        await lease(host, store, "third", A, num_bytes=1)
    with pytest.raises(AdapterRefused, match="--cpu-lora-memory"):
        await lease(host, store, "third", A, num_bytes=101)


async def test_without_a_number_bytes_alone_bound_what_is_held_and_each_share(engine: FakeEngine, store: Store) -> None:
    host, digests = Host(engine, None, max_bytes=1000), [AdapterDigest(f"{number:064x}") for number in range(750)]
    await lease(host, store, "greedy", *digests)
    with pytest.raises(CallerLimitReached, match=r"750 bytes \(three quarters of --cpu-lora-memory\)") as caught:
        await lease(host, store, "greedy", A)
    assert "--max-cpu-loras" not in caught.value.message
    await lease(host, store, "other", A, num_bytes=250)
    with pytest.raises(Overloaded, match=r"all in use: 1000 bytes \(--cpu-lora-memory\)"):
        await lease(host, store, "third", B)
    assert (len(engine.held), engine.retired) == (751, [])


async def test_what_is_in_the_pool_leaves_host_memory_last(engine: FakeEngine, store: Store) -> None:
    host = Host(engine, 3)
    for digest in (A, B, C):
        await lease(host, store, TENANT, digest)
        host.release(digest)
    engine.in_pool = {A, B}
    await lease(host, store, TENANT, D)
    assert engine.retired == [C], "A was used longer ago, but it would leave the pool too"
    await lease(host, store, "other", C)
    assert engine.retired == [C, A], "nothing else is left"
    assert engine.retired_for_room == [C, A]


async def test_few_adapters_are_looked_at_for_one_that_may_leave(store: Store) -> None:
    asked: list[AdapterDigest] = []

    class Watched(FakeEngine):
        def is_in_pool(self, digest: AdapterDigest) -> bool:
            asked.append(digest)
            return super().is_in_pool(digest)

    engine = Watched()
    host, digests = Host(engine, 500), [AdapterDigest(f"{number:064}") for number in range(500)]
    for digest in digests:
        await lease(host, store, TENANT, digest)
        host.release(digest)
    engine.in_pool = {digests[1]}
    for digest in (A, B):
        await lease(host, store, TENANT, digest)
    assert engine.retired == [digests[0], digests[2]]
    assert asked == digests[:3]


async def test_full_room_changes_nothing(engine: FakeEngine, store: Store) -> None:
    host = Host(engine, None, max_bytes=100)
    await lease(host, store, "a", A, num_bytes=60)
    await lease(host, store, "b", B, num_bytes=30)
    host.release(B, "b")
    with pytest.raises(Overloaded):
        await lease(host, store, "c", C, num_bytes=50)
    assert (engine.retired, host.adapters.figures().num_evictions) == ([], 0)


async def test_who_finds_no_place_is_told_when_one_was_free_lately(engine: FakeEngine, store: Store) -> None:
    host = Host(engine, 4)
    for digest in (A, B):
        await lease(host, store, "a", digest)
    await lease(host, store, "b", C)
    with pytest.raises(CallerLimitReached) as caught:
        await lease(host, store, "a", D, AdapterDigest("e" * 64))
    assert caught.value.retry_after_s == 1.0, "nothing has become free yet"
    host.now = 60.0
    host.release(C, "b")
    await lease(host, store, "b", C)
    with pytest.raises(Overloaded) as full:
        await lease(host, store, "c", AdapterDigest("f" * 64))
    assert full.value.retry_after_s == 60.0 / 4, "four are in use, for 60 s each"
    with pytest.raises(CallerLimitReached) as caught:
        await lease(host, store, "a", AdapterDigest("f" * 64))
    assert caught.value.retry_after_s == 60.0 / 3, "three of these are the tenant's"


def test_the_pace_is_a_mean_of_the_latest_within_bounds() -> None:
    pace = Pace()
    assert pace.wait_s(5, 1) == 1.0
    pace.note(8.0)
    assert (pace.wait_s(0, 1), pace.wait_s(3, 2), pace.wait_s(0, 100), pace.wait_s(99, 1)) == (8.0, 16.0, 1.0, 60.0)
    for _ in range(40):
        pace.note(2.0)
    assert pace.wait_s(0, 1) == pytest.approx(2.0, abs=0.1)


async def test_what_came_counts_by_the_bytes_that_it_takes(engine: FakeEngine, store: Store) -> None:
    """Tensors stored in float32 take half as much in pages of bfloat16, small ones take whole pages."""
    host, room = Host(engine, None, max_bytes=100), []
    engine.sizes = {A: 20, B: 20, C: 60}
    for digest in (A, B, C):
        await lease(host, store, "a", digest, num_bytes=35)
        room.append((host.adapters._room._num_bytes, host.adapters._room._bytes_used["a"]))
    assert room == [(20, 20), (40, 40), (100, 100)]
    with pytest.raises(CallerLimitReached):
        await lease(host, store, "a", D)
    for digest in (A, B, C):
        host.release(digest, "a")
    assert (host.adapters._room._bytes_used, engine.retired) == ({}, [])
    await lease(host, store, "b", D, num_bytes=30)
    assert engine.retired == [A, B]
    assert host.adapters._room._num_bytes == 60 + 30


# ---------------------------------------------------------------------- thrash
async def test_adapters_that_come_back_soon_are_counted_and_told_with_the_bytes_that_would_keep_them(
    engine: FakeEngine, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    async def cycle(max_bytes: int) -> Host:
        host = Host(engine, None, max_bytes=max_bytes)
        for _ in range(OFTEN // 3 + 2):
            for digest in (A, B, C):
                await lease(host, store, TENANT, digest, num_bytes=10)
                host.release(digest)
        return host

    with caplog.at_level(logging.WARNING):
        host = await cycle(20)
    figures = host.adapters.figures()
    assert (figures.num_reloads, figures.reload_bytes) == (OFTEN + 3, 10)
    (record,) = caplog.records
    assert f"{OFTEN} adapters were read again" in record.getMessage()
    assert "10 bytes more" in record.getMessage()
    assert "--cpu-lora-memory, now 20 bytes" in record.getMessage()
    assert "--max-cpu-loras" in record.getMessage()
    host.now = 100.0
    assert host.adapters.figures().reload_bytes == 0
    assert (await cycle(20 + figures.reload_bytes)).adapters.figures().num_reloads == 0


async def test_what_is_asked_for_again_before_it_has_left_is_no_load(engine: FakeEngine, store: Store) -> None:
    host = Host(engine, 1)
    for digest in (D, A, B):
        await lease(host, store, TENANT, digest)
        host.release(digest)
    assert engine.retired == [D, A]
    engine.held[A], engine.sizes[A] = adapter(A), 1  # the engine has not let go of it yet
    load = await host.load(A, "x", store.read(A))
    assert (load.was_read, store.reads) == (False, [D, A, B])
    figures = host.adapters.figures()
    assert (figures.from_packed.count, figures.from_store.count, figures.num_reloads) == (0, 3, 0)
    host.release(A)
    await lease(host, store, TENANT, D)
    figures = host.adapters.figures()
    assert (figures.num_reloads, figures.reload_bytes) == (1, 2), "D and B have left, and A has not"


async def test_what_left_long_ago_is_forgotten(engine: FakeEngine, store: Store) -> None:
    host = Host(engine, 1)
    for number in range(20):
        digest = AdapterDigest(f"{number:064}")
        await lease(host, store, TENANT, digest)
        host.release(digest)
        host.now += 1.0
    assert len(host.adapters._leaving) == 1


# ---------------------------------------------------------------------- what a tenant is told
async def test_nobody_learns_from_cold_that_others_have_the_same_weights(engine: FakeEngine, store: Store) -> None:
    host, told = Host(engine, 4), []
    for tenant in ("a", "b", "a", "b"):
        load = await host.load(A, tenant, store.read(A), tenant)
        told.append(load.told_s)
        host.release(A, tenant)
    assert store.reads == [A]
    assert told[0] is not None
    assert told == [told[0], told[0], None, None]


async def test_what_a_tenant_used_long_ago_is_cold_to_it_even_if_others_keep_it(
    engine: FakeEngine, store: Store
) -> None:
    host = Host(engine, 3)
    await lease(host, store, "other", A)
    for digest in (A, B, C, D):
        await lease(host, store, TENANT, digest)
        host.release(digest)
    load = await host.load(A, "x", store.read(A))
    assert (load.was_read, load.told_s is None) == (False, False)


async def test_what_would_have_left_by_its_bytes_is_cold_too(engine: FakeEngine, store: Store) -> None:
    host = Host(engine, None, max_bytes=100)
    await lease(host, store, "other", A, num_bytes=10)
    for digest in (A, B, C):
        await lease(host, store, TENANT, digest, num_bytes=10 if digest is A else 50)
        host.release(digest)
    assert A in engine.held
    load = await host.load(A, "x", store.read(A), num_bytes=10)
    assert (load.was_read, load.told_s is None) == (False, False)


def test_what_is_remembered_of_tenants_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_adapters, "MAX_SEEN", 3)
    seen = SeenAdapters(None, 100)
    for number, (tenant, digest) in enumerate([("a", A), ("b", A), ("b", B), ("b", C)]):
        assert not seen.lease(tenant, digest, 1), number
    assert list(seen._tenants) == ["b"], "who was active longest ago goes first"
    assert (seen._num_seen, seen.lease("b", A, 1), seen.lease("a", A, 1)) == (3, True, False)
    assert (seen._num_seen, list(seen._tenants["b"].weights)) == (3, [C, A])


def test_tenant_of_whom_nothing_is_remembered_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once packed an adapter may take more than all of host memory."""
    monkeypatch.setattr(seen_adapters, "MAX_SEEN", 1)
    seen = SeenAdapters(None, 100)
    assert not seen.lease("large", A, 101)
    assert (seen._num_seen, list(seen._tenants)) == (0, [])
    for digest in (B, C):
        assert not seen.lease("small", digest, 1)
    assert (seen._num_seen, list(seen._tenants)) == (1, ["small"])


@pytest.mark.parametrize("seed", range(5))
async def test_random_requests_that_fail_leave_and_wait_leave_no_lease(engine: FakeEngine, seed: int) -> None:
    rng, max_adapters = random.Random(seed), 3
    host, in_use = Host(engine, max_adapters, patience_s=0.001), Counter[AdapterDigest]()
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
        digest, tenant = rng.choice(digests), rng.choice(("one", "two", "three"))
        await host.load(digest, rng.choice("xy"), read(digest), tenant)
        in_use[digest] += 1
        try:
            await asyncio.sleep(rng.random() * 0.005)
            assert digest in engine.held, "weights went while they were leased"
        finally:
            in_use[digest] -= 1
            host.release(digest, tenant)

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
    await until(lambda: all(not entry.loads for entry in host.adapters._entries.values()))
    await asyncio.sleep(0)  # in which those who left give back what they held until their load ended
    assert outcomes["NoneType"] >= 40
    assert outcomes.keys() - {"CallerLimitReached"} == {"NoneType", "ArtifactCorrupt", "CancelledError", "Overloaded"}
    room = host.adapters._room
    assert (room._num_adapters, room._num_bytes, room._adapters_used) == (len(engine.held), len(engine.held), {})
    assert not host.adapters._line._waiting
    assert all(entry.is_ready and not entry.leases for entry in host.adapters._entries.values())
    assert set(host.adapters._entries) == set(engine.held)
