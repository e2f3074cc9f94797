"""Sources that are slow, gone, broken or unsteady: each holds up its own requests, and is not asked again and again."""

import asyncio
import threading
from collections import Counter
from functools import partial
from unittest.mock import MagicMock

import pytest

from loraplex.adapters import Adapter
from loraplex.core import AdapterDigest, AdapterRefused, Overloaded, OverloadReason, RefusalReason
from loraplex.core.host_memory import HostMemoryFull
from loraplex.core.registry_errors import ArtifactCorrupt, ArtifactMissing, StoreUnavailable
from loraplex.server import host_adapters
from loraplex.server.adapter_reads import NUM_READ_THREADS, AdapterSource
from loraplex.server.host_adapters import HostAdapters
from loraplex.server.host_room import HostRoom, share_of
from loraplex.server.load_backoff import LONGEST_BACKOFF_S, MAX_SOURCES, LoadBackoff, LoadFailure
from loraplex.server.stdlib_logs import logs_as_json
from loraplex.testing import FakeEngine

from .helpers import until

pytestmark = pytest.mark.anyio

A, B, C = (AdapterDigest(letter * 64) for letter in "abc")


def digest_of(number: int) -> AdapterDigest:
    return AdapterDigest(f"{number:064x}")


def make(digest: AdapterDigest) -> Adapter:
    return Adapter(digest, (), 1, 0, (), None)


class Place:
    """A source: it counts how often it was read and checked, may be shut, and may fail at either."""

    def __init__(self, digest: AdapterDigest, key: str = "x") -> None:
        self.digest, self.key = digest, key
        self.num_reads = self.num_checks = 0
        self.open = threading.Event()
        self.open.set()
        self.read_error: Exception | None = None
        self.check_error: Exception | None = None

    @property
    def source(self) -> AdapterSource:
        return AdapterSource(self.digest, 1, self.key, self._read)

    def _read(self) -> partial[Adapter]:
        self.num_reads += 1
        assert self.open.wait(30)
        if self.read_error is not None:
            raise self.read_error
        return partial(self._check)

    def _check(self) -> Adapter:
        self.num_checks += 1
        if self.check_error is not None:
            raise self.check_error
        return make(self.digest)


class World:
    def __init__(self, *, timeout_s: float = 5.0, patience_s: float = 0.05, max_adapters: int = 64) -> None:
        self.engine, self.now = FakeEngine(), 0.0
        room = HostRoom(max_adapters, 10**9)
        self.host = HostAdapters(self.engine, room, patience_s, timeout_s, lambda: self.now)

    async def use(self, place: Place, tenant: str = "acme") -> None:
        await self.host.acquire(tenant, place.source)
        self.host.release(tenant, place.digest)


# ---------------------------------------------------------------------- slow
async def test_slow_sources_delay_only_their_own_requests() -> None:
    world = World(timeout_s=30.0)
    slow = [Place(digest_of(i)) for i in range(share_of(NUM_READ_THREADS) + 3)]
    for place in slow:
        place.open.clear()
    waiting = [asyncio.create_task(world.use(place, "slow")) for place in slow]
    await until(lambda: sum(place.num_reads for place in slow) == share_of(NUM_READ_THREADS))
    for number in range(10):
        await world.use(Place(digest_of(1000 + number)), "quick")
    assert not any(task.done() for task in waiting)
    assert sum(place.num_reads for place in slow) == share_of(NUM_READ_THREADS), "a tenant leaves threads to others"
    for place in slow:
        place.open.set()
    await asyncio.gather(*waiting)
    assert world.host.num_ready == len(slow) + 10
    assert not world.host._reads._gates


async def test_read_that_takes_too_long_fails_with_a_code_and_is_not_begun_twice() -> None:
    world, place = World(timeout_s=0.5), Place(A)
    place.open.clear()
    with pytest.raises(StoreUnavailable, match=r"0\.5 s \(adapter_read_timeout_s\)"):
        await world.use(place)
    assert world.host.num_ready == 0
    with pytest.raises(Overloaded) as caught:
        await world.use(place)
    assert (caught.value.reason, caught.value.retry_after_s) == (OverloadReason.ADAPTER_LOAD, 0.5)
    assert "store_unavailable" in caught.value.message
    world.now = 0.6
    with pytest.raises(StoreUnavailable):
        await world.use(place)
    assert place.num_reads == 1, "the thread that still waits is joined"
    world.now = 2.0
    waiting = asyncio.create_task(world.use(place))
    await asyncio.sleep(0.01)
    place.open.set()
    await waiting
    assert (place.num_reads, world.host.num_ready) == (1, 1)


