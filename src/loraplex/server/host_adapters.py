"""Which adapters the engine holds in host memory: an LRU that never drops what a request leases, shared by tenants."""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from loraplex.core import AdapterDigest, Overloaded
from loraplex.core.host_memory import HostMemoryFull
from loraplex.core.registry_errors import StoreUnavailable
from loraplex.server.adapter_reads import AdapterReads, AdapterSource
from loraplex.server.engine_port import ServingEngine
from loraplex.server.host_figures import HostCounters, HostFigures
from loraplex.server.host_line import HostLine, Outcome, TakenTooLate, Wanted
from loraplex.server.host_room import HostRoom
from loraplex.server.load_backoff import LoadBackoff

_MAX_TENANTS_REMEMBERED = 4096
_ROOM_TICK_S = 0.02  # between looks whether memory has been given back
_LEAVE_S = 0.25  # in which what was retired should have left the engine

_T = TypeVar("_T")


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
    """A read of one source, and the tenants whose requests have waited for it."""

    task: "asyncio.Task[None]"
    tenants: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Entry:
    """One adapter. `leases` counts, by tenant, requests that use it or wait for it; `loads` are reads, by source."""

    num_bytes: int
    is_ready: bool = False
    read_s: float = 0.0
    leases: Counter[str] = field(default_factory=Counter)
    loads: dict[Hashable, _Load] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        return not self.leases and not self.loads


