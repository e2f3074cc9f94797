"""What several test files of the server share."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from loraplex.core import AdapterDigest, AdapterRef, ModelNotFound
from loraplex.server import RunConfig, build_server
from loraplex.server.waiters import Stage, Waiters

BASE = "fake-base"
ALPHA = AdapterRef("acme/alpha", 3, AdapterDigest("a" * 64))
BETA = AdapterRef("beta", 1, AdapterDigest("b" * 64))


@dataclass(frozen=True, slots=True)
class Entry:
    ref: AdapterRef
    created: float = 1_700_000_000.5
    declared_base: str | None = None


class FakeCatalog:
    """LocalModels with two adapters, each callable by name and by name@version."""

    def __init__(self) -> None:
        self.leased: list[AdapterRef] = []

    def acquire(self, model: str) -> AdapterRef | None:
        ref = self.resolve(model)
        if ref is not None:
            self.leased.append(ref)
        return ref

    def release(self, ref: AdapterRef) -> None:
        self.leased.remove(ref)

    def load(self, name: str, directory: Path, *, created: float, replace: bool = False) -> AdapterRef:
        raise AssertionError("nothing is loaded here")

    def unload(self, name: str) -> AdapterRef:
        raise AssertionError("nothing is unloaded here")

    def resolve(self, model: str) -> AdapterRef | None:
        if model == BASE:
            return None
        for ref in (ALPHA, BETA):
            if model in (ref.name, ref.label):
                return ref
        raise ModelNotFound(model)

    def list(self) -> tuple[Entry, ...]:
        return (Entry(ALPHA, declared_base="acme/base-135M"), Entry(BETA))


class LiveServer:
    """The app on uvicorn, on a free loopback port, in a thread."""

    def __init__(self, app: FastAPI, config: RunConfig | None = None) -> None:
        self._ready = threading.Event()
        self.port = 0
        self.server = build_server(app, config or RunConfig(port=0, drain_s=5), self._on_ready)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        if not self._ready.wait(10):
            raise TimeoutError("the server did not start")

    def _on_ready(self, host: str, port: int) -> None:
        self.port = port
        self._ready.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)
        if self.thread.is_alive():
            raise TimeoutError("the server did not stop")


def completion(**fields: Any) -> dict[str, Any]:
    """Body of a completion on the base that always has its 16 tokens."""
    return {"model": BASE, "prompt": "Hello", "ignore_eos": True, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    """Body of a chat completion on the base with 16 tokens."""
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": BASE, "messages": messages, "ignore_eos": True, "max_tokens": 16, **fields}


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The data objects of a stream that ended with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    assert events[-1] == "[DONE]"
    return [json.loads(data) for data in events[:-1]]


def events_of(text: str) -> list[str]:
    """The data of each server-sent event."""
    assert text.endswith("\n\n")
    events = text.split("\n\n")[:-1]
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


def assert_error(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> None:
    """One JSON shape for every error."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) - {"reason"} == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    if param is not None:
        assert body["error"]["param"] == param, body
    if code is not None:
        assert body["error"]["code"] == code, body


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for something that another task does."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def waiting_counts(waiters: Waiters) -> dict[Stage, int]:
    """Sequences of the requests that wait before the engine, by stage."""
    return {one.stage: one.num_sequences for one in waiters.figures() if one.num_sequences}
