"""A tenant's limits where its requests come in: at once, a minute's tokens, priority and weight."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.core import CallerLimitReached, InvalidRequest, Overloaded, Request, RequestOutput
from loraplex.registry import LimitChanges, Principal, TenantLimits
from loraplex.registry.authentication import Authenticator
from loraplex.server.callers import LOCAL_CALLER
from loraplex.server.tenant_limits import TenantMeters, engine_priority
from loraplex.testing import FakeEngine
from tests.registry.helpers import OPERATOR

from .helpers import assert_error, until
from .registry_world import BASE_NAME, Site, ask, fake_engine

pytestmark = pytest.mark.anyio
PROMPT_TOKENS = 6  # of "Hello", with the token that begins it


# ---------------------------------------------------------------------- the counts
def wait_s(meters: TenantMeters, limits: TenantLimits, num_tokens: int, now: float) -> float:
    """Seconds that a body with so many prompt tokens is asked to wait; 0 where it is admitted and ends at once."""
    try:
        number = meters.enter("acme", limits, 1, now)
    except CallerLimitReached as error:
        return error.retry_after_s
    try:
        meters.charge_prompts("acme", num_tokens, now)
    except CallerLimitReached as error:
        return error.retry_after_s
    finally:
        meters.leave("acme", number, 1, now)
    return 0.0


def test_a_minutes_tokens_can_be_had_at_once_and_come_again_evenly() -> None:
    meters, limits = TenantMeters(), TenantLimits(tokens_per_minute=600)
    assert wait_s(meters, limits, 600, 100.0) == 0.0
    assert wait_s(meters, limits, 50, 100.0) == pytest.approx(0.1)  # there is none: the next comes in 0.1 s
    assert wait_s(meters, limits, 50, 101.0) == pytest.approx(4.0)  # 10 came, 40 are missing
    assert wait_s(meters, limits, 50, 105.0) == 0.0
    assert wait_s(meters, limits, 600, 1000.0) == 0.0
    assert wait_s(meters, limits, 600, 1030.0) == pytest.approx(30.0)  # no more than a minute's were kept


def test_what_is_waited_for_is_there_then_and_not_before() -> None:
    rng = random.Random(3)
    meters, limits, now = TenantMeters(), TenantLimits(tokens_per_minute=6_000), 0.0
    waited = 0
    for _ in range(500):
        tokens = rng.randrange(1, 3_000)
        if (seconds := wait_s(meters, limits, tokens, now)) > 0.0:
            assert wait_s(meters, limits, tokens, now + seconds - 0.02) > 0.0
            again = wait_s(meters, limits, tokens, now + seconds + 1e-6)
            if again:  # there was not even one: then it is told how long the prompt's own take
                assert wait_s(meters, limits, tokens, now + seconds + again + 2e-6) == 0.0
            waited += 1
            now += seconds + again
        now += rng.random()
    assert waited > 100


def test_answers_are_never_cut_off_and_what_they_took_is_waited_for() -> None:
    meters, limits = TenantMeters(), TenantLimits(tokens_per_minute=600)
    number = meters.enter("acme", limits, 1, 0.0)
    meters.charge_prompts("acme", 100, 0.0)
    for _ in range(1_000):
        meters.charge("acme", 1)  # nothing is raised
    meters.leave("acme", number, 1, 0.0)
    assert wait_s(meters, limits, 1, 0.0) == pytest.approx(50.1)  # 500 below zero, and one
    assert wait_s(meters, limits, 1, 50.2) == 0.0


def test_a_prompt_of_more_than_a_minutes_tokens_needs_a_full_bucket() -> None:
    meters, limits = TenantMeters(), TenantLimits(tokens_per_minute=60)
    assert wait_s(meters, limits, 600, 0.0) == 0.0
    assert wait_s(meters, limits, 600, 541.0) == pytest.approx(59.0)
    assert wait_s(meters, limits, 600, 600.0) == 0.0


def test_a_rate_that_changes_counts_from_then_on() -> None:
    meters = TenantMeters()
    assert wait_s(meters, TenantLimits(tokens_per_minute=600), 600, 0.0) == 0.0
    assert wait_s(meters, TenantLimits(tokens_per_minute=6_000), 200, 10.0) == pytest.approx(1.0)  # 100 came of 200
    assert wait_s(meters, TenantLimits(tokens_per_minute=60), 60, 70.0) == 0.0  # and no more than 60 are kept
    assert wait_s(meters, TenantLimits(tokens_per_minute=60), 1, 70.0) == pytest.approx(1.0)
    assert wait_s(meters, TenantLimits(), 10**9, 70.0) == 0.0


def test_requests_at_once_count_prompts_and_choices() -> None:
    meters, limits = TenantMeters(), TenantLimits(max_requests=4)
    first = meters.enter("acme", limits, 3, 0.0)
    with pytest.raises(CallerLimitReached) as caught:
        meters.enter("acme", limits, 2, 1.0)
    assert caught.value.message == (
        "The tenant 'acme' has 3 requests at work and the body stands for 2; it may have 4 at once (max_requests)."
    )
    meters.enter("globex", limits, 4, 1.0)
    meters.enter("acme", limits, 1, 1.0)
    meters.leave("acme", first, 3, 2.0)
    meters.enter("acme", limits, 3, 2.0)
    with pytest.raises(InvalidRequest, match=r"stands for 5 requests .* may have 4 at once"):
        meters.enter("acme", limits, 5, 2.0)


def test_the_time_to_wait_for_a_place_is_that_of_the_requests_before() -> None:
    meters, limits = TenantMeters(), TenantLimits(max_requests=1)

    def told(now: float) -> float:
        with pytest.raises(CallerLimitReached) as caught:
            meters.enter("acme", limits, 1, now)
        return caught.value.retry_after_s

    number = meters.enter("acme", limits, 1, 0.0)
    assert told(0.0) == 1.0  # nothing is known yet
    meters.leave("acme", number, 1, 20.0)
    number = meters.enter("acme", limits, 1, 100.0)
    assert told(105.0) == pytest.approx(15.0)
    assert told(130.0) == 1.0
    meters.leave("acme", number, 1, 1000.0)
    meters.enter("acme", limits, 1, 1000.0)
    assert told(1000.0) == 60.0  # at most


def test_tenants_that_owe_nothing_are_forgotten() -> None:
    meters, limits = TenantMeters(), TenantLimits(tokens_per_minute=60)
    open_ = meters.enter("open", TenantLimits(), 1, 0.0)
    meters.leave("owes", meters.enter("owes", limits, 1, 0.0), 1, 0.0)
    meters.charge("owes", 10_000)
    for number in range(5_000):
        tenant, now = f"t{number}", 0.01 * number
        place = meters.enter(tenant, limits, 1, now)
        meters.charge_prompts(tenant, 1, now)
        meters.leave(tenant, place, 1, now)
    assert len(meters) < 2_500
    meters.leave("open", open_, 1, 60.0)
    with pytest.raises(CallerLimitReached):
        meters.enter("owes", limits, 1, 60.0)


# ---------------------------------------------------------------------- over HTTP
@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path, engine=fake_engine(delay_s=0.002))
    for tenant in ("acme", "globex"):
        site.tenant(tenant)
    yield site
    site.close()


def limit(site: Site, changes: LimitChanges, tenant: str = "acme") -> None:
    site.registry.tenants.change_limits(OPERATOR, tenant, changes)


async def complete(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json=ask(BASE_NAME, **fields))


async def test_requests_over_the_bound_are_refused_at_once_and_others_are_served(site: Site) -> None:
    limit(site, {"max_requests": 2})
    async with site.client(site.world.key("acme")) as acme, site.client(site.world.key("globex")) as globex:
        running = [asyncio.create_task(complete(acme, max_tokens=100)) for _ in range(2)]
        while len(site.engine.running) < 2:
            await asyncio.sleep(0.001)
        refused = await complete(acme)
        assert_error(refused, 429, code="caller_limit")
        assert int(refused.headers["retry-after"]) >= 1
        assert "max_requests" in refused.json()["error"]["message"]
        assert refused.json()["error"]["reason"] == site.lines()[-1]["error_reason"] == "TENANT_REQUESTS"
        assert (await complete(globex)).status_code == 200
        assert [(await task).status_code for task in running] == [200, 200]
        assert (await complete(acme)).status_code == 200
        assert_error(await complete(acme, n=3, temperature=1.0), 400, code="invalid_request")
        assert_error(await complete(acme, prompt=["a", "b", "c"]), 400, code="invalid_request")
        assert (await complete(acme, prompt=["a", "b"])).status_code == 200


@pytest.mark.parametrize("end", ["stream", "cancel", "error", "unknown", "invalid"])
async def test_every_end_gives_the_place_back(site: Site, end: str) -> None:
    limit(site, {"max_requests": 1})
    async with site.client(site.world.key("acme")) as client:
        if end == "stream":
            async with client.stream("POST", "/v1/completions", json=ask(BASE_NAME, stream=True)) as response:
                async for _ in response.aiter_lines():
                    pass
        elif end == "cancel":
            task = asyncio.create_task(complete(client, max_tokens=400))
            while not site.engine.running:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif end == "error":
            site.engine.error = Overloaded("full", 3.0)
            assert (await complete(client)).status_code == 503
            site.engine.error = None
        elif end == "unknown":
            assert_error(await client.post("/v1/completions", json=ask("absent")), 404)
        else:
            assert_error(await complete(client, prompt=["Hello" * 200]), 400)
        assert (await complete(client)).status_code == 200


async def test_a_minutes_tokens_are_prompts_and_answers(site: Site) -> None:
    limit(site, {"tokens_per_minute": 60})
    async with site.client(site.world.key("acme")) as acme, site.client(site.world.key("globex")) as globex:
        assert (await complete(acme, max_tokens=300)).status_code == 200  # more than there was
        refused = await complete(acme)
        assert_error(refused, 429, code="caller_limit")
        owed = PROMPT_TOKENS + 300 - 60
        assert owed - 3 <= int(refused.headers["retry-after"]) <= owed + 1  # one token a second
        assert "tokens_per_minute" in refused.json()["error"]["message"]
        assert refused.json()["error"]["reason"] == "TENANT_TOKENS"
        assert len(site.engine.started) == 1
        assert (await complete(globex)).status_code == 200


async def test_tokens_of_a_stream_count_as_they_come(site: Site) -> None:
    limit(site, {"tokens_per_minute": 60})
    async with site.client(site.world.key("acme")) as client:
        task = asyncio.create_task(complete(client, max_tokens=450))
        while site.engine.num_output_tokens < 80:
            await asyncio.sleep(0.001)
        assert_error(await complete(client), 429, code="caller_limit")
        assert site.engine.running  # the first goes on
        assert (await task).json()["usage"]["completion_tokens"] == 450


async def test_what_did_not_run_costs_nothing(site: Site) -> None:
    limit(site, {"tokens_per_minute": 60})
    async with site.client(site.world.key("acme")) as client:
        site.engine.error = Overloaded("full", 3.0)
        for _ in range(3):
            assert (await complete(client, prompt="x" * 40)).status_code == 503
        site.engine.error = None
        assert (await complete(client, prompt="x" * 40)).status_code == 200
        assert_error(await complete(client, prompt="x" * 40), 429, code="caller_limit")


class Prefilling(FakeEngine):
    """Prompts give no token: those of 20 tokens and more are computed for ever, others wait in the queue."""

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        self.running[request.request_id] = request
        request.progress.has_begun = len(request.prompt_token_ids) >= 20
        await asyncio.Event().wait()
        yield  # type: ignore[misc]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "taken"),
    [(["x" * 39], 40), (["x" * 9], 0), (["x" * 29, "x" * 9], 30)],
    ids=["in its prefill", "in the queue", "one of each"],
)
async def test_prompt_that_is_cancelled_is_paid_for_if_it_had_begun(
    tmp_path: Path, given: list[str], taken: int, stream: bool
) -> None:
    site = Site(tmp_path, engine=Prefilling(description=fake_engine().description))
    site.tenant("acme")
    limit(site, {"tokens_per_minute": 100})
    async with site.client(site.world.key("acme")) as client:
        task = asyncio.create_task(complete(client, prompt=given, stream=stream))
        await until(lambda: len(site.engine.running) == len(given))
        meters = site.app.state.service.tenants._meters
        bucket = meters._meters["acme"].bucket
        assert bucket is not None
        assert bucket.level == 100 - sum(len(text) + 1 for text in given)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert bucket.level == 100 - taken
    site.close()


async def test_changes_hold_for_the_next_request_without_a_query_for_each(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[object] = []
    real = Authenticator._look_up

    def look_up(self: Authenticator, *args: Any) -> Principal:
        looked_up.append(args)
        return real(self, *args)

    monkeypatch.setattr(Authenticator, "_look_up", look_up)
    async with site.client(site.world.key("acme")) as client:
        for _ in range(5):
            assert (await complete(client)).status_code == 200
        limit(site, {"tokens_per_minute": 5})
        assert (await complete(client)).status_code == 200  # a full bucket takes any prompt
        assert_error(await complete(client), 429, code="caller_limit")
        limit(site, {"tokens_per_minute": None})
        assert (await complete(client)).status_code == 200
    assert len(looked_up) == 3  # once at first, and once after each change


async def test_the_engine_is_told_of_weights_that_change(site: Site) -> None:
    async with site.client(site.world.key("acme")) as acme, site.client(site.world.key("globex")) as globex:
        for client in (acme, globex):
            await complete(client)
        assert site.engine.weights == {}
        limit(site, {"weight": 4.0})
        for client in (acme, globex):
            await complete(client)
        assert site.engine.weights == {"acme": 4.0}
        site.engine.weights.clear()
        await complete(acme)
        assert site.engine.weights == {}  # not again
        limit(site, {"weight": 1.0})
        await complete(acme)
        assert site.engine.weights == {"acme": 1.0}


# ---------------------------------------------------------------------- priority
async def test_lower_numbers_go_earlier_as_far_as_the_tenant_may(site: Site) -> None:
    async with site.client(site.world.key("acme")) as client:
        refused = await complete(client, priority=-1)
        assert_error(refused, 400, param="priority", code="invalid_request")
        assert (
            "priority is -1; requests of the tenant 'acme' may have 0 or a later" in refused.json()["error"]["message"]
        )
        for asked in (None, 0, 7):
            assert (await complete(client, priority=asked)).status_code == 200
        limit(site, {"priority": -50})
        for asked in (-50, None):
            assert (await complete(client, priority=asked)).status_code == 200
        assert_error(await complete(client, priority=-51), 400, param="priority")
        limit(site, {"priority": 20})
        assert (await complete(client)).status_code == 200
        assert_error(await complete(client, priority=0), 400, param="priority")
        chat = {"model": BASE_NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "priority": 30}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
    assert [request.priority for request in site.engine.started] == [0, 0, -7, 50, 0, -20, -30]


@pytest.mark.parametrize("priority", [-101, 101, 1.5, "0", True])
async def test_a_priority_that_none_can_have_is_refused(site: Site, priority: object) -> None:
    async with site.client(site.world.key("acme")) as client:
        assert_error(await complete(client, priority=priority), 400, param="priority")


def test_without_a_registry_any_priority_may_be_asked_for() -> None:
    assert [engine_priority(LOCAL_CALLER, asked) for asked in (None, -100, 100)] == [0, 100, -100]


async def test_without_a_registry_no_limit_holds(client: httpx.AsyncClient, engine: Any) -> None:
    body = {"model": "fake-base", "prompt": "Hello", "max_tokens": 2, "priority": -100}
    answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert {request.priority for request in engine.started} == {100}
    assert engine.weights == {}


def test_limits_belong_to_the_principal(site: Site) -> None:
    principal = site.world.principal("acme")
    caller = replace(LOCAL_CALLER, principal=replace(principal, limits=TenantLimits(priority=-3)))
    assert engine_priority(caller, -3) == 3
    with pytest.raises(InvalidRequest):
        engine_priority(caller, -4)