class HostAdapters:
    """Adapters by digest within a `HostRoom`. Belongs to one event loop; reading and packing happen in threads.

    A request that finds no place waits for one for up to `patience_s`. The room counts bytes as stored; what the engine
    really holds has a bound of its own, and where that is reached, idle adapters go and reads wait as long.
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
        self._counters = HostCounters()
        self._backoff = LoadBackoff(clock)
        self._entries: OrderedDict[AdapterDigest, _Entry] = OrderedDict()
        self._seen: OrderedDict[str, OrderedDict[AdapterDigest, None]] = OrderedDict()

    @property
    def num_ready(self) -> int:
        return sum(entry.is_ready for entry in self._entries.values())

    def figures(self) -> HostFigures:
        """For metrics."""
        return self._counters.read(self.num_ready)

    async def acquire(self, tenant: str, source: AdapterSource) -> HostLoad:
        """Lease an adapter for a tenant, reading it if it is not there.

        Requests for one source share one read, and its failure. After that the source is left alone for a while, which
        doubles with each failure in a row: Overloaded (ADAPTER_LOAD) says how long. Raises Overloaded,
        CallerLimitReached where the tenant has its share, AdapterRefused for one that can never fit, StoreUnavailable
        where reading takes too long, and what the source raises. Only after success must `release` be called.
        """
        known = self._entries.get(source.digest)
        if known is None or not known.is_ready:
            self._backoff.check(tenant, (source.digest, source.key))
        await self._enter(Wanted(tenant, source.digest, source.num_bytes))
        entry = self._entries[source.digest]
        try:
            was_read, started = not entry.is_ready, time.perf_counter()
            if was_read:
                await asyncio.shield(self._load_of(tenant, source, entry))
            waited_s = time.perf_counter() - started if was_read else 0.0
        except BaseException:
            self._drop_lease(tenant, source.digest, entry)
            raise
        is_new = self._note_seen(tenant, source.digest)
        return HostLoad(was_read, waited_s, entry.read_s if was_read or is_new else None)

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
            raise self._room.refusal(wanted.tenant, wanted.num_bytes)

    def _take(self, wanted: Wanted, may_make_room: bool) -> Outcome:
        """Lease a place, if there is one or idle adapters can leave one; else all stays as it was."""
        entry = self._entries.get(wanted.digest)
        is_leased = entry is not None and wanted.tenant in entry.leases
        if not is_leased and not self._room.is_within_share(wanted.tenant, wanted.num_bytes):
            return Outcome.OVER_SHARE
        if entry is None:
            if not may_make_room or not self._make_room(wanted.num_bytes):
                return Outcome.FULL
            entry = self._entries[wanted.digest] = _Entry(wanted.num_bytes)
            self._room.add(entry.num_bytes)
        self._entries.move_to_end(wanted.digest)
        if not is_leased:
            self._room.use(wanted.tenant, entry.num_bytes)
        entry.leases[wanted.tenant] += 1
        return Outcome.TAKEN

    def _make_room(self, num_bytes: int) -> bool:
        """Retire idle adapters, the least recently used first, until there is room; none if there cannot be."""
        idle = [digest for digest, entry in self._entries.items() if entry.is_idle]
        idle_bytes = sum(self._entries[digest].num_bytes for digest in idle)
        if not self._room.fits(num_bytes, len(idle), idle_bytes):
            return False
        for digest in idle:
            if self._room.fits(num_bytes):
                break
            self._retire(digest)
        return True

    def _retire(self, digest: AdapterDigest) -> None:
        self._room.remove(self._entries.pop(digest).num_bytes)
        self._engine.retire_adapter(digest)
        self._counters.evicted()

    def _drop_lease(self, tenant: str, digest: AdapterDigest, entry: _Entry) -> None:
        entry.leases[tenant] -= 1
        if not entry.leases[tenant]:
            del entry.leases[tenant]
            self._room.end_use(tenant, entry.num_bytes)
        self._settle(digest, entry)

    def _settle(self, digest: AdapterDigest, entry: _Entry) -> None:
        """Forget an adapter that could not be read and see who can have a place now."""
        if entry.is_idle and not entry.is_ready and self._entries.get(digest) is entry:
            del self._entries[digest]
            self._room.remove(entry.num_bytes)
        self._line.serve()

    def _note_seen(self, tenant: str, digest: AdapterDigest) -> bool:
        """Whether the tenant would find the weights new if it were alone here: an LRU of the server's size each."""
        seen = self._seen.setdefault(tenant, OrderedDict())
        self._seen.move_to_end(tenant)
        is_new = digest not in seen
        seen[digest] = None
        seen.move_to_end(digest)
        if len(seen) > self._room.max_adapters:
            seen.popitem(last=False)
        if len(self._seen) > _MAX_TENANTS_REMEMBERED:
            self._seen.popitem(last=False)
        return is_new

    # ------------------------------------------------------------------ reading
    def _load_of(self, tenant: str, source: AdapterSource, entry: _Entry) -> "asyncio.Task[None]":
        """The read of this source that is under way, or a new one. It ends even if all who wait for it go."""
        load = entry.loads.get(source.key)
        if load is None:
            load = entry.loads[source.key] = _Load(asyncio.create_task(self._load(tenant, source, entry)))
            load.task.add_done_callback(_retrieve)
        load.tenants.add(tenant)
        return load.task

    async def _load(self, tenant: str, source: AdapterSource, entry: _Entry) -> None:
        started, failure = time.perf_counter(), None
        try:
            was_packed = await self._reads.load(tenant, source, self._with_room)
            entry.is_ready, entry.read_s = True, time.perf_counter() - started
            self._counters.loaded(entry.read_s, was_packed=was_packed)
            self._reads.keep(source.digest)
        except Exception as error:
            failure = error
            self._counters.failed()
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

    async def _with_room(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """What `call` gives, when the engine has room for it. Raises HostMemoryFull after the patience."""
        deadline = time.monotonic() + self._patience_s
        retire_at = 0.0
        while True:
            try:
                return await call()
            except HostMemoryFull as error:
                now = time.monotonic()
                if now >= deadline:
                    raise
                if now >= retire_at and self._retire_idle(error.missing_bytes):
                    retire_at = now + _LEAVE_S
            await asyncio.sleep(_ROOM_TICK_S)

    def _retire_idle(self, num_bytes: int) -> bool:
        """Retire idle adapters of so many bytes, the least recently used first; whether there were any."""
        idle = [digest for digest, entry in self._entries.items() if entry.is_idle]
        for digest in idle:
            if num_bytes <= 0:
                break
            num_bytes -= self._entries[digest].num_bytes
            self._retire(digest)
        return bool(idle)


def _retrieve(task: "asyncio.Task[None]") -> None:
    """Look at a failure that nobody waits for any more, so that asyncio does not report it as lost."""
    if not task.cancelled():
        task.exception()
