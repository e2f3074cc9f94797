"""Threads for what would hold up the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

LONG_TEXT = 4096  # characters or tokens; about a millisecond of tokenising
NUM_TEXT_THREADS = 2


class WorkerThreads:
    """A few threads for calls that block. A call goes on in its thread if its coroutine is cancelled."""

    __slots__ = ("_pool",)

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """What `call` returns, made in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(call, *args, **kwargs))


class TextThreads:
    """Two threads for long texts: they hold up no other request, and many at once do not take all cores."""

    __slots__ = ("_threads",)

    def __init__(self) -> None:
        self._threads = WorkerThreads(NUM_TEXT_THREADS, "loraplex-text")

    async def run(self, size: int, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """What `call` returns: made here if it deals with under LONG_TEXT characters or tokens, else in a thread."""
        if size < LONG_TEXT:
            return call(*args, **kwargs)
        return await self._threads.run(call, *args, **kwargs)
