"""Async plumbing: cancel work when the client goes, merge the outputs of several requests, send server-sent events.

What bounds a slow reader: uvicorn's `send` waits once 64 KiB are unsent, and nothing is taken from the engine while it
waits, so this side holds one event per prompt. The engine holds the rest of that request's own outputs, which
`max_tokens` and the model's context bound. After `stall_timeout_s` without progress the request is cancelled.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from loraplex.core import EngineDead
from loraplex.server.errors import reply_for

T = TypeVar("T")

DONE_EVENT = b"data: [DONE]\n\n"
_FAREWELL_TIMEOUT_S = 1.0


def event(value: Mapping[str, object]) -> bytes:
    """One server-sent event. ASCII only: some clients split lines at U+2028 or U+0085."""
    return b"data: " + json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and ClientDisconnect raised, if the client goes first.

    Starlette does this for streaming bodies only, so a plain answer would be computed for nobody.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True, slots=True)
class Tagged(Generic[T]):
    """An item of one of several merged iterators."""

    source_idx: int
    item: T


@dataclass(frozen=True, slots=True)
class _Ended:
    """The end of a merged iterator, with the error that ended it."""

    error: Exception | None = None


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[Tagged[T], None]:
    """Items of all sources as they come. The first error ends all; closing this closes every source."""
    if len(sources) == 1:  # the common case needs no queue and no task
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield Tagged(0, item)
        return
    queue: asyncio.Queue[Tagged[T | _Ended]] = asyncio.Queue(maxsize=len(sources))
    pumps = [asyncio.create_task(_pump(idx, source, queue)) for idx, source in enumerate(sources)]
    num_running = len(pumps)
    try:
        while num_running:
            tagged = await queue.get()
            if isinstance(tagged.item, _Ended):
                if tagged.item.error is not None:
                    raise tagged.item.error
                num_running -= 1
            else:
                yield Tagged(tagged.source_idx, tagged.item)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(idx: int, source: AsyncGenerator[T, None], queue: "asyncio.Queue[Tagged[T | _Ended]]") -> None:
    try:
        async with aclosing(source):
            async for item in source:
                await queue.put(Tagged(idx, item))
    except Exception as error:
        await queue.put(Tagged(idx, _Ended(error)))
    else:
        await queue.put(Tagged(idx, _Ended()))


async def close(iterator: AsyncIterator[object]) -> None:
    """Close an async iterator early, which cancels what it stands for."""
    if isinstance(iterator, AsyncGenerator):
        await iterator.aclose()


class EventStream(StreamingResponse):
    """Server-sent events that end, and close their source, when the client goes or reads nothing for too long."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str], stall_timeout_s: float) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._events = events
        self._stall_timeout_s = stall_timeout_s
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except asyncio.CancelledError:  # the server is going down: say so, as a silent end looks like an answer
            if self._has_begun:
                await self._say_farewell(send)
            raise

    async def _say_farewell(self, send: Send) -> None:
        reply = reply_for(EngineDead("The server shut down before the answer was complete."))
        with suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_TIMEOUT_S):
                await send({"type": "http.response.body", "body": event(reply.body()), "more_body": False})

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._has_begun = True
            async for data in events:
                await self._send_body(send, data, more_body=True)
            await self._send_body(send, b"", more_body=False)

    async def _send_body(self, send: Send, data: bytes, *, more_body: bool) -> None:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await send({"type": "http.response.body", "body": data, "more_body": more_body})
        except TimeoutError:
            raise ClientDisconnect from None
