"""Bringing adapters into host memory: bytes come in many threads, two check and pack, one writes packed files.

So a source that is slow delays those who wait for it and nobody else.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from loraplex.adapters import Adapter
from loraplex.core import AdapterDigest, ServerError
from loraplex.core.registry_errors import StoreUnavailable
from loraplex.server.engine_port import ServingEngine
from loraplex.server.host_room import share_of
from loraplex.server.threads import WorkerThreads

NUM_READ_THREADS = 16
NUM_RESTORE_THREADS = 4  # of packed files, from a local disk
NUM_PACK_THREADS = 2
MAX_UNWRITTEN = 8  # packed adapters that wait to be written to disk; others are written when they are packed again

_T = TypeVar("_T")

CheckAdapter = Callable[[], Adapter]
"""Makes the adapter of the bytes that were read; takes the CPU. Raises AdapterRefused, ArtifactCorrupt."""

WithRoom = Callable[[Callable[[], Awaitable[_T]]], Awaitable[_T]]
"""Calls again what raises HostMemoryFull, when others have gone."""


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Weights to read: `num_bytes` of LoRA tensors, from a place that stands for `key`. `read` waits for them."""

    digest: AdapterDigest
    num_bytes: int
    key: Hashable
    read: Callable[[], CheckAdapter]


class AdapterReads:
    """Belongs to one event loop. A tenant's reads take at most three quarters of the threads at once."""

    def __init__(self, engine: ServingEngine, timeout_s: float) -> None:
        """A source that has not been read after `timeout_s` fails, waiting for a thread included."""
        self._engine = engine
        self._timeout_s = timeout_s
        self._readers = WorkerThreads(NUM_READ_THREADS, "loraplex-read")
        self._restorers = WorkerThreads(NUM_RESTORE_THREADS, "loraplex-restore")
        self._packers = WorkerThreads(NUM_PACK_THREADS, "loraplex-load")
        self._writer = WorkerThreads(1, "loraplex-packed")
        self._gates: dict[str, _Gate] = {}
        self._reads: dict[Hashable, asyncio.Task[CheckAdapter]] = {}
        self._writes: set[asyncio.Task[None]] = set()

    async def load(self, tenant: str, source: AdapterSource, with_room: "WithRoom[bool | None]") -> None:
        """Have the engine hold the source's adapter, from its packed file if it has one.

        Raises StoreUnavailable where reading takes too long, and what the source and the engine raise.
        """
        if await with_room(partial(self._restorers.run, self._engine.restore_adapter, source.digest)):
            return
        check = await self._read(tenant, source)
        adapter = await self._packers.run(check)
        if adapter.digest != source.digest:
            raise ServerError(f"The adapter {adapter.digest} was read where {source.digest} was asked for.")
        await with_room(partial(self._packers.run, self._engine.add_adapter, adapter))

    def keep(self, digest: AdapterDigest) -> None:
        """Have the engine keep an adapter packed on disk, when there is time."""
        if len(self._writes) < MAX_UNWRITTEN:
            task = asyncio.create_task(self._writer.run(self._engine.store_adapter, digest))
            self._writes.add(task)
            task.add_done_callback(self._written)

    def _written(self, task: "asyncio.Task[None]") -> None:
        self._writes.discard(task)
        if not task.cancelled():
            task.exception()  # the engine has logged it; the adapter is packed from its artifact next time

    # ------------------------------------------------------------------ waiting for bytes
    async def _read(self, tenant: str, source: AdapterSource) -> CheckAdapter:
        """Wait for a source's bytes. A read that takes too long goes on; the next request for it waits for the same."""
        key = (source.digest, source.key)
        task = self._reads.get(key)
        if task is None:
            task = self._reads[key] = asyncio.create_task(self._in_reader(tenant, source.read))
            task.add_done_callback(partial(self._read_ended, key))
        await asyncio.wait({task}, timeout=self._timeout_s)
        if not task.done():
            message = f"The adapter's files were not read within {self._timeout_s:g} s (adapter_read_timeout_s)."
            raise StoreUnavailable(message)
        return task.result()

    def _read_ended(self, key: Hashable, task: "asyncio.Task[CheckAdapter]") -> None:
        del self._reads[key]
        if not task.cancelled():
            task.exception()  # so that asyncio does not report it as lost where nobody waits any more

    async def _in_reader(self, tenant: str, call: Callable[[], _T]) -> _T:
        """What `call` returns, made in one of the tenant's share of the readers."""
        gate = self._gates.setdefault(tenant, _Gate())
        gate.num_inside += 1
        try:
            async with gate.places:
                return await self._readers.run(call)
        finally:
            gate.num_inside -= 1
            if not gate.num_inside:
                self._gates.pop(tenant, None)


class _Gate:
    """A tenant's share of the readers; `num_inside` reads have a place or wait for one."""

    __slots__ = ("num_inside", "places")

    def __init__(self) -> None:
        self.num_inside = 0
        self.places = asyncio.Semaphore(share_of(NUM_READ_THREADS))
