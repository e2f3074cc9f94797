"""Host memory for adapters' page images: pages of the pool's size in large blocks, pinned where a GPU reads them.

A block is a power of two of bytes, as torch's pinned allocator rounds up to one. Blocks are never given back: pinning
takes long, and what is held stays within the bound.
"""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import overload

import torch
from torch import Tensor

from loraplex.core import AdapterRefused, RefusalReason
from loraplex.core.host_memory import HostMemoryFull
from loraplex.engine.page_runs import FreeRuns, PageRun

BLOCK_BYTES = 256 * 2**20
MAX_RUNS = 4  # in which an image may lie rather than ask for another block
_BLOCK_WAIT_S = 5.0  # for blocks that other threads are making


class HostPages:
    """An adapter's pages in host memory, in order: runs of neighbours, each a tensor [n, page_elems]."""

    __slots__ = ("_places", "runs")

    def __init__(self, runs: tuple[Tensor, ...]) -> None:
        self.runs = runs
        self._places = tuple((run, row) for run, tensor in enumerate(runs) for row in range(len(tensor)))

    def __len__(self) -> int:
        return len(self._places)

    @property
    def dtype(self) -> torch.dtype:
        return self.runs[0].dtype

    @property
    def page_elems(self) -> int:
        return self.runs[0].shape[1]

    @overload
    def __getitem__(self, at: int) -> Tensor: ...
    @overload
    def __getitem__(self, at: slice) -> "HostPages": ...
    def __getitem__(self, at: int | slice) -> "Tensor | HostPages":
        """A page [page_elems], or the pages of a slice without a step; both are views."""
        if isinstance(at, int):
            run, row = self._places[at]
            return self.runs[run][row]
        start, stop, _ = at.indices(len(self))
        return HostPages(tuple(self._between(start, stop)))

    def _between(self, start: int, stop: int) -> Iterator[Tensor]:
        first = 0
        for run in self.runs:
            piece = run[max(0, start - first) : max(0, stop - first)]
            first += len(run)
            if len(piece):
                yield piece

    def __iter__(self) -> Iterator[Tensor]:
        return (page for run in self.runs for page in run)

    def stacked(self) -> Tensor:
        """A copy of all pages [num_pages, page_elems]."""
        return torch.cat(self.runs)


class LeasedPages(HostPages):
    """Pages that are given back once, by `free`."""

    __slots__ = ("_on_free",)

    def __init__(self, runs: tuple[Tensor, ...], on_free: Callable[[], None]) -> None:
        super().__init__(runs)
        self._on_free: Callable[[], None] | None = on_free

    def free(self) -> None:
        """Give the pages back. No copy from them may be under way."""
        on_free, self._on_free = self._on_free, None
        assert on_free is not None, "pages were given back twice"
        on_free()


