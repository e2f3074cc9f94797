"""Tenants of a registry on one real engine: weights, priorities and shares of the queue as clients see them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.registry import LimitChanges

from ..conftest import MakeBase
from .test_registry_engine import Real

pytestmark = pytest.mark.anyio
MakeReal = Callable[..., Real]


@pytest.fixture
def make_real(tiny_base: MakeBase, tmp_path: Path) -> Iterator[MakeReal]:
    """`make_real(**settings)`: an engine that runs one sequence at a time, and the tenants acme and globex."""
    made: list[Real] = []

    def make(**settings: Any) -> Real:
        made.append(Real(tiny_base("llama"), tmp_path, [], max_num_seqs=1, **settings))
        return made[0]

    yield make
    for real in made:
        real.close()


class Clients:
    """One client a tenant, and who was answered in which order."""

    def __init__(self, real: Real, stack: AsyncExitStack) -> None:
        self._real = real
        self._stack = stack
        self._clients: dict[str, httpx.AsyncClient] = {}
        self.ended: list[tuple[str, int]] = []

    async def add(self, tenant: str, limits: LimitChanges) -> None:
        key, _ = self._real.tenant(tenant)
        if limits:
            self._real.registry.tenants.change_limits(self._real.operator, tenant, limits)
        self._clients[tenant] = await self._stack.enter_async_context(self._real.client(key))

    async def ask(self, tenant: str, priority: int = 0, prompt: Any = (5, 6, 7)) -> httpx.Response:
        name = self._real.engine.base.name
        body = {"model": name, "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "priority": priority}
        response = await self._clients[tenant].post("/v1/completions", json=body)
        if response.status_code == 200:
            self.ended.append((tenant, priority))
        return response

    @asynccontextmanager
    async def together(self) -> AsyncIterator[Callable[[str, int], Awaitable["asyncio.Task[httpx.Response]"]]]:
        """`send(tenant, priority)`, whose requests the engine takes in at the end of the block, in their order."""
        gate, commands, num_sent = threading.Event(), self._real.engine._commands, 0
        self._real.engine._submit(lambda: gate.wait() and None)

        async def send(tenant: str, priority: int = 0) -> "asyncio.Task[httpx.Response]":
            nonlocal num_sent
            task = asyncio.create_task(self.ask(tenant, priority=priority))
            num_sent += 1
            while commands.qsize() < num_sent:
                await asyncio.sleep(0.0005)
            return task

        while commands.qsize():
            await asyncio.sleep(0.0005)
        try:
            yield send
        finally:
            gate.set()


async def test_a_tenant_of_weight_4_is_served_four_times_as_much(make_real: MakeReal) -> None:
    async with AsyncExitStack() as stack:
        clients = Clients(make_real(), stack)
        await clients.add("light", {})
        await clients.add("heavy", {"weight": 4.0})
        async with clients.together() as send:
            tasks = [await send(tenant, 0) for _ in range(20) for tenant in ("light", "heavy")]
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
    assert [tenant for tenant, _ in clients.ended[:25]].count("heavy") == pytest.approx(20, abs=1)


async def test_priorities_come_first_as_far_as_operators_allow(make_real: MakeReal) -> None:
    asked = [("acme", 5), ("acme", 0), ("globex", 3), ("globex", -10), ("acme", 100), ("globex", -1)]
    async with AsyncExitStack() as stack:
        clients = Clients(make_real(), stack)
        await clients.add("acme", {})
        await clients.add("globex", {"priority": -10})
        async with clients.together() as send:
            tasks = [await send(tenant, priority) for tenant, priority in asked]
            assert (await clients.ask("acme", priority=-1)).status_code == 400
        await asyncio.gather(*tasks)
    assert [priority for _, priority in clients.ended] == [-10, -1, 0, 3, 5, 100]


async def test_one_tenant_cannot_fill_the_queue(make_real: MakeReal) -> None:
    async with AsyncExitStack() as stack:
        clients = Clients(make_real(max_waiting=10), stack)
        for tenant in ("acme", "globex", "initech"):
            await clients.add(tenant, {})
        async with clients.together() as send:
            many = [await send("acme", 0) for _ in range(12)]
            few = [await send(tenant, 0) for tenant in ("globex", "initech")]
        assert [answer.status_code for answer in await asyncio.gather(*few)] == [200, 200]
        answers = await asyncio.gather(*many)
    assert [answer.status_code for answer in answers] == [200] * 5 + [429] * 7
    for answer in answers[5:]:
        error = answer.json()["error"]
        assert (error["code"], error["reason"]) == ("caller_limit", "SHARE")
        assert "--max-waiting 10" in error["message"]
        assert int(answer.headers["retry-after"]) >= 1


async def test_the_prompts_of_one_body_are_not_refused_for_one_another_s_sake(make_real: MakeReal) -> None:
    async with AsyncExitStack() as stack:
        clients = Clients(make_real(max_waiting=10, max_waiting_tokens=20), stack)
        await clients.add("acme", {})
        for num_prompts, status in ((10, 200), (11, 400)):
            assert (await clients.ask("acme", prompt=[[5, 6, 7]] * num_prompts)).status_code == status
