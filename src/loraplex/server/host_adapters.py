"""Which adapters the engine holds in host memory: an LRU that never drops what a request leases, shared by tenants.

What is in the pool goes last, as it would leave the pool too: a load into it copies from here.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from loraplex.core import AdapterDigest, Overloaded
from loraplex.core.host_memory import HostMemoryFull, Restored
from loraplex.core.registry_errors import StoreUnavailable
from loraplex.core.reloads import Reloads
from loraplex.server.adapter_reads import AdapterReads, AdapterSource
from loraplex.server.engine_port import ServingEngine
from loraplex.server.host_figures import HostFigures
from loraplex.server.host_line import HostLine, Outcome, TakenTooLate, Wanted
from loraplex.server.host_room import HostRoom
from loraplex.server.load_backoff import LoadBackoff, LoadFailure
from loraplex.server.pace import Pace
from loraplex.server.seen_adapters import SeenAdapters
from loraplex.server.waiters import Progress, Stage, Waiter

_ROOM_TICK_S = 0.02  # between looks whether memory has been given back
_LEAVE_S = 0.25  # in which what was retired should have left the engine

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostLoad:
    """How a lease came about: whether the weights were read for it, and the seconds it waited for that.

    `told_s` is what its tenant may know: how long reading took where it is the first time that the tenant leases these
    weights, or they were read for it; else None. So nobody learns that another tenant has the same weights.
    """

    was_read: bool
    waited_s: float
    told_s: float | None


@dataclass(slots=True, eq=False)
class _Load:
    """A read of one source, and the tenants whose requests have waited for it; `was_here`: it was not needed."""

    progress: Progress = field(default_factory=lambda: Progress(Stage.READ))
    was_here: bool = False
    tenants: set[str] = field(default_factory=set)
    task: "asyncio.Task[None]" = field(init=False)


@dataclass(slots=True, eq=False)
class _Entry:
    """One adapter. `leases` counts, by tenant, requests that use it or wait for it; `loads` are reads, by source."""

    num_bytes: int
    is_ready: bool = False
    read_s: float = 0.0
    used_since_s: float = 0.0  # while there are leases
    leases: Counter[str] = field(default_factory=Counter)
    loads: dict[Hashable, _Load] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        return not self.leases and not self.loads


@dataclass(frozen=True, slots=True)
class _Leaving:
    """An adapter that was retired: its bytes are counted on until it has left the engine, but not for ever."""

    num_bytes: int
    until_s: float


class HostAdapters:
    """Adapters by digest within a `HostRoom`. Belongs to one event loop; reading and packing happen in threads.

    A request that finds no place waits for one for up to `patience_s`. The room counts bytes as stored until an
    adapter has come, then what it takes; that has a bound in the engine too, and where it is reached, idle adapters go
    and reads wait as long.
    """

    def __init__(
        self,
        engine: ServingEngine,
        room: HostRoom,
        patience_s: float,
        read_timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._room = room
        self._line = HostLine(self._take, room.num_used, patience_s)
        self._patience_s = patience_s
        self._reads = AdapterReads(engine, read_timeout_s)
        self._figures = HostFigures()
        self._reloads = Reloads()  # in bytes
        self._uses = Pace()
        self._clock = clock
        self._backoff = LoadBackoff(clock)
        self._entries: dict[AdapterDigest, _Entry] = {}
        self._unused: dict[AdapterDigest, None] = {}  # entries that are ready and idle, the least recently used first
        self._seen = SeenAdapters(room.max_adapters, room.max_bytes)
        self._leaving: dict[AdapterDigest, _Leaving] = {}
        self._missing: dict[object, int] = {}  # bytes, of each load that waits for pages

    @property
    def num_ready(self) -> int:
        return sum(entry.is_ready for entry in self._entries.values())

    def figures(self) -> HostFigures:
        """For metrics."""
        reload_bytes = self._reloads.missing(self._clock())
        return replace(
            self._figures,
            num_ready=self.num_ready,
            num_reloads=self._reloads.count,
            reload_bytes=reload_bytes,
            failed_adapters=frozenset(self.failures()),
        )

    def failures(self) -> dict[AdapterDigest, LoadFailure]:
        """Adapters that could not be read and are not tried now, but for those that came from another source."""
        entries = self._entries
        return {
            digest: failure
            for digest, failure in self._backoff.failures().items()
            if digest not in entries or not entries[digest].is_ready
        }

    async def acquire(self, tenant: str, source: AdapterSource, waiter: Waiter | None = None) -> HostLoad:
        """Lease an adapter for a tenant, reading it if it is not there; `waiter` shows what is waited for.

        Requests for one source share one read, and its failure. After that the source is left alone for a while, which
        doubles with each failure in a row: Overloaded (ADAPTER_LOAD) says how long. Raises Overloaded,
        CallerLimitReached where the tenant has its share, AdapterRefused for one that can never fit, StoreUnavailable
        where reading takes too long, and what the source raises. Only after success must `release` be called.

        Who is cancelled waits no longer; the read goes on, and its room counts to the tenant's share until it ends.
        """
        known = self._entries.get(source.digest)
        if known is None or not known.is_ready:
            self._backoff.check(tenant, (source.digest, source.key))
        if waiter is not None:
            waiter.progress = Progress(Stage.PLACE)
        await self._enter(Wanted(tenant, source.digest, source.num_bytes))
        entry = self._entries[source.digest]
        try:
            was_read, started = not entry.is_ready, time.perf_counter()
            if was_read:
                load = self._load_of(tenant, source, entry)
                if waiter is not None:
                    waiter.progress = load.progress
                await asyncio.shield(load.task)
                was_read = not load.was_here
            waited_s = time.perf_counter() - started if was_read else 0.0
        except asyncio.CancelledError:
            load.task.add_done_callback(lambda _: self._drop_lease(tenant, source.digest, entry))
            raise
        except BaseException:
            self._drop_lease(tenant, source.digest, entry)
            raise
        was_there = self._seen.lease(tenant, source.digest, entry.num_bytes)
        return HostLoad(was_read, waited_s, None if was_there and not was_read else entry.read_s)

    def release(self, tenant: str, digest: AdapterDigest) -> None:
        """Give a lease back."""
        self._drop_lease(tenant, digest, self._entries[digest])

    # ------------------------------------------------------------------ places
    async def _enter(self, wanted: Wanted) -> None:
        """Lease a place for the adapter, ready or not."""
        self._room.check_possible(wanted.num_bytes)
        try:
            is_in = await self._line.enter(wanted)
        except TakenTooLate:
            self.release(wanted.tenant, wanted.digest)
            raise
        if not is_in:
            raise self._room.refusal(wanted.tenant, wanted.num_bytes, self._retry_after_s(wanted))

    def _retry_after_s(self, wanted: Wanted) -> float:
        """Seconds until a request like this one finds a place, judged by how long adapters were in use lately."""
        if self._room.is_within_share(wanted.tenant, wanted.num_bytes):
            return self._uses.wait_s(self._line.num_waiting(), self._num_in_use())
        return self._uses.wait_s(self._line.num_waiting(wanted.tenant), self._room.num_used(wanted.tenant))

    def _num_in_use(self) -> int:
        return sum(entry.is_ready and bool(entry.leases) for entry in self._entries.values())

    def _take(self, wanted: Wanted, may_make_room: bool) -> Outcome:
        """Lease a place, if there is one or idle adapters can leave one; else all stays as it was."""
        entry = self._entries.get(wanted.digest)
        is_leased = entry is not None and wanted.tenant in entry.leases
        if not is_leased and not self._room.is_within_share(wanted.tenant, wanted.num_bytes):
            return Outcome.OVER_SHARE
        if entry is None:
            victims = self._victims(wanted.num_bytes) if may_make_room else None
            if victims is None:
                return Outcome.FULL
            self._note_load(wanted.digest)
            for digest in victims:
                self._retire(digest)
            entry = self._entries[wanted.digest] = _Entry(wanted.num_bytes)
            self._room.add(entry.num_bytes)
        self._unused.pop(wanted.digest, None)
        if not is_leased:
            self._room.use(wanted.tenant, entry.num_bytes)
        if not entry.leases:
            entry.used_since_s = self._clock()
        entry.leases[wanted.tenant] += 1
        return Outcome.TAKEN

    def _leavable(self) -> Iterator[AdapterDigest]:
        """What may leave: first what is not in the pool, then what is, the least recently used of each first.

        One by one, as few must be looked at where one or two will do. Nothing may leave meanwhile.
        """
        in_pool: list[AdapterDigest] = []
        for digest in self._unused:
            if self._engine.is_in_pool(digest):
                in_pool.append(digest)
            else:
                yield digest
        yield from in_pool

    def _victims(self, num_bytes: int) -> list[AdapterDigest] | None:
        """Which idle adapters must leave for one more of so many bytes; None if there cannot be room."""
        victims: list[AdapterDigest] = []
        if self._room.fits(num_bytes):
            return victims
        victims_bytes = 0
        for digest in self._leavable():
            victims.append(digest)
            victims_bytes += self._entries[digest].num_bytes
            if self._room.fits(num_bytes, len(victims), victims_bytes):
                return victims
        return None

    def _retire(self, digest: AdapterDigest) -> None:
        num_bytes = self._entries.pop(digest).num_bytes
        del self._unused[digest]
        self._room.remove(num_bytes)
        now = self._clock()
        while self._leaving and next(iter(self._leaving.values())).until_s <= now:
            del self._leaving[next(iter(self._leaving))]
        self._leaving[digest] = _Leaving(num_bytes, now + _LEAVE_S)
        self._engine.retire_adapter(digest, for_room=True)
        self._reloads.evicted(digest, num_bytes)
        self._figures = replace(self._figures, num_evictions=self._figures.num_evictions + 1)

    def _note_load(self, digest: AdapterDigest) -> None:
        """An adapter comes; the log is told when such often left shortly before. One that is still here is no load."""
        now = self._clock()
        self._leaving.pop(digest, None)
        if self._engine.host_bytes(digest):
            self._reloads.returned(digest)
            return
        self._reloads.loaded(digest, now)
        count = self._reloads.thrash(now)
        if count:
            _log.warning(
                "in the last minute %d adapters were read again that had left host memory for others shortly before; "
                "%d bytes more would have kept nine in ten of them (--cpu-lora-memory, now %d bytes; a bound by "
                "--max-cpu-loras must leave room for as many)",
                count,
                self._reloads.missing(now),
                self._room.max_bytes,
            )

    def _resize(self, entry: _Entry, num_bytes: int) -> None:
        """Count an adapter by what it takes, in pages, rather than by its tensors as stored."""
        if not num_bytes:
            return
        self._room.remove(entry.num_bytes)
        self._room.add(num_bytes)
        for tenant in entry.leases:
            self._room.end_use(tenant, entry.num_bytes)
            self._room.use(tenant, num_bytes)
        entry.num_bytes = num_bytes

    def _drop_lease(self, tenant: str, digest: AdapterDigest, entry: _Entry) -> None:
        entry.leases[tenant] -= 1
        if not entry.leases[tenant]:
            del entry.leases[tenant]
            self._room.end_use(tenant, entry.num_bytes)
        if not entry.leases and entry.is_ready:
            self._uses.note(self._clock() - entry.used_since_s)
        self._settle(digest, entry)

    def _settle(self, digest: AdapterDigest, entry: _Entry) -> None:
        """Note that an adapter is idle, forget one that could not be read, and see who can have a place now."""
        if entry.is_idle and self._entries.get(digest) is entry:
            if entry.is_ready:
                self._unused[digest] = None
            else:
                del self._entries[digest]
                self._room.remove(entry.num_bytes)
        self._line.serve()

    # ------------------------------------------------------------------ reading
    def _load_of(self, tenant: str, source: AdapterSource, entry: _Entry) -> _Load:
        """The read of this source that is under way, or a new one. It ends even if all who wait for it go."""
        load = entry.loads.get(source.key)
        if load is None:
            load = entry.loads[source.key] = _Load()
            load.task = asyncio.create_task(self._load(tenant, source, entry, load.progress))
            load.task.add_done_callback(_retrieve)
        load.tenants.add(tenant)
        return load

    async def _load(self, tenant: str, source: AdapterSource, entry: _Entry, progress: Progress) -> None:
        started, failure = time.perf_counter(), None
        try:
            with_room = partial(self._with_room, progress)
            restored = await self._reads.load(tenant, source, with_room, progress)
            entry.is_ready, entry.read_s = True, time.perf_counter() - started
            self._resize(entry, self._engine.host_bytes(source.digest))
            if restored is Restored.HERE:
                entry.loads[source.key].was_here = True
            else:
                self._figures = self._figures.loaded(entry.read_s, was_packed=restored is Restored.FILE)
            self._reads.keep(source.digest)
        except Exception as error:
            failure = error
            self._figures = replace(self._figures, num_failures=self._figures.num_failures + 1)
            raise
        finally:
            self._book(source, entry.loads.pop(source.key), failure)
            self._settle(source.digest, entry)

    def _book(self, source: AdapterSource, load: _Load, failure: Exception | None) -> None:
        """Note for all who waited how a read ended; want of memory or threads is not the source's fault."""
        for tenant in load.tenants:
            if failure is None:
                self._backoff.forget(tenant, (source.digest, source.key))
            elif not isinstance(failure, Overloaded):
                wait_s = self._backoff.note(tenant, (source.digest, source.key), failure)
                if isinstance(failure, StoreUnavailable):
                    failure.retry_after_s = max(failure.retry_after_s, wait_s)

    async def _with_room(self, progress: Progress, call: Callable[[], Awaitable[_T]]) -> _T:
        """What `call` gives, when the engine has room for it. Raises HostMemoryFull after the patience."""
        deadline, key, stage = self._clock() + self._patience_s, object(), progress.stage
        try:
            while True:
                try:
                    return await call()
                except HostMemoryFull as error:
                    if self._clock() >= deadline:
                        error.retry_after_s = self._uses.wait_s(len(self._missing), self._num_in_use())
                        raise
                    self._missing[key] = error.missing_bytes
                    self._retire_missing()
                progress.stage = Stage.PLACE
                await asyncio.sleep(_ROOM_TICK_S)
                progress.stage = stage
                del self._missing[key]  # what it gets now must not be missed by others too
        finally:
            self._missing.pop(key, None)
            progress.stage = stage

    def _retire_missing(self) -> None:
        """Retire idle adapters until what is about to leave is as much as loads miss."""
        now = self._clock()
        self._leaving = {
            digest: one
            for digest, one in self._leaving.items()
            if now < one.until_s and self._engine.host_bytes(digest)
        }
        wanted = sum(self._missing.values()) - sum(one.num_bytes for one in self._leaving.values())
        victims: list[AdapterDigest] = []
        for digest in self._leavable() if wanted > 0 else ():
            victims.append(digest)
            wanted -= self._entries[digest].num_bytes
            if wanted <= 0:
                break
        for digest in victims:
            self._retire(digest)


def _retrieve(task: "asyncio.Task[None]") -> None:
    """Look at a failure that nobody waits for any more, so that asyncio does not report it as lost."""
    if not task.cancelled():
        task.exception()
