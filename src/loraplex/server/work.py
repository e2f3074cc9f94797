"""Long work that administrators ask for: a few threads, tenants in turn, and one piece of each kind for each tenant."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import ParamSpec, TypeVar

from loraplex.core import CallerLimitReached, Overloaded, OverloadReason
from loraplex.server.threads import WorkerThreads

_P = ParamSpec("_P")
_T = TypeVar("_T")

NUM_WORK_THREADS = 2
MAX_WAITING = 64  # pieces, of all tenants together
_RETRY_AFTER_S = 5.0


class WorkKind(StrEnum):
    """What a tenant may have one of at a time."""

    UPLOAD = "upload"
    VERIFICATION = "verification"
    AUDIT = "check of the audit log"
    LOAD = "load or unload of an adapter"


class TenantWork:
    """Belongs to one event loop. `place` first, then `run`; a tenant has one thread at most, so that one is left."""

    def __init__(self, num_threads: int = NUM_WORK_THREADS, max_waiting: int = MAX_WAITING) -> None:
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._threads = WorkerThreads(num_threads, "loraplex-work")
        self._places: set[tuple[WorkKind, str]] = set()
        self._running: set[str] = set()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # tenants in order of their turns

    @property
    def num_waiting(self) -> int:
        """Pieces that wait for a thread."""
        return sum(map(len, self._waiting.values()))

    @contextmanager
    def place(self, kind: WorkKind, tenant: str) -> Iterator[None]:
        """The tenant's only place for work of this kind. Raises CallerLimitReached while it is taken."""
        mine = (kind, tenant)
        if mine in self._places:
            raise CallerLimitReached(f"A tenant may have one {kind} at a time, and one is running.", _RETRY_AFTER_S)
        self._places.add(mine)
        try:
            yield
        finally:
            self._places.discard(mine)

    async def run(self, tenant: str, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """What `call` returns, made in a thread once it is the tenant's turn. Raises Overloaded if too many wait."""
        if self.num_waiting >= self._max_waiting:
            message = f"{self._max_waiting} pieces of work are waiting, which is the limit."
            raise Overloaded(message, _RETRY_AFTER_S, OverloadReason.WORK)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            self._leave(tenant, turn)
            raise
        task = asyncio.create_task(self._work(tenant, partial(call, *args, **kwargs)))
        task.add_done_callback(_retrieve)
        await asyncio.wait({task})
        return task.result()

    async def _work(self, tenant: str, call: Callable[[], _T]) -> _T:
        """A turn. It holds its thread to the end, also if nobody waits for it any more."""
        try:
            return await self._threads.run(call)
        finally:
            self._end_turn(tenant)

    def _leave(self, tenant: str, turn: "asyncio.Future[None]") -> None:
        """Give up a turn that has not been used, whether it had come or not."""
        if not turn.cancelled():
            self._end_turn(tenant)
            return
        if turn in self._waiting.get(tenant, ()):
            self._waiting[tenant].remove(turn)
            self._drop_empty(tenant)

    def _end_turn(self, tenant: str) -> None:
        self._running.discard(tenant)
        self._start_next()

    def _start_next(self) -> None:
        while len(self._running) < self._num_threads:
            tenant = next((one for one in self._waiting if one not in self._running), None)
            if tenant is None:
                return
            turn = self._waiting[tenant].popleft()
            self._waiting.move_to_end(tenant)
            self._drop_empty(tenant)
            if not turn.cancelled():
                self._running.add(tenant)
                turn.set_result(None)

    def _drop_empty(self, tenant: str) -> None:
        if tenant in self._waiting and not self._waiting[tenant]:
            del self._waiting[tenant]


def _retrieve(task: "asyncio.Task[object]") -> None:
    """Look at a failure that nobody waits for any more, so that asyncio does not report it as lost."""
    if not task.cancelled():
        task.exception()
