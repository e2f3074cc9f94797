"""HTTP/1.1 by hand on real sockets, so that a client can leave at any byte and in any way."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

_RECV_BYTES = 65536


class Gone(Exception):
    """The server closed the connection."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of an answer."""

    status: int
    headers: dict[str, str]


def request_bytes(method: str, path: str, key: str, body: dict[str, Any] | None = None) -> bytes:
    """A request, whole."""
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer {key}\r\n"
    kind = "Content-Type: application/json\r\n" if body is not None else ""
    return f"{head}{kind}Content-Length: {len(data)}\r\n\r\n".encode() + data


class Wire:
    """One connection. `close` it; with `reset` the other side gets an RST."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._loop = asyncio.get_running_loop()

    @staticmethod
    async def open(port: int) -> "Wire":
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        return Wire(sock)

    def close(self, *, reset: bool = False) -> None:
        if reset:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()

    def half_close(self) -> None:
        """Say that nothing more comes."""
        self._sock.shutdown(socket.SHUT_WR)

    async def send(self, data: bytes) -> None:
        """Raises Gone."""
        try:
            await self._loop.sock_sendall(self._sock, data)
        except OSError as error:
            raise Gone from error

    async def _until(self, mark: bytes) -> bytes:
        """The bytes up to a mark, without it. Raises Gone."""
        start = 0
        while (at := self._buffer.find(mark, start)) < 0:
            start = max(0, len(self._buffer) - len(mark))
            await self._more()
        found = bytes(self._buffer[:at])
        del self._buffer[: at + len(mark)]
        return found

    async def _exactly(self, num_bytes: int) -> bytes:
        while len(self._buffer) < num_bytes:
            await self._more()
        found = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        return found

    async def _more(self) -> None:
        try:
            data = await self._loop.sock_recv(self._sock, _RECV_BYTES)
        except OSError as error:
            raise Gone from error
        if not data:
            raise Gone
        self._buffer += data

    async def head(self) -> Head:
        """The head of the next answer. Raises Gone."""
        status, *lines = (await self._until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.split(":", 1) for line in lines)
        return Head(int(status.split(" ", 2)[1]), {name.lower(): value.strip() for name, value in pairs})

    async def body(self, head: Head) -> bytes:
        """The body of an answer with a length, or all chunks of one without. Raises Gone."""
        if "content-length" in head.headers:
            return await self._exactly(int(head.headers["content-length"]))
        return b"".join([chunk async for chunk in self.chunks()])

    async def chunks(self) -> AsyncIterator[bytes]:
        """The chunks of a body as they come. Raises Gone."""
        while size := int(await self._until(b"\r\n"), 16):
            yield await self._exactly(size)
            await self._exactly(2)
        await self._exactly(2)
