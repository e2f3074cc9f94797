"""Which adapters the engine holds in host memory: an LRU that never drops what a request leases, shared by tenants."""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from loraplex.adapters import Adapter
from loraplex.core import AdapterDigest, ServerError
from loraplex.server.engine_port import ServingEngine
from loraplex.server.host_figures import HostCounters, HostFigures
from loraplex.server.host_line import HostLine, Outcome, TakenTooLate, Wanted
from loraplex.server.host_room import HostRoom
from loraplex.server.threads import WorkerThreads

NUM_LOAD_THREADS = 2
_MAX_TENANTS_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Weights that can be read: `num_bytes` of LoRA tensors, from a place that stands for `key`."""

    digest: AdapterDigest
    num_bytes: int
    key: Hashable
    load: Callable[[], Adapter]


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
class _Entry:
    """One adapter. `leases` counts, by tenant, requests that use it or wait for it; `loads` are reads, by source."""

    num_bytes: int
    is_ready: bool = False
    read_s: float = 0.0
    leases: Counter[str] = field(default_factory=Counter)
    loads: dict[Hashable, "asyncio.Task[None]"] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        return not self.leases and not self.loads


class HostAdapters:
    """Adapters by digest within a `HostRoom`. Belongs to one event loop; reading and packing happen in threads.

    A request that finds no place waits for one for up to `patience_s`.
    """

    def __init__(self, engine: ServingEngine, room: HostRoom, patience_s: float) -> None:
        self._engine = engine
        self._room = room
        self._line = HostLine(self._take, room.num_used, patience_s)
        self._threads = WorkerThreads(NUM_LOAD_THREADS, "loraplex-load")
        self._counters = HostCounters()
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

        Requests for one source share one read, and its failure; the next request reads again. Raises Overloaded,
        CallerLimitReached where the tenant has its share, AdapterRefused for one that can never fit, and what
        `source.load` raises. Only after success must `release` be called.
        """
        await self._enter(Wanted(tenant, source.digest, source.num_bytes))
        entry = self._entries[source.digest]
        try:
            was_read, started = not entry.is_ready, time.perf_counter()
            if was_read:
                await asyncio.shield(self._load_of(source, entry))
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
    def _load_of(self, source: AdapterSource, entry: _Entry) -> "asyncio.Task[None]":
        """The read of this source that is under way, or a new one. It ends even if all who wait for it go."""
        task = entry.loads.get(source.key)
        if task is None:
            task = entry.loads[source.key] = asyncio.create_task(self._load(source, entry))
            task.add_done_callback(_retrieve)
        return task

    async def _load(self, source: AdapterSource, entry: _Entry) -> None:
        started = time.perf_counter()
        try:
            await self._threads.run(self._read, source)
            entry.is_ready, entry.read_s = True, time.perf_counter() - started
            self._counters.loaded(entry.read_s)
        except Exception:
            self._counters.failed()
            raise
        finally:
            del entry.loads[source.key]
            self._settle(source.digest, entry)

    def _read(self, source: AdapterSource) -> None:
        adapter = source.load()
        if adapter.digest != source.digest:
            raise ServerError(f"The adapter {adapter.digest} was read where {source.digest} was asked for.")
        self._engine.add_adapter(adapter)


def _retrieve(task: "asyncio.Task[None]") -> None:
    """Look at a failure that nobody waits for any more, so that asyncio does not report it as lost."""
    if not task.cancelled():
        task.exception()