async def test_who_gets_no_thread_is_told_when_the_reads_before_it_may_be_done() -> None:
    world = World(timeout_s=1.0)
    slow = [Place(digest_of(number)) for number in range(share_of(NUM_READ_THREADS) + 5)]
    for place in slow:
        place.open.clear()
    world.host._reads._pace.note(24.0)
    errors = await asyncio.gather(*(world.use(place) for place in slow), return_exceptions=True)
    told = [error.retry_after_s for error in errors if isinstance(error, Overloaded)]
    assert sorted(told) == [24.0 / NUM_READ_THREADS * (num_ahead + 1) for num_ahead in range(5)]
    for place in slow:
        place.open.set()


async def test_late_read_is_used_by_the_next_request_and_counts_as_one_failure() -> None:
    world, place = World(timeout_s=0.02), Place(A)
    place.open.clear()
    for turn in range(4):
        world.now = turn * 1.0
        with pytest.raises(StoreUnavailable) as caught:
            await world.use(place)
        assert caught.value.retry_after_s == 1.0
    assert next(iter(world.host._backoff._failed.values())).count == 1
    place.open.set()
    await until(lambda: bool(world.host._reads._late))
    world.now = 10.0
    await world.use(place)
    assert (place.num_reads, world.host.num_ready) == (1, 1)
    assert not world.host._reads._late


async def test_two_tenants_with_a_hung_store_leave_threads_to_a_third() -> None:
    world = World(timeout_s=1.0)
    slow = [Place(digest_of(i)) for i in range(NUM_READ_THREADS * 2)]
    for place in slow:
        place.open.clear()
    waiting = [asyncio.create_task(world.use(place, f"slow{i % 2}")) for i, place in enumerate(slow)]
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    types = Counter(type(error) for error in errors)
    assert types == {StoreUnavailable: NUM_READ_THREADS, Overloaded: len(slow) - NUM_READ_THREADS}
    assert len(world.host._backoff._failed) == NUM_READ_THREADS, "no thread is no failure"
    for number in range(5):
        await world.use(Place(digest_of(1000 + number)), "quick")
    assert world.host.num_ready == 5
    for place in slow:
        place.open.set()
    await until(lambda: not world.host._reads._reads)
    assert world.host._reads._num_apart == 0
    assert world.host._reads._free_readers._value == NUM_READ_THREADS


async def test_a_read_that_waited_for_its_thread_is_not_its_source_s_failure_and_goes_on() -> None:
    world, place = World(timeout_s=2.0), Place(A)
    slow = [Place(digest_of(i)) for i in range(NUM_READ_THREADS)]
    for one in (place, *slow):
        one.open.clear()
    waiting = [asyncio.create_task(world.use(one, f"slow{i % 2}")) for i, one in enumerate(slow)]
    await until(lambda: sum(one.num_reads for one in slow) == NUM_READ_THREADS)
    with pytest.raises(Overloaded, match="other reads took all threads") as caught:
        await world.use(place)
    assert caught.value.reason is OverloadReason.WORK
    assert {type(error) for error in await asyncio.gather(*waiting, return_exceptions=True)} == {StoreUnavailable}
    await until(lambda: place.num_reads == 1)
    place.open.set()
    await world.use(place)
    assert (place.num_reads, world.host.num_ready) == (1, 1)
    for one in slow:
        one.open.set()
    await until(lambda: not world.host._reads._reads)


# ---------------------------------------------------------------------- broken
@pytest.mark.parametrize("error", [ArtifactMissing("it is gone"), StoreUnavailable("no answer"), OSError(5, "I/O")])
async def test_failing_source_is_asked_less_and_less_often(error: Exception) -> None:
    world, place = World(), Place(A)
    place.read_error = error
    waits = []
    for _ in range(12):
        with pytest.raises(type(error)):
            await world.use(place)
        with pytest.raises(Overloaded) as caught:
            await world.use(place)
        assert caught.value.reason is OverloadReason.ADAPTER_LOAD
        waits.append(caught.value.retry_after_s)
        world.now += waits[-1]
    assert waits == [min(0.5 * 2.0**i, LONGEST_BACKOFF_S) for i in range(12)]
    assert place.num_reads == 12
    assert (world.host.num_ready, world.engine.held) == (0, {})


