"""Connections that ask slowly, or are too many, hold nothing for long."""

import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI

from loraplex.server import RunConfig
from loraplex.server.connections import _SPARE_FILES, limited_protocol
from loraplex.server.context import MAX_HEADER_BYTES
from loraplex.testing import FakeEngine

from .helpers import LiveServer, assert_error, completion, wait_until

TIMEOUT_S = 0.4


@pytest.fixture
def server(app: FastAPI) -> Iterator[LiveServer]:
    live = LiveServer(app, RunConfig(port=0, drain_s=5, header_timeout_s=TIMEOUT_S, max_connections=3))
    yield live
    live.stop()


def connect(server: LiveServer, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    connection.sendall(data)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """All until the server closes."""
    data = b""
    while chunk := connection.recv(2**16):
        data += chunk
    return data


def assert_refused(data: bytes, status: int, code: str) -> None:
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), data
    error = json.loads(body)["error"]
    assert set(error) - {"reason"} == {"message", "type", "param", "code"}
    assert error["code"] == code


@pytest.mark.parametrize("data", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_headers_that_do_not_arrive_end_the_connection(server: LiveServer, data: bytes) -> None:
    started = time.monotonic()
    with connect(server, data) as connection:
        assert_refused(read_all(connection), 408, "request_timeout")
    assert TIMEOUT_S * 0.9 < time.monotonic() - started < TIMEOUT_S + 2


def test_bytes_that_trickle_do_not_prolong_the_time(server: LiveServer) -> None:
    with connect(server, b"GET /health HTTP/1.1\r\n") as connection:
        started = time.monotonic()
        with pytest.raises(OSError):
            for _ in range(200):
                connection.sendall(b"X-A: b\r\n")
                time.sleep(0.02)
        assert time.monotonic() - started < TIMEOUT_S + 2


def test_a_second_request_has_its_own_time(server: LiveServer) -> None:
    with connect(server, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n") as connection:
        assert connection.recv(2**16).startswith(b"HTTP/1.1 200")
        time.sleep(TIMEOUT_S * 2)  # idle, which is another matter
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /health")
        data = read_all(connection)
    first, _, rest = data.partition(b"HTTP/1.1 408")
    assert first.startswith(b"HTTP/1.1 200")
    assert_refused(b"HTTP/1.1 408" + rest, 408, "request_timeout")


def test_a_body_that_nobody_reads_does_not_hold_the_connection(server: LiveServer) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    with connect(server, head) as connection:
        started = time.monotonic()
        with pytest.raises(OSError):
            for _ in range(200):
                connection.sendall(b"x")
                time.sleep(0.02)
        assert time.monotonic() - started < TIMEOUT_S + 2


def test_long_answers_are_not_cut(server: LiveServer, engine: FakeEngine) -> None:
    engine.delay_s = TIMEOUT_S / 4
    for stream in (False, True):
        response = httpx.post(f"{server.url}/v1/completions", json=completion(max_tokens=8, stream=stream))
        assert response.status_code == 200


def test_one_connection_too_many_is_refused_at_once(server: LiveServer, engine: FakeEngine) -> None:
    engine.delay_s = 0.05
    content = json.dumps(completion(max_tokens=400)).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = head + f"Content-Length: {len(content)}\r\n\r\n".encode() + content
    running = [connect(server, request) for _ in range(3)]
    wait_until(lambda: len(engine.running) == 3)
    with connect(server) as connection:
        data = read_all(connection)
        assert_refused(data, 503, "overloaded")
        assert b"Retry-After: 1" in data
    running.pop().close()
    wait_until(lambda: len(engine.running) == 2)
    assert httpx.get(f"{server.url}/health").status_code == 200
    for connection in running:
        connection.close()


def test_fewer_connections_where_files_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda what: (1024, 4096))
    few = limited_protocol(1.0, 4096)
    assert vars(few)["max_connections"] == 1024 - _SPARE_FILES
    assert vars(limited_protocol(1.0, 100))["max_connections"] == 100


@pytest.mark.anyio
@pytest.mark.parametrize(("extra", "status"), [(0, 200), (1, 431)])
async def test_the_limit_of_headers_holds_at_its_edge(client: httpx.AsyncClient, extra: int, status: int) -> None:
    request = client.build_request("GET", "/health", headers={"X-Big": ""})
    used = len("/health") + sum(len(name) + len(value) for name, value in request.headers.raw)
    request.headers["X-Big"] = "a" * (MAX_HEADER_BYTES - used + extra)
    response = await client.send(request)
    assert response.status_code == status
    if status == 431:
        assert_error(response, 431, code="headers_too_large")
