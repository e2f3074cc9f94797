"""Which adapters the engine holds in host memory: an LRU that never drops what a request leases."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from loraplex.adapters import Adapter
from loraplex.core import AdapterDigest, Overloaded, ServerError
from loraplex.server.engine_port import ServingEngine
from loraplex.server.threads import WorkerThreads

NUM_LOAD_THREADS = 2


@dataclass(slots=True, eq=False)
class _Entry:
    """One adapter. `leases` counts requests that use it or wait for it; `loads` are the reads under way, by source."""

    is_ready: bool = False
    leases: int = 0
    loads: dict[Hashable, "asyncio.Task[None]"] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        return not self.leases and not self.loads


class HostAdapters:
    """At most `max_adapters` adapters by digest. Belongs to one event loop; reading and packing happen in threads."""

    def __init__(self, engine: ServingEngine, max_adapters: int) -> None:
        self._engine = engine
        self._max_adapters = max_adapters
        self._threads = WorkerThreads(NUM_LOAD_THREADS, "loraplex-load")
        self._entries: OrderedDict[AdapterDigest, _Entry] = OrderedDict()

    @property
    def num_ready(self) -> int:
        return sum(entry.is_ready for entry in self._entries.values())

    async def acquire(self, digest: AdapterDigest, source: Hashable, load: Callable[[], Adapter]) -> float | None:
        """Lease an adapter, reading it with `load` if it is not there; the seconds that took, None if it was there.

        Requests for one `source` share one read, and its failure; the next request reads again. Raises Overloaded if
        every adapter is leased, and what `load` raises. Only after success must `release` be called.
        """
        entry = self._entry(digest)
        entry.leases += 1
        try:
            if entry.is_ready:
                return None
            started = time.perf_counter()
            await asyncio.shield(self._load_of(digest, entry, source, load))
            return time.perf_counter() - started
        except BaseException:
            self._drop_lease(digest, entry)
            raise

    def release(self, digest: AdapterDigest) -> None:
        """Give a lease back."""
        self._drop_lease(digest, self._entries[digest])

    def _entry(self, digest: AdapterDigest) -> _Entry:
        entry = self._entries.get(digest)
        if entry is None:
            self._make_room()
            entry = self._entries[digest] = _Entry()
        self._entries.move_to_end(digest)
        return entry

    def _make_room(self) -> None:
        if len(self._entries) < self._max_adapters:
            return
        oldest = next((digest for digest, entry in self._entries.items() if entry.is_idle), None)
        if oldest is None:
            raise Overloaded(
                f"All {self._max_adapters} adapters in host memory are in use (--max-cpu-loras).", retry_after_s=1.0
            )
        del self._entries[oldest]
        self._engine.retire_adapter(oldest)

    def _drop_lease(self, digest: AdapterDigest, entry: _Entry) -> None:
        entry.leases -= 1
        self._forget_failed(digest, entry)

    def _forget_failed(self, digest: AdapterDigest, entry: _Entry) -> None:
        if entry.is_idle and not entry.is_ready and self._entries.get(digest) is entry:
            del self._entries[digest]

    def _load_of(
        self, digest: AdapterDigest, entry: _Entry, source: Hashable, load: Callable[[], Adapter]
    ) -> "asyncio.Task[None]":
        """The read of this source that is under way, or a new one. It ends even if all who wait for it go."""
        task = entry.loads.get(source)
        if task is None:
            task = entry.loads[source] = asyncio.create_task(self._load(digest, entry, source, load))
            task.add_done_callback(_retrieve)
        return task

    async def _load(self, digest: AdapterDigest, entry: _Entry, source: Hashable, load: Callable[[], Adapter]) -> None:
        try:
            await self._threads.run(self._read, digest, load)
            entry.is_ready = True
        finally:
            del entry.loads[source]
            self._forget_failed(digest, entry)

    def _read(self, digest: AdapterDigest, load: Callable[[], Adapter]) -> None:
        adapter = load()
        if adapter.digest != digest:
            raise ServerError(f"The adapter {adapter.digest} was read where {digest} was asked for.")
        self._engine.add_adapter(adapter)


def _retrieve(task: "asyncio.Task[None]") -> None:
    """Look at a failure that nobody waits for any more, so that asyncio does not report it as lost."""
    if not task.cancelled():
        task.exception()
