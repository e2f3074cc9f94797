"""The engine's adapters in host memory: what is packed, what may leave, and their way into the pool."""

import logging
import threading
from collections import Counter
from collections.abc import Callable

from loraplex.adapters import Adapter
from loraplex.core import AdapterDigest, ModelNotFound, Overloaded, OverloadReason, Request
from loraplex.core.figures import HostMemory
from loraplex.core.host_memory import Restored
from loraplex.core.own_text import OwnText
from loraplex.engine.figures import Counters
from loraplex.engine.host_arena import HostArena, LeasedPages
from loraplex.engine.loads import AdapterLoader, LoadEnded
from loraplex.engine.packed_files import PackedFileCounts, PackedFiles
from loraplex.engine.packing import Allocate, PackedAdapter, check_fits
from loraplex.pool import EvictionReason
from loraplex.scheduler import Scheduler, Sequence

_log = logging.getLogger(__name__)

Pack = Callable[[Adapter, Allocate], PackedAdapter]
"""From an adapter to its page images. Raises AdapterRefused, and what allocating raises."""

FailWaiting = Callable[[Sequence, float], None]
"""Called for each sequence that waited for a load which failed, with the seconds until the load is tried again."""


def load_failed(name: str, retry_after_s: float) -> Overloaded:
    """What a request gets whose adapter could not be copied into the pool."""
    message = f"The adapter {name!r} could not be brought into the pool; it is tried again in {retry_after_s:.1f} s."
    return Overloaded(message, retry_after_s, OverloadReason.ADAPTER_LOAD)


