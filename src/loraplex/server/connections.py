"""Connections: how many there may be, and how long one may take to say what it wants."""

import asyncio
import json
import resource
from types import MappingProxyType
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from loraplex.core import Overloaded, OverloadReason
from loraplex.server.errors import INVALID, UNAVAILABLE, ErrorKind, ErrorReply

_SPARE_FILES = 256  # for the registry, weights and uploads
_PHRASES = MappingProxyType(
    {
        408: ("Request Timeout", INVALID.type),
        503: ("Service Unavailable", UNAVAILABLE.type),
    }
)


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol, which waits for ever for the rest of a request's headers, and takes any number of clients.

    `header_timeout_s` runs from the connection's beginning, and from the first byte after an answer, to the end of the
    request's headers. Of more than `max_connections` at a time, the newest get a 503 at once.
    """

    header_timeout_s: ClassVar[float]
    max_connections: ClassVar[int]
    _header_timer: asyncio.TimerHandle | None = None
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Watch a new connection, or refuse it."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._is_refused = True
            message = f"The server has {self.max_connections} connections, which is the limit."
            self._refuse(503, Overloaded.code, message, OverloadReason.CONNECTIONS)
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        """Take in bytes."""
        if self._is_refused:
            return
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """End a request; one that was sent right behind it may have begun."""
        super().on_response_complete()
        if self.conn.trailing_data[0]:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_watching()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Time the headers while no request is being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watching()
        elif self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(self.header_timeout_s, self._give_up)

    def _stop_watching(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _give_up(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            message = f"The headers of the request did not arrive within {self.header_timeout_s:g} s."
            self._refuse(408, "request_timeout", message)

    def _refuse(self, status: int, code: str, message: str, why: str | None = None) -> None:
        """Answer outside of HTTP's state, as no request is known, and close."""
        reason, kind = _PHRASES[status]
        body = json.dumps(ErrorReply(ErrorKind(status, kind), code, message, reason=why).body())
        head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        retry = "Retry-After: 1\r\n" if status == 503 else ""
        self.transport.write(f"{head}{retry}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        self.transport.close()


def limited_protocol(header_timeout_s: float, max_connections: int) -> type[asyncio.Protocol]:
    """The protocol with these limits; fewer connections where the process may not open as many files."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = max_connections if allowed == resource.RLIM_INFINITY else min(max_connections, allowed - _SPARE_FILES)
    fields: dict[str, Any] = {"header_timeout_s": header_timeout_s, "max_connections": max(1, most)}
    return type("Protocol", (LimitedProtocol,), fields)
