"""Long work of administrators: tenants in turn, one of each kind, bounded."""

import asyncio
import random
import threading
from collections import Counter
from pathlib import Path

import pytest

from loraplex.core import CallerLimitReached, Overloaded
from loraplex.registry import Role
from loraplex.server.work import TenantWork, WorkKind

from .helpers import assert_error, until
from .registry_world import Site

pytestmark = pytest.mark.anyio


async def test_a_tenant_has_one_place_of_each_kind() -> None:
    work = TenantWork()
    with (
        work.place(WorkKind.UPLOAD, "a"),
        work.place(WorkKind.VERIFICATION, "a"),
        work.place(WorkKind.UPLOAD, "b"),
        pytest.raises(CallerLimitReached, match="one upload at a time"),
        work.place(WorkKind.UPLOAD, "a"),
    ):
        pass
    with work.place(WorkKind.UPLOAD, "a"):
        pass


async def test_tenants_take_turns_however_much_one_of_them_asked_for() -> None:
    work, gate, order = TenantWork(num_threads=1), threading.Event(), list[str]()
    blocker = asyncio.create_task(work.run("z", gate.wait, 5))
    await asyncio.sleep(0)
    tasks = [asyncio.create_task(work.run("greedy", order.append, "greedy")) for _ in range(10)]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(work.run(name, order.append, name)) for name in ("a", "b")]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(blocker, *tasks)
    assert order[:3] == ["greedy", "a", "b"]


async def test_one_tenant_never_has_all_threads() -> None:
    work, gate = TenantWork(num_threads=2), threading.Event()
    mine = [asyncio.create_task(work.run("greedy", gate.wait, 5)) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert await asyncio.wait_for(work.run("other", lambda: "done"), 2) == "done"
    gate.set()
    await asyncio.gather(*mine)


async def test_too_much_waiting_work_is_refused() -> None:
    work, gate = TenantWork(num_threads=1, max_waiting=2), threading.Event()
    tasks = [asyncio.create_task(work.run(name, gate.wait, 5)) for name in ("a", "b", "c")]
    await asyncio.sleep(0.01)
    with pytest.raises(Overloaded, match="2 pieces of work are waiting"):
        await work.run("d", gate.wait, 5)
    gate.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("seed", range(3))
async def test_work_that_fails_or_is_given_up_leaves_no_thread_taken(seed: int) -> None:
    rng, work = random.Random(seed), TenantWork(num_threads=2, max_waiting=1000)
    running: Counter[str] = Counter()

    def call(tenant: str, fails: bool) -> None:
        running[tenant] += 1
        assert running[tenant] == 1
        threading.Event().wait(0.001)
        running[tenant] -= 1
        if fails:
            raise ValueError

    async def client() -> None:
        for _ in range(20):
            tenant = rng.choice("abc")
            task = asyncio.create_task(work.run(tenant, call, tenant, rng.random() < 0.2))
            if rng.random() < 0.4:
                await asyncio.sleep(rng.random() * 0.003)
                task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            assert result is None or isinstance(result, ValueError | asyncio.CancelledError), result

    await asyncio.gather(*(client() for _ in range(6)))
    await until(lambda: not work._running)
    assert not work._waiting
    assert await work.run("a", lambda: 5) == 5


async def test_a_second_verification_of_a_tenant_is_refused_and_others_go_on(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.tenant("acme", "one")
    site.tenant("globex", "two", first_seed=5)
    path = "/admin/v1/tenants/{}/adapters/{}/versions/1/verify"
    site.engine.compare_s = 0.3
    acme, globex = (site.world.key(name, Role.TENANT_ADMIN) for name in ("acme", "globex"))
    async with site.client(acme) as client, site.client(globex) as other:
        flood = [asyncio.create_task(client.post(path.format("acme", "one"), json={})) for _ in range(5)]
        await asyncio.sleep(0.1)
        answer = await other.post(path.format("globex", "two"), json={})
        assert answer.status_code == 200
        answers = await asyncio.gather(*flood)
        assert sorted(answer.status_code for answer in answers) == [200] + [429] * 4
        assert_error(next(answer for answer in answers if answer.status_code == 429), 429, code="caller_limit")
        assert (await client.post(path.format("acme", "one"), json={})).status_code == 200
    site.close()