class AdapterShelf:
    """Adapters by digest. `add`, `restore`, `store`, `retire`, `hold` and `release` may be called from any
    thread.

    The rest belongs to the thread that steps, as the scheduler and the loader do. `packed` is for reading.
    """

    def __init__(
        self,
        pack: Pack,
        arena: HostArena,
        scheduler: Scheduler,
        loader: AdapterLoader,
        counters: Counters,
        files: PackedFiles | None = None,
    ) -> None:
        """`arena` is where page images lie, `files` where they are kept on disk."""
        self.packed: dict[AdapterDigest, PackedAdapter] = {}
        self.held: Counter[AdapterDigest] = Counter()  # kept for comparisons, whether or not they are retired
        self.load_s: dict[AdapterDigest, float] = {}  # of each adapter's last load
        self._pack = pack
        self._arena = arena
        self._files = files
        self._scheduler = scheduler
        self._loader = loader
        self._counters = counters
        self._retired: dict[AdapterDigest, EvictionReason] = {}
        self._lock = threading.Lock()  # over changes of packed, retired and held adapters

    # ------------------------------------------------------------------ in host memory
    def add(self, adapter: Adapter) -> None:
        """Pack an adapter and keep it, also one that was retired. Raises AdapterRefused, HostMemoryFull."""
        with self._lock:
            if adapter.digest in self.packed:
                self._retired.pop(adapter.digest, None)
                return
        packed = self._pack(adapter, self._arena.allocate)
        with self._lock:
            self._put(adapter.digest, packed)
            self._retired.pop(adapter.digest, None)

    def restore(self, digest: AdapterDigest) -> Restored | None:
        """As `add`, of what is here or from its packed file; None if neither can be used. Raises as `add`."""
        with self._lock:
            if digest in self.packed:
                self._retired.pop(digest, None)
                return Restored.HERE
        packed = self._files.load(digest, self._allocate_for_file) if self._files is not None else None
        if packed is None:
            return None
        with self._lock:
            self._put(digest, packed)
            self._retired.pop(digest, None)
        return Restored.FILE

    def _allocate_for_file(self, num_pages: int) -> LeasedPages:
        """Pages that a file fills whole, or that are freed."""
        check_fits(num_pages, self._scheduler.geometry)
        return self._arena.allocate(num_pages, as_zeros=False)

    def store(self, digest: AdapterDigest) -> None:
        """Write an adapter's packed file, unless a readable one is there or the adapter is not here. Blocks."""
        with self._lock:
            packed = self.packed.get(digest)
            if packed is None or self._files is None or self._files.has_readable(digest):
                return
            self.held[digest] += 1
        try:
            self._files.store(digest, packed)
        finally:
            self.release(digest)

    def file_counts(self) -> PackedFileCounts:
        """What became of packed files; zeros where none are kept."""
        return self._files.counts() if self._files is not None else PackedFileCounts()

    def file_sizes(self) -> dict[AdapterDigest, int]:
        """Bytes of the packed files, by adapter; empty where none are kept."""
        return self._files.sizes() if self._files is not None else {}

    def host_memory(self) -> HostMemory:
        """What is held and leased now."""
        arena = self._arena
        leased_bytes = arena.num_leased * arena.page_bytes
        return HostMemory(len(self.packed), arena.held_bytes, leased_bytes, arena.max_bytes)

    def _put(self, digest: AdapterDigest, packed: PackedAdapter) -> None:
        """Keep what was packed, unless another thread was quicker. Under the lock."""
        if self.packed.setdefault(digest, packed) is not packed:
            packed.image.free()

    def retire(self, digest: AdapterDigest, *, for_room: bool = False) -> None:
        """No new requests for it; its memory goes once the requests that run have ended.

        `for_room`: others want its host memory, which evictions from the pool then give as their reason.
        """
        with self._lock:
            self._retired[digest] = EvictionReason.HOST if for_room else EvictionReason.RETIRED

    def hold(self, adapter: Adapter) -> PackedAdapter:
        """Keep an adapter until `release`, beside the bound if there is no room within. Raises AdapterRefused.

        One that was not added stays unknown to requests.
        """
        with self._lock:
            if adapter.digest in self.packed:
                self.held[adapter.digest] += 1
                return self.packed[adapter.digest]
        packed = self._pack(adapter, self._arena.allocate_apart)
        with self._lock:
            if adapter.digest not in self.packed:
                self._retired[adapter.digest] = EvictionReason.RETIRED
            self._put(adapter.digest, packed)
            self.held[adapter.digest] += 1
            return self.packed[adapter.digest]

    def release(self, digest: AdapterDigest) -> None:
        """Undo one `hold`. What nobody added meanwhile goes with the next `sweep`."""
        with self._lock:
            self.held[digest] -= 1
            if not self.held[digest]:
                del self.held[digest]

    def sweep(self) -> None:
        """Let go of what is retired and neither held, nor used by a request, nor being loaded."""
        with self._lock:
            for digest in [d for d in self._retired if not self.held[d] and not self._scheduler.uses_adapter(d)]:
                reason = self._retired[digest]
                if self._loader.is_reading(digest) or not self._scheduler.retire_adapter(digest, reason):
                    continue  # it is still being loaded
                packed = self.packed.pop(digest, None)
                if packed is not None:
                    packed.image.free()
                self.load_s.pop(digest, None)
                self._loader.forget(digest)
                self._retired.pop(digest, None)

    # ------------------------------------------------------------------ without requests
    def pin(self, digest: AdapterDigest) -> None:
        """Bring an adapter into the pool and keep it there until `unpin` or `retire`.

        Raises ModelNotFound for one that is not here or leaves, InvalidRequest and Overloaded.
        """
        self._scheduler.pin_adapter(digest, self._num_pages(digest))

    def unpin(self, digest: AdapterDigest) -> None:
        """Undo `pin`, if it is pinned."""
        self._scheduler.unpin_adapter(digest)

    def preload(self, digest: AdapterDigest, *, only_free: bool) -> None:
        """Bring an adapter into the pool while nothing waits, if there is room. Raises ModelNotFound as `pin`."""
        self._scheduler.preload_adapter(digest, self._num_pages(digest), only_free=only_free)

    def _num_pages(self, digest: AdapterDigest) -> int:
        packed = self.packed.get(digest)
        if packed is None or digest in self._retired:
            raise ModelNotFound(digest)
        return packed.num_pages

    # ------------------------------------------------------------------ requests
    def pages_of(self, request: Request) -> int:
        """Pages of a request's adapter, 0 for the base. Raises ModelNotFound for one that is not here or leaves."""
        if request.adapter is None:
            return 0
        packed = self.packed.get(request.adapter.digest)
        if packed is None or request.adapter.digest in self._retired:
            raise ModelNotFound(request.adapter.name)
        return packed.num_pages

    def check_load(self, request: Request, now: float) -> None:
        """Raise Overloaded while the load of a request's adapter, which has failed, is not tried again."""
        if request.adapter is not None:
            wait_s = self._loader.retry_in_s(request.adapter.digest, now)
            if wait_s > 0.0 and not self._scheduler.residency.is_resident(request.adapter.digest):
                raise load_failed(request.adapter.name, wait_s)

    # ------------------------------------------------------------------ into the pool
    @property
    def has_work(self) -> bool:
        """Whether a load is on its way or can begin without a request."""
        return self.is_loading or self._scheduler.preloads.can_begin

    @property
    def is_loading(self) -> bool:
        return bool(self._loader)

    def advance_loads(self, now: float, fail: FailWaiting, lead_s: float) -> None:
        """Begin loads for what waits, copy some, and let start whose adapter is there, or will be in `lead_s`."""
        for load in self._scheduler.start_loads(now):
            self._loader.begin(load.digest, load.pages, self.packed[load.digest].image)
        for ended in self._loader.advance(is_idle=not self._scheduler.running, lead_s=lead_s):
            if ended.error is None:
                self._take_load(ended)
            else:
                self._fail_load(ended, now, fail)
        self._tell_thrash(now)

    def _tell_thrash(self, now: float) -> None:
        reloads, pool = self._scheduler.residency.reloads, self._scheduler.pool
        count = reloads.thrash(now)
        if count:
            _log.warning(
                "in the last minute %d adapters were loaded that had been evicted shortly before; %d pages more would "
                "have spared nine in ten of them (--kv-pages or --memory; the pool has %d pages)",
                count,
                reloads.missing(now),
                pool.num_pages,
            )

    def _take_load(self, ended: LoadEnded) -> None:
        self._scheduler.adapter_ready(ended.digest)
        self._loader.forget(ended.digest)
        self.load_s[ended.digest] = ended.seconds
        self._counters.num_adapter_loads += 1
        self._counters.adapter_load_s += ended.seconds

    def _fail_load(self, ended: LoadEnded, now: float, fail: FailWaiting) -> None:
        self._counters.num_load_failures += 1
        until = self._loader.back_off(ended.digest, now)
        _log.warning("adapter %s could not be loaded", OwnText(ended.digest), exc_info=ended.error)
        for seq in self._scheduler.adapter_failed(ended.digest, until):
            fail(seq, until - now)
