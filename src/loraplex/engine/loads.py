"""Loads on their way: adapters' page images are copied to their pages beside the steps, in pieces on a CPU.

Nobody reads a page before its load is ready: the scheduler plans no step with the adapter until then. Where copies run
by themselves, a load is ready as soon as it will have arrived when the next step begins, and the device sees to it that
the step begins after it all the same.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loraplex.core import AdapterDigest, PageId
from loraplex.engine.host_arena import HostPages
from loraplex.engine.runner import LoadMark, Runner

PIECE_BYTES = 16 * 2**20  # copied between two steps of a CPU: 3 ms on two cores, 8 where pages are touched first
IDLE_PIECE_BYTES = 64 * 2**20  # the same while nothing runs
LOADING_BYTES = 512 * 2**20  # on their way at once
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 60.0


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A load that is ready, or that went wrong: then `error` says how."""

    digest: AdapterDigest
    seconds: float  # since it began
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class _Load:
    digest: AdapterDigest
    pages: Sequence[PageId]
    image: HostPages
    began_s: float
    num_copied: int = 0
    mark: LoadMark | None = None  # set when everything is on its way
    is_held_up: bool = False  # the copies wait for steps that ran when they were called
    error: Exception | None = None


class AdapterLoader:
    """Copies page images in the order in which loads began, and says which have ended."""

    def __init__(self, runner: Runner, page_bytes: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._runner = runner
        self._page_bytes = page_bytes
        self._clock = clock
        self._loads: deque[_Load] = deque()
        self._followed: dict[AdapterDigest, LoadMark] = {}  # ready, and perhaps still on their way
        self._num_failures: dict[AdapterDigest, int] = {}
        self._retry_at_s: dict[AdapterDigest, float] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def begin(self, digest: AdapterDigest, pages: Sequence[PageId], image: HostPages) -> None:
        """Take a load on."""
        assert len(pages) == len(image), "a load of other pages than the adapter has"
        self._loads.append(_Load(digest, pages, image, self._clock()))

    def advance(self, *, is_idle: bool, lead_s: float = 0.0) -> list[LoadEnded]:
        """Copy the next piece, unless copies run by themselves; the loads that have ended, or will in `lead_s`.

        That is when the next step is about to begin. While nothing runs, it may as well wait for the first load.
        """
        left = max(1, (IDLE_PIECE_BYTES if is_idle else PIECE_BYTES) // self._page_bytes)
        for load in self._loads:
            if load.mark is None and left > 0:
                left -= self._copy(load, len(load.pages) if self._runner.copies_aside else left)
        ended, on_the_way = list[LoadEnded](), deque[_Load]()
        num_bytes, is_held_up = 0, False
        for load in self._loads:
            is_held_up = is_held_up or load.is_held_up  # copies keep their order
            is_done = load.mark is not None and load.mark.is_done()
            num_bytes += 0 if is_done else len(load.pages) * self._page_bytes
            wait_s = 0.0 if is_done else self._runner.copy_s(num_bytes)
            may_wait = not is_held_up and (wait_s <= lead_s or (is_idle and not ended and not on_the_way))
            if is_done or (may_wait and self._follow(load)):
                ended.append(LoadEnded(load.digest, self._clock() - load.began_s + wait_s, load.error))
            else:
                on_the_way.append(load)
            load.is_held_up = False  # the next call comes when those steps have ended
        self._loads = on_the_way
        return ended

    def _follow(self, load: _Load) -> bool:
        """Let the next step begin after a load that is on its way; False where that cannot be."""
        if load.mark is None or load.error is not None or not self._runner.copies_aside:
            return False
        self._runner.follow(load.mark)
        self._followed[load.digest] = load.mark
        return True

    def is_reading(self, digest: AdapterDigest) -> bool:
        """Whether copies of a load that is ready may still read the adapter's image."""
        self._followed = {one: mark for one, mark in self._followed.items() if not mark.is_done()}
        return digest in self._followed

    def _copy(self, load: _Load, num_pages: int) -> int:
        """Copy the next pages of a load; how many of the CPU's time that took."""
        piece = slice(load.num_copied, load.num_copied + num_pages)
        try:
            self._runner.load(load.pages[piece], load.image[piece])
        except (RuntimeError, MemoryError, OSError) as error:
            load.error = error
        load.num_copied = min(piece.stop, len(load.pages))
        if load.error is not None or load.num_copied == len(load.pages):
            load.mark = self._runner.load_mark()
            load.is_held_up = load.mark.is_held_up
        return 0 if self._runner.copies_aside else load.num_copied - piece.start

    # ------------------------------------------------------------------ failures
    def back_off(self, digest: AdapterDigest, now: float) -> float:
        """Book a failure; the time before which the load is not tried again. It doubles with each in a row."""
        count = self._num_failures[digest] = self._num_failures.get(digest, 0) + 1
        until = now + min(FIRST_BACKOFF_S * 2.0 ** min(count - 1, 16), LONGEST_BACKOFF_S)
        self._retry_at_s[digest] = until
        return until

    def retry_in_s(self, digest: AdapterDigest, now: float) -> float:
        """Seconds until a load is tried again; 0 where none failed."""
        return max(0.0, self._retry_at_s.get(digest, now) - now)

    def forget(self, digest: AdapterDigest) -> None:
        """The adapter was loaded, or is gone: its failures no longer count."""
        self._num_failures.pop(digest, None)
        self._retry_at_s.pop(digest, None)
