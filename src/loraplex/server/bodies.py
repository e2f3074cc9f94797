"""Reading bodies: how many bytes of them the server holds at once, and where they are parsed."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import Request

from loraplex.core import CallerLimitReached, Overloaded, OverloadReason
from loraplex.server.body import BodyT, check_media_type, parse_json, validate
from loraplex.server.body_limits import BodyLimits
from loraplex.server.context import context_of
from loraplex.server.threads import WorkerThreads

LONG_BODY_BYTES = 16 * 2**10  # parsed on the event loop below it, which takes 3 ms at most (one Xeon core)
NUM_BODY_THREADS = 2
_RETRY_AFTER_S = 1.0  # a body counts only until it is parsed: mostly for milliseconds, at most for `body_timeout_s`


class BodyBudget:
    """Bytes of bodies in flight, overall and for each caller. Belongs to one event loop."""

    __slots__ = ("_by_caller", "_max_bytes", "_max_caller_bytes", "_num_bytes")

    def __init__(self, max_bytes: int, max_caller_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_caller_bytes = max_caller_bytes
        self._num_bytes = 0
        self._by_caller: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Held now, by all."""
        return self._num_bytes

    @contextmanager
    def open(self, caller: str) -> Iterator["BodyShare"]:
        """What one body takes of the budget, given back at the end."""
        share = BodyShare(self, caller)
        try:
            yield share
        finally:
            self.give_back(share)

    def take(self, share: "BodyShare", num_bytes: int) -> None:
        """Book the next bytes of a body. Raises Overloaded, and CallerLimitReached where the caller has its fill."""
        if self._by_caller[share.caller] + num_bytes > self._max_caller_bytes:
            message = f"Bodies of this caller in flight have more than the limit of {self._max_caller_bytes} bytes."
            raise CallerLimitReached(message, _RETRY_AFTER_S)
        if self._num_bytes + num_bytes > self._max_bytes:
            message = f"All bodies in flight have more than the limit of {self._max_bytes} bytes."
            raise Overloaded(message, _RETRY_AFTER_S, OverloadReason.BODIES)
        share.num_bytes += num_bytes
        self._num_bytes += num_bytes
        self._by_caller[share.caller] += num_bytes

    def give_back(self, share: "BodyShare") -> None:
        """Forget a body."""
        self._num_bytes -= share.num_bytes
        self._by_caller[share.caller] -= share.num_bytes
        if not self._by_caller[share.caller]:
            del self._by_caller[share.caller]
        share.num_bytes = 0


@dataclass(slots=True, eq=False)
class BodyShare:
    """The bytes of one body."""

    budget: BodyBudget
    caller: str
    num_bytes: int = 0

    def take(self, num_bytes: int) -> None:
        """Book the next bytes; raises as `BodyBudget.take`."""
        self.budget.take(self, num_bytes)


class BodyReader:
    """Reads the JSON bodies of one server."""

    __slots__ = ("_limits", "_threads", "_timeout_s", "budget")

    def __init__(self, limits: BodyLimits, budget: BodyBudget, timeout_s: float) -> None:
        self.budget = budget
        self._limits = limits
        self._timeout_s = timeout_s
        self._threads = WorkerThreads(NUM_BODY_THREADS, "loraplex-body")

    @property
    def max_bytes(self) -> int:
        """Most bytes of a body."""
        return self._limits.num_bytes

    async def read(self, http: Request, schema: type[BodyT]) -> BodyT:
        """The validated body. Raises InvalidRequest (400), Overloaded, and HTTPException (408, 413, 415)."""
        check_media_type(http)
        with self.budget.open(context_of(http).known_caller.account) as share:
            data = await self._receive(http, share)
            if len(data) < LONG_BODY_BYTES:
                return self._parse(data, schema)
            return await self._threads.run(self._parse, data, schema)

    async def _receive(self, http: Request, share: BodyShare) -> bytes:
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                async for chunk in http.stream():
                    share.take(len(chunk))
                    chunks.append(chunk)
        except TimeoutError:
            message = f"The body did not arrive within {self._timeout_s:g} s."
            raise HTTPException(408, message, {"Connection": "close"}) from None
        return b"".join(chunks)

    def _parse(self, data: bytes, schema: type[BodyT]) -> BodyT:
        self._limits.check(data)
        return validate(parse_json(data), schema)
