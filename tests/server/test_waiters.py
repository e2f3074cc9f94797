"""Who waits for an adapter before the engine queues it: counted by stage, and bounded as the queue is."""

import asyncio
import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters import Adapter
from loraplex.core import AdapterDigest, Overloaded
from loraplex.registry import Registry
from loraplex.server import ServerConfig
from loraplex.server.adapter_reads import AdapterSource
from loraplex.server.host_adapters import HostAdapters
from loraplex.server.host_room import HostRoom
from loraplex.server.threads import LONG_TEXT
from loraplex.server.waiters import Stage, Waiters
from loraplex.testing import FakeEngine

from .helpers import assert_error, until, waiting_counts
from .registry_world import BASE_NAME, Site, ask, fake_engine

pytestmark = pytest.mark.anyio

A, B, C = (AdapterDigest(letter * 64) for letter in "abc")


class World:
    """Host memory; reading and checking of adapters can be held up."""

    def __init__(self, max_adapters: int | None = None) -> None:
        self.now = 0.0
        self.engine = FakeEngine()
        self.waiters = Waiters(self.engine, lambda: self.now)
        self.host = HostAdapters(self.engine, HostRoom(max_adapters, 10**9), 5.0)
        self.reading, self.checking = threading.Event(), threading.Event()

    async def use(self, digest: AdapterDigest, num_sequences: int = 1) -> None:
        with self.waiters.enter("acme", num_sequences) as waiter:
            await asyncio.sleep(0)
            await self.host.acquire("acme", AdapterSource(digest, 1, "x", partial(self._read, digest)), waiter)

    def _read(self, digest: AdapterDigest) -> partial[Adapter]:
        assert self.reading.wait(30)
        return partial(self._check, digest)

    def _check(self, digest: AdapterDigest) -> Adapter:
        assert self.checking.wait(30)
        return Adapter(digest, (), 1, 0, (), None)

    @property
    def counts(self) -> dict[Stage, int]:
        return waiting_counts(self.waiters)


async def test_requests_are_counted_in_the_stage_that_they_are_in() -> None:
    world = World()
    world.engine.max_held = 0
    first = asyncio.create_task(world.use(A, 2))
    await asyncio.sleep(0)
    assert world.counts == {Stage.NAME: 2}
    await until(lambda: world.counts == {Stage.READ: 2})
    world.now = 7.0
    second = asyncio.create_task(world.use(A))
    await until(lambda: world.counts == {Stage.READ: 3})
    figures = {one.stage: one for one in world.waiters.figures()}
    assert (figures[Stage.READ].oldest_s, figures[Stage.PACK].oldest_s) == (7.0, 0.0)
    world.reading.set()
    await until(lambda: world.counts == {Stage.PACK: 3})
    world.checking.set()
    await until(lambda: world.counts == {Stage.PLACE: 3})  # there is no room for its pages
    world.engine.max_held = 1
    await asyncio.gather(first, second)
    assert world.counts == {}


async def test_a_request_that_finds_no_place_counts_until_it_leaves() -> None:
    world = World(max_adapters=1)
    world.reading.set()
    world.checking.set()
    await world.use(A)
    waiting = asyncio.create_task(world.use(B, 4))
    await until(lambda: world.counts == {Stage.PLACE: 4})
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (world.counts, world.waiters._by_tenant) == ({}, {})


async def test_who_waits_here_counts_to_the_queue() -> None:
    world = World()
    world.engine.max_waiting = 3
    waiting = asyncio.create_task(world.use(A, 2))
    await until(lambda: bool(world.counts))
    with pytest.raises(Overloaded):
        await world.use(B, 2)
    another = asyncio.create_task(world.use(C))
    await until(lambda: world.counts == {Stage.READ: 3})
    world.reading.set()
    world.checking.set()
    await asyncio.gather(waiting, another)
    await world.use(B, 3)