class HostArena:
    """Leases pages of host memory within `max_bytes` (None: as much as there is). Any thread may call its methods."""

    def __init__(
        self,
        page_elems: int,
        dtype: torch.dtype,
        *,
        max_bytes: int | None = None,
        pin_memory: bool = False,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        """`block_bytes` must be a power of two."""
        self.dtype = dtype
        self.page_bytes = page_elems * dtype.itemsize
        self.max_bytes = max_bytes
        self._page_elems = page_elems
        self._pin_memory = pin_memory
        self._block_bytes = max(block_bytes, 1 << (self.page_bytes - 1).bit_length())
        self._lock = threading.Condition()  # notified when pages may have come
        self._blocks: dict[int, Tensor] = {}  # [pages, page_elems], by number
        self._num_blocks = 0  # with those that are being made
        self._booked_bytes = 0  # of those that are being made
        self._free = FreeRuns()
        self.held_bytes = 0  # of blocks
        self.num_leased = 0  # pages

    @property
    def num_free(self) -> int:
        """Pages of blocks that nobody leases."""
        return self._free.num_pages

    def allocate(self, num_pages: int, *, as_zeros: bool = True) -> LeasedPages:
        """Lease pages. Not `as_zeros` they hold what others left: for who overwrites all of them.

        Raises HostMemoryFull, and AdapterRefused for more than can ever be held.
        """
        while True:
            with self._lock:
                self._await_blocks(num_pages)
                if self._may_take(num_pages) or not (size := self._next_block()):
                    leased = self._take(num_pages)
                    break
                number, self._num_blocks = self._num_blocks, self._num_blocks + 1
                self.held_bytes += size
                self._booked_bytes += size
            if not self._add_block(number, size):
                leased = self._take_what_is_there(num_pages, size)
                break
        for run in leased.runs if as_zeros else ():
            run.zero_()
        return leased

    def allocate_apart(self, num_pages: int) -> LeasedPages:
        """As `allocate`; where there is no room, memory of its own beside the bound, which goes when it is freed."""
        try:
            return self.allocate(num_pages)
        except HostMemoryFull:
            shape = (num_pages, self._page_elems)
            apart = torch.zeros(shape, dtype=self.dtype, pin_memory=self._pin_memory)
            return LeasedPages((apart,), lambda: None)

    def _give(self, lease: tuple[PageRun, ...]) -> None:
        with self._lock:
            self._free.give(lease)
            self.num_leased -= sum(map(len, lease))
            self._lock.notify_all()

    def _await_blocks(self, num_pages: int) -> None:
        """Where the bound leaves no further block, wait a while for those that other threads are making."""

        def is_settled() -> bool:
            return not self._booked_bytes or self._free.num_pages >= num_pages or bool(self._next_block())

        self._lock.wait_for(is_settled, _BLOCK_WAIT_S)

    def _may_take(self, num_pages: int) -> bool:
        """Whether the free pages are enough and lie together well."""
        longest = min(num_pages, self._block_bytes // self.page_bytes)
        return self._free.num_pages >= num_pages and self._free.longest * MAX_RUNS >= longest

    def _next_block(self) -> int:
        """Bytes of the next block; 0 where the bound leaves none."""
        if self.max_bytes is None:
            return self._block_bytes
        left = self.max_bytes - self.held_bytes
        size = min(self._block_bytes, 1 << (left.bit_length() - 1)) if left > 0 else 0
        return size if size >= self.page_bytes else 0

    def _add_block(self, number: int, size: int) -> bool:
        """Ask the system for a block that is booked; False if it gives none. It may take a while: without the lock."""
        try:
            shape = (size // self.page_bytes, self._page_elems)
            block = torch.empty(shape, dtype=self.dtype, pin_memory=self._pin_memory)
        except (RuntimeError, MemoryError):  # torch's out-of-memory errors are RuntimeErrors
            with self._lock:
                self.held_bytes -= size
                self._unbook(size)
            return False
        with self._lock:
            self._blocks[number] = block
            self._free.give([PageRun(number, 0, len(block))])
            self._unbook(size)
        return True

    def _unbook(self, size: int) -> None:
        self._booked_bytes -= size
        self._lock.notify_all()

    def _take_what_is_there(self, num_pages: int, size: int) -> LeasedPages:
        with self._lock:
            missing = num_pages - self._free.num_pages
            if missing <= 0:
                return self._take(num_pages)
        message = f"The system gives no {size} bytes more of memory for adapters; lower --cpu-lora-memory."
        raise HostMemoryFull(message, missing * self.page_bytes)

    def _take(self, num_pages: int) -> LeasedPages:
        if num_pages > self._free.num_pages:
            raise self._refusal(num_pages)
        lease = self._free.take(num_pages)
        self.num_leased += num_pages
        return LeasedPages(
            tuple(self._blocks[run.block][run.start : run.end] for run in lease), partial(self._give, lease)
        )

    def _refusal(self, num_pages: int) -> HostMemoryFull | AdapterRefused:
        wanted = num_pages * self.page_bytes
        there = (self._free.num_pages + self.num_leased) * self.page_bytes + self._booked_bytes
        limit = f"the server keeps {self.max_bytes} bytes of adapters in host memory (--cpu-lora-memory)"
        if wanted > there:
            return AdapterRefused(RefusalReason.TOO_LARGE, f"The adapter takes {wanted} bytes of pages; {limit}.")
        missing = wanted - self._free.num_pages * self.page_bytes
        return HostMemoryFull(
            f"{wanted} bytes are wanted for an adapter, {missing} more than are free; {limit}.", missing
        )
