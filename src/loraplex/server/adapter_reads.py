"""Bringing adapters into host memory: bytes come in many threads, two check and pack, one writes packed files.

So a source that is slow delays those who wait for it and nobody else.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from loraplex.adapters import Adapter
from loraplex.core import AdapterDigest, Overloaded, OverloadReason, ServerError
from loraplex.core.host_memory import Restored
from loraplex.core.registry_errors import StoreUnavailable
from loraplex.server.engine_port import ServingEngine
from loraplex.server.host_room import share_of
from loraplex.server.pace import Pace
from loraplex.server.threads import WorkerThreads
from loraplex.server.waiters import Progress, Stage

NUM_READ_THREADS = 16
MAX_LATE_READS = 48  # that have a thread beyond these, as they took too long
MAX_LATE_KEPT = 4  # late reads that have ended and wait for a request
_LATE_KEPT_S = 90.0  # for longer than a source is left alone
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


@dataclass(slots=True, eq=False)
class _Read:
    """One read: since when it has one of the read threads, and whether it took too long and goes on beside these."""

    task: "asyncio.Task[CheckAdapter]" = field(init=False)
    began_s: float | None = None
    is_late: bool = False  # it was told to somebody that it took too long
    is_apart: bool = False  # its thread is beyond NUM_READ_THREADS


class AdapterReads:
    """Belongs to one event loop. A tenant's reads take at most three quarters of the threads at once.

    A read that takes too long goes on in a thread beyond these, so that others have all of them; of its tenant's share
    it keeps its place. What it brings is kept for a while, for the next request.
    """

    def __init__(self, engine: ServingEngine, timeout_s: float) -> None:
        """A source that has not been read after `timeout_s` fails; where it mostly waited for a thread: Overloaded."""
        self._engine = engine
        self._timeout_s = timeout_s
        self._readers = WorkerThreads(NUM_READ_THREADS + MAX_LATE_READS, "loraplex-read")
        self._free_readers = asyncio.Semaphore(NUM_READ_THREADS)
        self._num_apart = 0
        self._pace = Pace()  # of readers
        self._restorers = WorkerThreads(NUM_RESTORE_THREADS, "loraplex-restore")
        self._packers = WorkerThreads(NUM_PACK_THREADS, "loraplex-load")
        self._writer = WorkerThreads(1, "loraplex-packed")
        self._gates: dict[str, _Gate] = {}
        self._reads: dict[Hashable, _Read] = {}
        self._late: dict[Hashable, _Read] = {}  # ended
        self._writes: set[asyncio.Task[None]] = set()

    async def load(
        self, tenant: str, source: AdapterSource, with_room: "WithRoom[Restored | None]", progress: Progress
    ) -> Restored | None:
        """Have the engine hold the source's adapter; None if it had to be read, neither here still nor packed on disk.

        `progress` is told when the bytes are there. Raises StoreUnavailable where reading takes too long, Overloaded
        (WORK) where it cannot begin, and what the source and the engine raise.
        """
        restored = await with_room(partial(self._restorers.run, self._engine.restore_adapter, source.digest))
        if restored is not None:
            return restored
        check = await self._read(tenant, source)
        progress.stage = Stage.PACK
        adapter = await self._packers.run(check)
        if adapter.digest != source.digest:
            raise ServerError(f"The adapter {adapter.digest} was read where {source.digest} was asked for.")
        await with_room(partial(self._packers.run, self._engine.add_adapter, adapter))
        return None

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
        read = self._late.pop(key, None) or self._reads.get(key) or self._begin(tenant, source, key)
        await asyncio.wait({read.task}, timeout=self._timeout_s)
        if read.task.done():
            return read.task.result()
        if read.began_s is None:
            del self._reads[key]
            read.task.cancel()
            raise self._no_thread()
        goes_on, read.is_late = read.is_late, True
        self._set_apart(read)
        if time.perf_counter() - read.began_s < self._timeout_s / 2:
            raise self._no_thread()
        error = StoreUnavailable(
            f"The adapter's files were not read within {self._timeout_s:g} s (adapter_read_timeout_s)."
        )
        error.goes_on = goes_on
        raise error

    def _no_thread(self) -> Overloaded:
        message = f"The adapter's files were not read within {self._timeout_s:g} s: other reads took all threads."
        num_ahead = sum(read.began_s is None for read in self._reads.values())
        return Overloaded(message, self._pace.wait_s(num_ahead, NUM_READ_THREADS), OverloadReason.WORK)

    def _begin(self, tenant: str, source: AdapterSource, key: Hashable) -> _Read:
        read = self._reads[key] = _Read()
        read.task = asyncio.create_task(self._in_reader(tenant, read, source.read))
        read.task.add_done_callback(lambda _: self._read_ended(key, read))
        return read

    def _read_ended(self, key: Hashable, read: _Read) -> None:
        if self._reads.get(key) is read:
            del self._reads[key]
        # to ask for the error is also what keeps asyncio from reporting it where nobody waits any more
        if not read.task.cancelled() and read.task.exception() is None and read.is_late:
            self._late[key] = read
            if len(self._late) > MAX_LATE_KEPT:
                del self._late[next(iter(self._late))]
            asyncio.get_running_loop().call_later(_LATE_KEPT_S, self._forget_late, key, read)

    def _forget_late(self, key: Hashable, read: _Read) -> None:
        if self._late.get(key) is read:
            del self._late[key]

    async def _in_reader(self, tenant: str, read: _Read, call: Callable[[], _T]) -> _T:
        """What `call` returns, made in one of the tenant's share of the readers."""
        gate = self._gates.setdefault(tenant, _Gate())
        gate.num_inside += 1
        try:
            async with gate.places:
                await self._free_readers.acquire()
                read.began_s = started = time.perf_counter()
                try:
                    return await self._readers.run(call)
                finally:
                    self._give_thread(read)
                    self._pace.note(time.perf_counter() - started)
        finally:
            gate.num_inside -= 1
            if not gate.num_inside:
                self._gates.pop(tenant, None)

    def _set_apart(self, read: _Read) -> None:
        """Leave the thread of a late read out of the count, as long as there are threads for others."""
        if not read.is_apart and self._num_apart < MAX_LATE_READS:
            read.is_apart = True
            self._num_apart += 1
            self._free_readers.release()

    def _give_thread(self, read: _Read) -> None:
        if read.is_apart:
            self._num_apart -= 1
        else:
            self._free_readers.release()


class _Gate:
    """A tenant's share of the readers; `num_inside` reads have a place or wait for one."""

    __slots__ = ("num_inside", "places")

    def __init__(self) -> None:
        self.num_inside = 0
        self.places = asyncio.Semaphore(share_of(NUM_READ_THREADS))