async def test_many_requests_that_fail_together_count_once() -> None:
    world, place = World(), Place(A)
    place.read_error = ArtifactCorrupt("it is broken")
    place.open.clear()
    waiting = [asyncio.create_task(world.use(place)) for _ in range(20)]
    await until(lambda: place.num_reads == 1)
    place.open.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(result) for result in results} == {ArtifactCorrupt}
    with pytest.raises(Overloaded) as caught:
        await world.use(place)
    assert (caught.value.retry_after_s, place.num_reads) == (0.5, 1)


async def test_success_and_a_new_version_forget_failures() -> None:
    world, place = World(), Place(A)
    place.read_error = ArtifactCorrupt("it is broken")
    for _ in range(3):
        with pytest.raises(ArtifactCorrupt):
            await world.use(place)
        world.now += 60
    place.read_error = None
    await world.use(place)
    assert not world.host._backoff._failed
    place.read_error = ArtifactCorrupt("it is broken")
    other = Place(B)
    other.read_error = place.read_error
    with pytest.raises(ArtifactCorrupt):
        await world.use(other)
    await world.use(Place(B, "files of a new version"))


async def test_refusal_is_told_again_as_it_was() -> None:
    world, place = World(), Place(A)
    place.check_error = AdapterRefused(RefusalReason.NONFINITE, "it has NaN", "a tensor")
    for _ in range(3):
        with pytest.raises(AdapterRefused, match="it has NaN") as caught:
            await world.use(place)
        assert (caught.value.reason, caught.value.subject) == (RefusalReason.NONFINITE, "a tensor")
    assert place.num_checks == 1


async def test_tenants_learn_nothing_from_each_others_failures() -> None:
    """Both have the same files: each is told what it would be told alone."""
    world, place = World(), Place(A)
    place.read_error = ArtifactCorrupt("it is broken")
    for tenant in ("one", "two"):
        with pytest.raises(ArtifactCorrupt):
            await world.use(place, tenant)
    assert place.num_reads == 2
    with pytest.raises(Overloaded):
        await world.use(place, "one")


async def test_flapping_sources_beside_good_ones_never_hurt_these() -> None:
    world = World()
    good, bad = [Place(digest_of(i)) for i in range(4)], [Place(digest_of(100 + i)) for i in range(4)]
    outcomes = {"good": 0, "bad": 0}

    async def client(number: int) -> None:
        for turn in range(40):
            flapping, steady = bad[(number + turn) % 4], good[(number + turn) % 4]
            flapping.read_error = ArtifactMissing("it is gone") if (turn + number) % 3 else None
            world.now += 0.05
            try:
                await world.use(flapping)
            except (ArtifactMissing, Overloaded):
                outcomes["bad"] += 1
            await world.use(steady)
            outcomes["good"] += 1

    await asyncio.gather(*(client(number) for number in range(5)))
    assert outcomes["good"] == 200
    assert outcomes["bad"] > 0
    assert all(place.num_reads == 1 for place in good)
    assert not world.host._reads._reads


def test_what_is_remembered_of_failures_is_bounded() -> None:
    backoff = LoadBackoff(lambda: 0.0)
    for number in range(MAX_SOURCES + 10):
        backoff.note("acme", (A, number), OSError())
    assert len(backoff._failed) == MAX_SOURCES
    backoff.check("acme", (A, 3))
    with pytest.raises(Overloaded):
        backoff.check("acme", (A, 10))


def test_failures_are_told_by_adapter_until_they_are_tried_again() -> None:
    now = 0.0
    backoff = LoadBackoff(lambda: now)
    for tenant, digest, times in (("acme", A, 2), ("globex", A, 1), ("acme", B, 3)):
        for _ in range(times):
            backoff.note(tenant, (digest, "place"), ArtifactMissing("gone"))
    assert backoff.failures() == {A: LoadFailure("artifact_missing", 0.5), B: LoadFailure("artifact_missing", 2.0)}
    now = 0.75
    assert backoff.failures()[A].retry_after_s == 0.25, "the other tenant's is tried again"
    backoff.forget("acme", (B, "place"))
    assert backoff.failures().keys() == {A}
    now = 1.0
    assert backoff.failures() == {}


