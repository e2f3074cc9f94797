"""Which pages of a few blocks are free, as runs of neighbours. Plain numbers: no memory is touched here."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class PageRun:
    """Pages `start` to `end` (exclusive) of a block."""

    block: int
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


class FreeRuns:
    """Free pages as runs that never touch each other. Belongs to whoever holds its owner's lock."""

    __slots__ = ("_runs", "num_pages")

    def __init__(self) -> None:
        self._runs: list[PageRun] = []  # sorted
        self.num_pages = 0

    @property
    def longest(self) -> int:
        return max(map(len, self._runs), default=0)

    def take(self, num_pages: int) -> tuple[PageRun, ...]:
        """Take pages that are free: the smallest run that holds them all, else as few runs as possible."""
        assert 0 < num_pages <= self.num_pages, "more pages are taken than are free"
        taken: list[PageRun] = []
        while num_pages:
            fitting = [run for run in self._runs if len(run) >= num_pages]
            run = min(fitting, key=len) if fitting else max(self._runs, key=len)
            taken.append(self._take_from(run, min(num_pages, len(run))))
            num_pages -= len(taken[-1])
        return tuple(taken)

    def _take_from(self, run: PageRun, num_pages: int) -> PageRun:
        at, middle = bisect_left(self._runs, run), run.start + num_pages
        self._runs[at : at + 1] = [PageRun(run.block, middle, run.end)] if middle < run.end else []
        self.num_pages -= num_pages
        return PageRun(run.block, run.start, middle)

    def give(self, runs: Iterable[PageRun]) -> None:
        """Take pages back, or in for the first time. Pages that are free already are an error."""
        for run in runs:
            self._give(run)

    def _give(self, run: PageRun) -> None:
        at = bisect_left(self._runs, run)
        before, after = (self._runs[i] if 0 <= i < len(self._runs) else None for i in (at - 1, at))
        start, end = run.start, run.end
        if before is not None and before.block == run.block:
            assert before.end <= run.start, f"pages {run} were free already"
        if after is not None and after.block == run.block:
            assert run.end <= after.start, f"pages {run} were free already"
        if before is not None and (before.block, before.end) == (run.block, run.start):
            start = before.start
            self._runs.remove(before)
        if after is not None and (after.block, after.start) == (run.block, run.end):
            end = after.end
            self._runs.remove(after)
        insort(self._runs, PageRun(run.block, start, end))
        self.num_pages += len(run)
