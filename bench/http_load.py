"""A server of one's own in a child process, and clients that time its streamed answers token by token."""

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_S = 180.0
ANSWER_S = 120.0
_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for `output_len` tokens. `at_s`: when it comes, from the start; closed loops do not look at it."""

    model: str
    key: str
    prompt: tuple[int, ...]
    output_len: int
    at_s: float = 0.0


@dataclass(slots=True)
class Answer:
    """What became of a request. Times in seconds from the start of the run; `error` says what went wrong."""

    request_id: str
    asked_s: float
    num_tokens: int
    first_s: float = 0.0
    last_s: float = 0.0
    error: str | None = None
    is_cold: bool = False

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.asked_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / max(1, self.num_tokens - 1)


class Served:
    """`loraplex serve` with these arguments, its log in a file."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._log = log
        command = [str(Path(sys.executable).with_name("loraplex")), "serve", *arguments, "--port", str(self.port)]
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "NO_COLOR": "1"})

    def wait_ready(self) -> None:
        """Until it answers. Raises RuntimeError with the end of its log if it ends instead."""
        started = time.monotonic()
        while time.monotonic() - started < START_S and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"the server did not start: {self._log.read_text()[-2000:]}")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=60)

    def gauge(self, name: str) -> float:
        """A metric without labels; metrics must be public."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))

    def mark_cold(self, answers: Sequence[Answer]) -> None:
        """Note which requests ran on an adapter that had to be brought in, as the server's log says."""
        by_id = {answer.request_id: answer for answer in answers}
        with self._log.open() as file:
            for line in file:
                if '"event": "request"' in line or '"event":"request"' in line:
                    entry = json.loads(line)
                    if (answer := by_id.get(entry["request_id"])) is not None:
                        answer.is_cold = entry["cold"]


# ---------------------------------------------------------------------- clients
@dataclass(slots=True)
class _Clients:
    port: int
    started: float = field(default_factory=time.perf_counter)
    answers: list[Answer] = field(default_factory=list)

    def now(self) -> float:
        return time.perf_counter() - self.started

    async def ask(self, ask: Ask, asked_s: float) -> None:
        answer = Answer(f"bench-{os.getpid()}-{next(_ids)}", asked_s, ask.output_len)
        self.answers.append(answer)
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._stream(ask, answer)
        except (OSError, TimeoutError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"

    async def _stream(self, ask: Ask, answer: Answer) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(_request(ask, answer.request_id))
            await writer.drain()
            status = (await reader.readline()).split()[1]
            is_complete = False
            async for line in reader:
                if line.startswith(b"data: [DONE]"):
                    is_complete = True
                elif line.startswith(b"data: "):
                    answer.last_s = self.now()
                    answer.first_s = answer.first_s or answer.last_s
                elif status != b"200" and line.startswith(b"{"):
                    raise ValueError(line.decode(errors="replace")[:300])
            if not is_complete:
                raise ValueError(f"status {status.decode()}, and the stream did not end")
        finally:
            writer.close()


def _request(ask: Ask, request_id: str) -> bytes:
    fields = {"model": ask.model, "prompt": list(ask.prompt), "max_tokens": ask.output_len, "temperature": 0.0}
    body = json.dumps(fields | {"ignore_eos": True, "stream": True}).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: 127.0.0.1",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        f"X-Request-Id: {request_id}",
        f"Authorization: Bearer {ask.key}",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


async def _closed(clients: _Clients, asks: Sequence[Ask], num_clients: int) -> None:
    left = iter(asks)

    async def client() -> None:
        for ask in left:
            await clients.ask(ask, clients.now())

    await asyncio.gather(*(client() for _ in range(num_clients)))


async def _open(clients: _Clients, asks: Sequence[Ask]) -> None:
    async def one(ask: Ask) -> None:
        await asyncio.sleep(max(0.0, ask.at_s - clients.now()))
        await clients.ask(ask, ask.at_s)

    await asyncio.gather(*(one(ask) for ask in asks))


@dataclass(frozen=True, slots=True)
class Load:
    """Answers of a run, and the most that a gauge showed meanwhile."""

    answers: list[Answer]
    seconds: float
    most: float

    @property
    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error is not None]


def run_load(
    server: Served, asks: Sequence[Ask], *, num_clients: int | None, watch: Callable[[], float] = lambda: 0.0
) -> Load:
    """`num_clients` ask one request after the other, all of one list; None: each request is asked at its time.

    `watch` is called once a second from a thread.
    """
    clients = _Clients(server.port)

    async def watched() -> float:
        most = await asyncio.to_thread(watch)
        while True:
            try:
                await asyncio.sleep(1.0)
            except asyncio.CancelledError:
                return most
            most = max(most, await asyncio.to_thread(watch))

    async def run() -> float:
        watcher = asyncio.create_task(watched())
        await (_open(clients, asks) if num_clients is None else _closed(clients, asks, num_clients))
        watcher.cancel()
        return await watcher

    most = asyncio.run(run())
    server.mark_cold(clients.answers)
    return Load(clients.answers, clients.now(), most)


def hardware() -> Mapping[str, Any]:
    """Processor and cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return {"cpu": model, "cpu_cores": len(os.sched_getaffinity(0))}