def test_the_log_is_told_of_a_source_once_until_it_is_good_again() -> None:
    backoff, log = LoadBackoff(lambda: 0.0), MagicMock()
    with logs_as_json(log):
        for _ in range(5):
            backoff.note("acme", (A, "secret-place"), ArtifactMissing("gone"))
        backoff.forget("acme", (A, "secret-place"))
        backoff.note("acme", (A, "secret-place"), OSError("secret-place"))
    messages = [call.kwargs["message"] for call in log.warning.call_args_list]
    assert [message.partition(";")[0] for message in messages] == [
        f"adapter {A} could not be read (artifact_missing)",
        f"adapter {A} could not be read (internal_error)",
    ]
    assert "secret-place" not in "".join(messages)


# ---------------------------------------------------------------------- host memory that is full
async def test_idle_adapters_leave_when_the_engine_has_no_room() -> None:
    world = World()
    world.engine.max_held = 2
    for digest in (A, B, C):
        await world.use(Place(digest))
    assert world.engine.retired == [A]
    assert set(world.engine.held) == {B, C}


async def test_read_waits_for_memory_and_then_says_that_there_is_none() -> None:
    world, place = World(patience_s=30.0), Place(C)
    world.engine.max_held = 1
    await world.host.acquire("acme", Place(A).source)

    async def find_none(place: Place) -> HostMemoryFull:
        waiting = asyncio.create_task(world.use(place))
        await until(lambda: bool(world.host._missing))
        world.now += 30.0
        with pytest.raises(HostMemoryFull) as caught:
            await waiting
        return caught.value

    error = await find_none(place)
    assert (error.reason, error.retry_after_s) == (OverloadReason.HOST_MEMORY, 1.0)
    world.host._uses.note(40.0)
    assert (await find_none(Place(B))).retry_after_s == 40.0, "A alone could make room"
    waiting = asyncio.create_task(world.use(place))
    await until(lambda: place.num_checks == 2)
    world.host.release("acme", A)
    await waiting
    assert (set(world.engine.held), place.num_reads, place.num_checks) == ({C}, 2, 2), "read once for both tries"


async def test_no_more_leave_than_loads_miss_while_others_are_about_to() -> None:
    world, places = World(patience_s=5.0), [Place(digest_of(number)) for number in range(8)]
    for place in places:
        await world.use(place)
    world.engine.max_held = 0  # nothing has left yet, however much is retired
    world.engine.leaving = {place.digest for place in places}
    waiting = [asyncio.create_task(world.use(Place(digest))) for digest in (A, B)]
    await until(lambda: len(world.engine.retired) == 2)
    await asyncio.sleep(0.1)
    assert world.engine.retired == [place.digest for place in places[:2]], "each of the two misses one byte"
    world.engine.leaving -= set(world.engine.retired)  # they have left, and somebody else took their room
    await until(lambda: len(world.engine.retired) == 4)
    await asyncio.sleep(0.1)
    assert len(world.engine.retired) == 4
    world.engine.max_held = 8
    await asyncio.gather(*waiting)


async def test_what_does_not_leave_in_time_is_not_counted_on() -> None:
    world, places = World(patience_s=5.0), [Place(digest_of(number)) for number in range(2)]
    for place in places:
        await world.use(place)
    world.engine.max_held, world.engine.leaving = 0, {place.digest for place in places}
    waiting = asyncio.create_task(world.use(Place(A)))
    await until(lambda: len(world.engine.retired) == 1)
    world.now += host_adapters._LEAVE_S
    await until(lambda: len(world.engine.retired) == 2)
    world.engine.max_held = 1
    await waiting


# ---------------------------------------------------------------------- packed files
async def test_packed_adapter_is_used_instead_of_its_source() -> None:
    world, place = World(max_adapters=1), Place(A)
    world.engine.keeps_packed = True
    await world.use(place)
    await until(lambda: A in world.engine.stored)
    await world.use(Place(B))
    assert world.engine.retired == [A]
    place.read_error = ArtifactMissing("it is gone")
    await world.use(place)
    assert (place.num_reads, set(world.engine.held)) == (1, {A})
    figures = world.host.figures()
    assert (figures.from_store.count, figures.from_packed.count, figures.num_failures) == (2, 1, 0)