@pytest.fixture
def store_gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What every read of the artifact store waits for."""
    gate, real = threading.Event(), Registry.read

    def slow(self: Registry, *args: Any) -> Any:
        assert gate.wait(30)
        return real(self, *args)

    monkeypatch.setattr(Registry, "read", slow)
    return gate


async def test_a_store_that_is_slow_gathers_no_more_requests_than_the_queue_holds(
    tmp_path: Path, store_gate: threading.Event
) -> None:
    site = Site(tmp_path, engine=fake_engine(max_waiting=3))
    async with site.client(site.tenant("acme", "a", "b")) as client:
        waiting = [
            asyncio.create_task(client.post("/v1/completions", json=ask(model, n=n, temperature=1.0)))
            for model, n in (("a", 2), ("b", 1))
        ]
        await until(
            lambda: 'loraplex_host_waiting{stage="read"} 3.0' in site.app.state.service.metrics.render().decode()
        )
        for model in ("a", BASE_NAME):
            assert_error(await client.post("/v1/completions", json=ask(model)), 503, code="overloaded")
        store_gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
        assert (await client.post("/v1/completions", json=ask("a"))).status_code == 200
    site.close()


async def test_a_full_queue_is_noticed_before_an_adapter_is_read_or_another_leaves_for_it(tmp_path: Path) -> None:
    site = Site(tmp_path, engine=fake_engine(), config=ServerConfig(max_host_adapters=1))
    async with site.client(site.tenant("acme", "a", "b")) as client:
        assert (await client.post("/v1/completions", json=ask("a"))).status_code == 200
        site.engine.max_running = 0
        assert_error(await client.post("/v1/completions", json=ask("b")), 503, code="overloaded")
        assert (site.engine.retired, len(site.engine.held)) == ([], 1)
        assert site.app.state.service.catalog.host_figures().from_store.count == 1
    site.close()


class LeavingClient:
    """An ASGI client that asks for a completion and goes once that is told to it."""

    def __init__(self, key: str, body: dict[str, Any]) -> None:
        self.body, self.has_left = json.dumps(body).encode(), asyncio.Event()
        self.unsent = [{"type": "http.request", "body": self.body, "more_body": False}]
        named = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self.headers = [(name.encode(), value.encode()) for name, value in named.items()]

    async def call(self, app: Any) -> None:
        path = "/v1/completions"
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode()}
        scope |= {"query_string": b"", "root_path": "", "scheme": "http", "server": ("test", 80), "client": ("c", 1)}
        await app({**scope, "headers": self.headers}, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self.unsent:
            return self.unsent.pop()
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        raise AssertionError(f"nobody is there to be told {message}")


async def leave(site: Site, key: str, stage: Stage) -> None:
    """Three clients ask for "a", and go while they wait in a stage."""
    service = site.app.state.service
    clients = [LeavingClient(key, ask("a")) for _ in range(3)]
    calls = [asyncio.create_task(one.call(site.app)) for one in clients]
    await until(lambda: waiting_counts(service.waiters) == {stage: 3})
    for one in clients:
        one.has_left.set()
    async with asyncio.timeout(5.0):
        await asyncio.gather(*calls)
    assert [line["status"] for line in site.lines() if line["event"] == "request"] == [499] * 3
    assert service.waiters._by_tenant == {}


async def test_clients_that_leave_while_a_store_is_slow_take_nobodys_place(
    tmp_path: Path, store_gate: threading.Event
) -> None:
    site = Site(tmp_path, engine=fake_engine(max_waiting=3))
    key = site.tenant("acme", "a")
    await leave(site, key, Stage.READ)
    catalog = site.app.state.service.catalog
    async with site.client(key) as client:
        assert (await client.post("/v1/completions", json=ask(BASE_NAME))).status_code == 200
        store_gate.set()
        await until(lambda: catalog.host_figures().num_ready == 1)
        await until(lambda: not catalog._host._room.num_used("acme"))
        assert (await client.post("/v1/completions", json=ask("a"))).status_code == 200
    assert catalog.host_figures().from_store.count == 1, "what was read for those who left is kept"
    site.close()


async def test_for_clients_that_leave_before_their_name_is_resolved_nothing_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, gate, real = Site(tmp_path, engine=fake_engine(max_waiting=3)), threading.Event(), Registry.resolve
    key = site.tenant("acme", "a")

    def slow(self: Registry, *args: Any) -> Any:
        assert gate.wait(30)
        return real(self, *args)

    monkeypatch.setattr(Registry, "resolve", slow)
    await leave(site, key, Stage.NAME)
    gate.set()
    catalog = site.app.state.service.catalog
    async with site.client(key) as client:
        assert (await client.post("/v1/completions", json=ask(BASE_NAME))).status_code == 200
        figures = catalog.host_figures()
        assert (figures.num_ready, figures.from_store.count, catalog._host._room.num_used("acme")) == (0, 0, 0)
        assert (await client.post("/v1/completions", json=ask("a"))).status_code == 200
    site.close()


async def test_a_request_counts_to_the_queue_while_its_prompt_is_made_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, gate, real = Site(tmp_path, engine=fake_engine(max_waiting=1)), threading.Event(), FakeEngine.encode

    def slow(self: FakeEngine, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        assert len(text) < LONG_TEXT or gate.wait(30)
        return real(self, text[:8], add_special_tokens)

    monkeypatch.setattr(FakeEngine, "encode", slow)
    async with site.client(site.tenant("acme", "a")) as client:
        long = asyncio.create_task(client.post("/v1/completions", json=ask("a", prompt="x" * (LONG_TEXT + 1))))
        metrics = site.app.state.service.metrics
        await until(lambda: 'loraplex_host_waiting{stage="text"} 1.0' in metrics.render().decode())
        assert_error(await client.post("/v1/completions", json=ask(BASE_NAME)), 503, code="overloaded")
        gate.set()
        assert (await long).status_code == 200
        assert (await client.post("/v1/completions", json=ask(BASE_NAME))).status_code == 200
    site.close()
