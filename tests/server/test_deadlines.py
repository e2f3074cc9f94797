"""Who a request is for and when it must have ended, on its way from the body to the engine and back."""

import asyncio
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.core import DeadlinePassed, Overloaded, OverloadReason
from loraplex.registry import Registry
from loraplex.server.deadlines import Deadline
from loraplex.testing import FakeEngine

from .helpers import assert_error, chat, completion, events_of
from .registry_world import Site, ask

pytestmark = pytest.mark.anyio

ROUTES = [("/v1/completions", completion), ("/v1/chat/completions", chat)]


# ---------------------------------------------------------------------- who
@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_without_a_registry_all_requests_are_of_one_tenant(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: object
) -> None:
    for model in ("fake-base", "beta"):
        await client.post(path, json=body(model=model))  # type: ignore[operator]
    tenants = {request.tenant for request in engine.started}
    assert len(tenants) == 1
    assert None not in tenants, "a request of no tenant shares no prefix"


async def test_with_a_registry_a_request_is_of_its_callers_tenant(tmp_path: Path) -> None:
    site = Site(tmp_path)
    keys = [site.tenant("acme", "one"), site.tenant("globex", "two", first_seed=5)]
    for key, model in zip(keys, ("one", "two"), strict=True):
        async with site.client(key) as client:
            assert (await client.post("/v1/completions", json=ask(model))).status_code == 200
    assert [request.tenant for request in site.engine.started] == ["acme", "globex"]
    site.close()


# ---------------------------------------------------------------------- until when
@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_deadline_reaches_the_engine_less_what_has_passed(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: object
) -> None:
    await client.post(path, json=body(deadline_s=50))  # type: ignore[operator]
    await client.post(path, json=body())  # type: ignore[operator]
    first, second = (request.deadline_s for request in engine.started)
    assert first is not None
    assert 40 < first < 50
    assert second is None


@pytest.mark.parametrize("value", [0, -1, 86401, "5", True])
async def test_deadlines_that_mean_nothing_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, value: object
) -> None:
    assert_error(await client.post("/v1/completions", json=completion(deadline_s=value)), 400, "deadline_s")
    assert engine.started == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_late_answer_is_a_504(client: httpx.AsyncClient, engine: FakeEngine, stream: bool) -> None:
    engine.delay_s = 0.2
    response = await client.post("/v1/completions", json=completion(deadline_s=0.1, stream=stream))
    assert_error(response, 504, code="deadline_exceeded")
    assert response.json()["error"]["reason"] == "DEADLINE"
    assert response.json()["error"]["message"] == "The answer had not ended after 0.1 s (deadline_s)."
    assert response.headers["retry-after"] == "2"


async def test_a_stream_that_is_late_in_the_middle_says_so_in_its_last_event(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.delay_s = 0.04
    response = await client.post("/v1/completions", json=completion(deadline_s=0.2, stream=True))
    events = [json.loads(data) for data in events_of(response.text)]
    assert len(events) > 1
    assert (events[-1]["error"]["code"], events[-1]["error"]["reason"]) == ("deadline_exceeded", "DEADLINE")


async def test_an_overload_in_the_middle_of_a_stream_has_its_reason(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.error, engine.error_after = Overloaded("busy", 2.0, OverloadReason.ADAPTER_LOAD), 2
    response = await client.post("/v1/completions", json=completion(stream=True, deadline_s=60))
    error = json.loads(events_of(response.text)[-1])["error"]
    assert (error["code"], error["reason"], error["message"]) == ("overloaded", "ADAPTER_LOAD", "busy")


async def test_reading_an_adapter_ends_at_the_deadline_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path)
    key = site.tenant("acme", "one")
    read, gate = Registry.read, threading.Event()

    def slow(self: Registry, *args: Any) -> Any:
        assert gate.wait(30)
        return read(self, *args)

    monkeypatch.setattr(Registry, "read", slow)
    async with site.client(key) as client:
        response = await client.post("/v1/completions", json=ask("one", deadline_s=0.1))
        assert_error(response, 504, code="deadline_exceeded")
        assert site.engine.started == []
        gate.set()
        assert (await client.post("/v1/completions", json=ask("one", deadline_s=5))).status_code == 200
    site.close()


# ---------------------------------------------------------------------- the deadline itself
async def test_bound_gives_what_work_gives_and_what_it_raises() -> None:
    deadline = Deadline(5.0, time.perf_counter())
    assert await deadline.bound(asyncio.sleep(0, "done")) == "done"
    for error in (TimeoutError("mine"), ValueError("mine")):
        with pytest.raises(type(error), match="mine"):
            await deadline.bound(fail(error))


async def fail(error: Exception) -> None:
    raise error


async def test_bound_tells_its_own_end_from_being_cancelled() -> None:
    class Odd(asyncio.CancelledError):
        """A place that came in the moment of cancelling is raised as one of these."""

    async def work() -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            raise Odd from None

    soon = Deadline(0.01, time.perf_counter())
    for bound in (soon.bound(asyncio.sleep(10)), soon.bound(work())):
        with pytest.raises(DeadlinePassed, match=r"0\.01 s"):
            await bound
    task = asyncio.create_task(replace(soon, seconds=60.0).bound(asyncio.sleep(10)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_what_is_left_is_above_nothing_or_an_error() -> None:
    assert 0 < Deadline(5.0, time.perf_counter()).left_s() <= 5
    with pytest.raises(DeadlinePassed):
        Deadline(5.0, time.perf_counter() - 6).left_s()
