"""No body holds up others: parts are counted before it is parsed, long ones are parsed in threads, all share bytes."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.core import CallerLimitReached, InvalidRequest, Overloaded, limits
from loraplex.server import ServerConfig, bodies, create_app
from loraplex.server.bodies import BodyBudget
from loraplex.server.body import parse_json, validate
from loraplex.server.body_limits import MAX_CONTAINERS, MAX_STRINGS, BodyLimits, body_limits
from loraplex.server.schema import ChatBody
from loraplex.testing import FakeEngine

from .helpers import FakeCatalog, assert_error, chat, completion, until
from .registry_world import Site, ask

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
JSON_HEADERS = {"Content-Type": "application/json"}
HUGE = {
    "objects": b'{"prompt":[' + b",".join([b"{}"] * 2_700_000) + b"]}",
    "bias": b'{"logit_bias":{' + b",".join(b'"%d":1' % i for i in range(600_000)) + b"}}",
    "arrays": b'{"metadata":{"a":[' + b",".join([b"[]"] * 300_000) + b"]}}",
    "numbers": b'{"prompt":[' + b",".join([b"1"] * 400_000) + b"]}",
}


@pytest.mark.parametrize("name", HUGE)
async def test_a_body_of_too_many_parts_is_refused_unparsed(
    engine: FakeEngine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    monkeypatch.setattr(bodies, "parse_json", lambda data: parsed.append(len(data)) or {})
    config = ServerConfig(max_body_bytes=limits.MAX_BODY_BYTES)
    app = create_app(engine, FakeCatalog(), config)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        response = await client.post(COMPLETIONS, content=HUGE[name], headers=JSON_HEADERS)
    assert_error(response, 400, code="invalid_request")
    assert "the limit is" in response.json()["error"]["message"]
    assert parsed == []


@pytest.mark.parametrize("name", HUGE)
def test_counting_takes_a_fraction_of_parsing(name: str) -> None:
    def seconds(call: Callable[[bytes], object]) -> float:
        started = time.perf_counter()
        call(HUGE[name])
        return time.perf_counter() - started

    def count(data: bytes) -> None:
        with pytest.raises(InvalidRequest):
            body_limits(4096).check(data)

    assert min(seconds(count) for _ in range(3)) < seconds(parse_json)


@pytest.mark.parametrize(
    ("data", "refused"),
    [
        (b'{"a":[1,2]}', None),
        (b'{"a":[1,2,3]}', "3 values"),
        (b'{"a":[[],1]}', "3 arrays and objects"),
        (b'{"a":["b","c"]}', "3 strings"),
        (rb'{"a":"[[[{{{,,,\",,[[\\"}', None),
        (rb'{"a\\":[[],1]}', "3 arrays and objects"),
        (rb'{"\\\"[[[":[2,1]}', None),
    ],
)
def test_only_what_is_outside_of_texts_counts(data: bytes, refused: str | None) -> None:
    held = BodyLimits(num_bytes=100, num_values=2, num_strings=2, num_containers=2)
    if refused is None:
        parse_json(data)
        held.check(data)
    else:
        with pytest.raises(InvalidRequest, match=refused):
            held.check(data)


def test_the_limits_let_the_largest_bodies_of_the_api_through() -> None:
    parts = [{"type": "text", "text": '{"[,'}] * 2
    messages = [{"role": "user", "content": parts, "name": "n"}] * (limits.MAX_MESSAGES - 4)
    bias = {str(token): 1 for token in range(limits.MAX_LOGIT_BIAS)}
    largest = [
        {"model": "m", "messages": messages, "logit_bias": bias},
        {"tokens": [100_000] * limits.MAX_DETOKENIZED_TOKENS},
        {"model": "m", "prompt": [[100_000] * 1024] * limits.MAX_PROMPTS, "logit_bias": bias},
    ]
    for body in largest:
        data = json.dumps(body).encode()
        allowed = body_limits(4096)
        assert len(data) <= allowed.num_bytes
        allowed.check(data)
    validate(parse_json(json.dumps(largest[0]).encode()), ChatBody)
    assert (MAX_CONTAINERS, MAX_STRINGS) == (8192, 49152)


@pytest.mark.parametrize(("max_model_len", "num_bytes"), [(512, 2**20), (65_536, 2**21), (10**6, 8 * 2**20)])
def test_bytes_follow_from_the_context(max_model_len: int, num_bytes: int) -> None:
    assert body_limits(max_model_len).num_bytes == num_bytes
    assert body_limits(max_model_len, 1000).num_bytes == 1000


@pytest.mark.parametrize("size", [100, bodies.LONG_BODY_BYTES])
async def test_long_bodies_are_parsed_in_a_thread(
    client: httpx.AsyncClient, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def parse(data: bytes) -> dict[str, object]:
        threads.append(threading.current_thread())
        return parse_json(data)

    monkeypatch.setattr(bodies, "parse_json", parse)
    response = await client.post(COMPLETIONS, json=completion(user="x" * size))
    assert response.status_code == 200
    is_long = size >= bodies.LONG_BODY_BYTES
    assert (threads[0] is not threading.main_thread()) == is_long


# ---------------------------------------------------------------------- bytes in flight
def test_the_budget_is_held_overall_and_for_each_caller() -> None:
    budget = BodyBudget(100, 60)
    with budget.open("a") as first, budget.open("a") as second, budget.open("b") as other:
        first.take(50)
        second.take(10)
        with pytest.raises(CallerLimitReached, match="limit of 60 bytes"):
            second.take(1)
        other.take(40)
        with pytest.raises(Overloaded, match="limit of 100 bytes") as full:
            other.take(1)
        assert type(full.value) is Overloaded
    assert budget.num_bytes == 0
    assert not budget._by_caller


async def _slowly(go_on: asyncio.Event, content: bytes) -> AsyncIterator[bytes]:
    yield content[:-1]
    await go_on.wait()
    yield content[-1:]


def small_budget(**sizes: int) -> Any:
    return ServerConfig(max_body_bytes=1000, **sizes)


async def test_a_tenant_with_its_share_in_flight_gets_429_and_others_are_served(tmp_path: Path) -> None:
    site = Site(tmp_path, config=small_budget(body_budget_bytes=4000))
    key, theirs = site.tenant("acme", "one"), site.tenant("globex", "two", first_seed=5)
    content, go_on = json.dumps(ask("one", user="x" * 700)).encode(), asyncio.Event()
    budget = site.app.state.service.bodies.budget
    async with site.client(key) as client, site.client(theirs) as other:
        slow = asyncio.create_task(client.post(COMPLETIONS, content=_slowly(go_on, content), headers=JSON_HEADERS))
        await until(lambda: budget.num_bytes == len(content) - 1)
        response = await client.post(COMPLETIONS, content=content, headers=JSON_HEADERS)
        assert_error(response, 429, code="caller_limit")
        assert response.headers["retry-after"] == "1"
        assert "1000 bytes" in response.json()["error"]["message"]
        assert (await other.post(COMPLETIONS, json=ask("two", user="x" * 700))).status_code == 200
        go_on.set()
        assert (await slow).status_code == 200
        assert (await client.post(COMPLETIONS, content=content, headers=JSON_HEADERS)).status_code == 200
    assert budget.num_bytes == 0
    site.close()


async def test_bytes_of_bodies_that_fail_are_given_back(client: httpx.AsyncClient, app: Any) -> None:
    for body in (chat(messages=[]), {"x": "y" * bodies.LONG_BODY_BYTES}):
        assert (await client.post(COMPLETIONS, json=body)).status_code == 400
    assert app.state.service.bodies.budget.num_bytes == 0
