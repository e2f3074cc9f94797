"""The time by which an answer must have ended, as its client asked for it."""

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from loraplex.core import DeadlinePassed

_T = TypeVar("_T")
_RETRY_AFTER_S = 1.0  # where the engine, which knows its queue, was not reached


@dataclass(frozen=True, slots=True)
class Deadline:
    """`seconds` after `started_at` (of `time.perf_counter`), when the request came in."""

    seconds: float
    started_at: float

    def left_s(self) -> float:
        """Seconds that are left. Raises DeadlinePassed if none are."""
        left = self.started_at + self.seconds - time.perf_counter()
        if left <= 0.0:
            raise self.passed()
        return left

    def passed(self, retry_after_s: float = _RETRY_AFTER_S) -> DeadlinePassed:
        """The error of a request that did not end in time."""
        return DeadlinePassed(f"The answer had not ended after {self.seconds:g} s (deadline_s).", retry_after_s)

    async def bound(self, work: Awaitable[_T]) -> _T:
        """What `work` gives, cancelled once the time is up. Raises DeadlinePassed, and what `work` raises."""
        scope = asyncio.timeout(max(0.0, self.started_at + self.seconds - time.perf_counter()))
        try:
            async with scope:
                return await work
        except (TimeoutError, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if scope.expired() and not (task is not None and task.cancelling()):
                raise self.passed() from error
            raise
