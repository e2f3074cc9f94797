"""Models of a registry over HTTP: who may call what, what is loaded when, and what the answers say of it."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.registry import Registry, RegistryUnavailable
from loraplex.server import ServerConfig, host_adapters, load_backoff
from loraplex.server.waiters import Stage
from loraplex.testing import fake_text
from tests.registry.helpers import BASE, OPERATOR

from .helpers import LiveServer, assert_error, chunks, until, wait_until, waiting_counts
from .registry_world import BASE_NAME, Site, ask, fake_engine

pytestmark = pytest.mark.anyio

HELLO = (256, *b"Hello")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


async def complete(client: httpx.AsyncClient, model: str | None, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/completions", json=ask(model, **fields))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def ids(client: httpx.AsyncClient, query: str = "") -> list[str]:
    response = await client.get(f"/v1/models{query}")
    assert response.status_code == 200, response.text
    return [card["id"] for card in response.json()["data"]]


# ---------------------------------------------------------------------- resolving
@pytest.mark.parametrize("model", ["one", "one@1", "acme/one", "acme/one@1"])
async def test_an_own_adapter_answers_by_all_of_its_names(site: Site, model: str) -> None:
    async with site.client(site.tenant("acme", "one")) as client:
        answer = await complete(client, model)
    digest = site.digest("acme", "one")
    assert answer["choices"][0]["text"] == fake_text(digest, HELLO, 4)
    assert answer["x_loraplex"]["adapter"] == {"name": "one", "version": 1, "digest": digest}
    assert answer["model"] == "one@1"


async def test_one_name_is_two_adapters_for_two_tenants(site: Site) -> None:
    keys = [site.tenant("acme", "one"), site.tenant("globex", "one", first_seed=5)]
    digests = []
    for key in keys:
        async with site.client(key) as client:
            digests.append((await complete(client, "one"))["x_loraplex"]["adapter"]["digest"])
    assert digests == [site.digest("acme", "one"), site.digest("globex", "one")]
    assert digests[0] != digests[1]


async def test_the_base_answers_as_the_base(site: Site) -> None:
    async with site.client(site.tenant("acme", "one")) as client:
        answer = await complete(client, BASE_NAME)
    assert (answer["model"], answer["x_loraplex"]["adapter"]) == (BASE_NAME, None)
    assert site.engine.held == {}


async def test_a_granted_adapter_answers_by_its_owners_name(site: Site) -> None:
    key, _ = site.tenant("acme"), site.tenant("globex", "one")
    async with site.client(key) as client:
        assert_error(await client.post("/v1/completions", json=ask("globex/one")), 404, "model", "model_not_found")
        site.registry.adapters.grant(OPERATOR, "globex", "one", "acme")
        assert (await complete(client, "globex/one"))["model"] == "globex/one@1"
        assert await ids(client) == [BASE_NAME, "globex/one"]
        site.registry.adapters.revoke_grant(OPERATOR, "globex", "one", "acme")
        assert_error(await client.post("/v1/completions", json=ask("globex/one")), 404, "model", "model_not_found")


async def test_model_may_be_left_out_with_a_bound_key_only(site: Site) -> None:
    unbound = site.tenant("acme", "one", "two")
    bound = site.world.key("acme", bound_adapter="two")
    async with site.client(bound) as client:
        assert (await complete(client, None))["model"] == "two@1"
        assert (await complete(client, "two"))["model"] == "two@1"
        for model in ("one", BASE_NAME):
            assert_error(await client.post("/v1/completions", json=ask(model)), 404, "model", "model_not_found")
            assert_error(await client.get(f"/v1/models/{model}"), 404, "model", "model_not_found")
        assert await ids(client) == ["two"]
    async with site.client(unbound) as client:
        assert_error(await client.post("/v1/completions", json=ask(None)), 400, "model", "invalid_request")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_tokens_are_refused_for_models_of_others(site: Site, path: str) -> None:
    key, _ = site.tenant("acme", "one"), site.tenant("globex", "two")
    body = {"prompt": "x"} if path == "/tokenize" else {"tokens": [65]}
    async with site.client(key) as client:
        for model, status in (("one", 200), (BASE_NAME, 200), ("two", 404), ("globex/two", 404), ("none", 404)):
            assert (await client.post(path, json={**body, "model": model})).status_code == status
        assert (await client.post(path, json=body)).status_code == 200
    assert site.engine.held == {}  # nothing was loaded for it


async def test_each_way_to_miss_has_its_code(site: Site) -> None:
    key = site.tenant("acme", "gone")
    site.registry.adapters.delete(OPERATOR, "acme", "gone")
    site.world.publish("acme", "raw", 2)
    site.world.verified("acme", "idle", 3)
    expected = {
        "none": (404, "model_not_found"),
        "gone": (404, "adapter_deleted"),
        "raw@1": (409, "adapter_not_verified"),
        "idle": (409, "adapter_not_active"),
        "idle@9": (404, "model_not_found"),
    }
    async with site.client(key) as client:
        for model, (status, code) in expected.items():
            assert_error(await client.post("/v1/completions", json=ask(model)), status, code=code)
        assert (await complete(client, "idle@1"))["model"] == "idle@1"
    assert [request.adapter.name for request in site.engine.started if request.adapter] == ["idle"]
    logged = [line["error_code"] for line in site.lines() if line["event"] == "request"]
    assert logged == [code for _, code in expected.values()] + [None]


# ---------------------------------------------------------------------- the list
async def test_the_list_is_paged_and_holds_only_what_may_be_used(site: Site) -> None:
    key = site.tenant("acme", "a", "b", "c")
    site.tenant("globex", "other")
    site.world.verified("acme", "idle", 9)
    async with site.client(key) as client:
        whole = (await client.get("/v1/models")).json()
        assert [card["id"] for card in whole["data"]] == [BASE_NAME, "a", "b", "c"]
        assert (whole["object"], whole["has_more"]) == ("list", False)
        assert (whole["first_id"], whole["last_id"]) == (BASE_NAME, "c")
        for limit in (1, 2, 3, 4, 5):
            seen: list[str] = []
            after = ""
            for _ in range(10):
                page = (await client.get("/v1/models", params={"limit": limit, "after": after})).json()
                seen += [card["id"] for card in page["data"]]
                assert len(page["data"]) <= limit
                if not page["has_more"]:
                    break
                after = page["last_id"]
            assert seen == [BASE_NAME, "a", "b", "c"], limit


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=-1", "limit"),
        ("limit=1e2", "limit"),
        ("limit=", "limit"),
        ("limit=9999999999999999999999", "limit"),
        ("limit=%D9%A1", "limit"),
        ("limit=1&limit=2", "limit"),
        ("after=a&after=b", "after"),
        ("after=%00", "after"),
        ("after=" + "x" * 257, "after"),
    ],
)
async def test_odd_pages_are_refused(site: Site, query: str, param: str) -> None:
    async with site.client(site.tenant("acme")) as client:
        assert_error(await client.get(f"/v1/models?{query}"), 400, param)


async def test_cards_tell_version_digest_and_whether_the_base_is_proven(site: Site) -> None:
    key = site.tenant("acme", "one")
    version = site.world.registry.publish(
        OPERATOR, "acme", "two", site.folder / "adapter-1", BASE, base_unverified=True
    )
    site.registry.adapters.skip_verification(OPERATOR, "acme", "two", version.number)
    site.registry.adapters.activate(OPERATOR, "acme", "two", version.number, expected=None)
    async with site.client(key) as client:
        _, one, two = (await client.get("/v1/models")).json()["data"]
        assert (one["version"], one["root"], one["base_verified"]) == (1, site.digest("acme", "one"), True)
        assert (two["version"], two["parent"], two["base_verified"]) == (1, BASE_NAME, False)
        assert (await client.get("/v1/models/two")).json() == two
        assert_error(await client.get("/v1/models/three"), 404, "model", "model_not_found")


# ---------------------------------------------------------------------- loading
async def test_a_load_is_shared_and_told_in_the_answer(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    key, loads, gate = site.tenant("acme", "one"), [], threading.Event()
    real = Registry.read

    def slow(self: Registry, *args: Any) -> Any:
        loads.append(threading.current_thread().name)
        assert gate.wait(30)
        return real(self, *args)

    monkeypatch.setattr(Registry, "read", slow)
    async with site.client(key) as client:
        waiting = [asyncio.create_task(complete(client, "one")) for _ in range(8)]
        waiters = site.app.state.service.waiters
        await until(lambda: waiting_counts(waiters) == {Stage.READ: 8})
        assert (await client.get("/health")).status_code == 200  # the event loop is free
        assert (await complete(client, BASE_NAME))["model"] == BASE_NAME
        gate.set()
        answers = await asyncio.gather(*waiting)
        warm = await complete(client, "one")
    assert len(loads) == 1
    assert loads[0].startswith("loraplex-read")
    assert all(answer["x_loraplex"]["cold"] and answer["x_loraplex"]["load_s"] > 0 for answer in answers)
    assert (warm["x_loraplex"]["cold"], warm["x_loraplex"]["load_s"]) == (False, 0.0)
    cold = [line["cold"] for line in site.lines() if line["model"] == "one@1"]
    assert cold == [True] * 8 + [False]


async def test_a_failed_load_fails_its_own_requests_and_is_tried_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = site.tenant("acme", "bad", "good")
    broken = site.registry.adapters.version(OPERATOR, "acme", "bad", 1).artifact
    assert broken is not None
    blob = next(path for path in (site.folder / "data/artifacts/blobs").rglob(broken.weights.key))
    whole = blob.read_bytes()
    blob.chmod(0o600)
    blob.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    monkeypatch.setattr(load_backoff, "FIRST_BACKOFF_S", 0.0)
    async with site.client(key) as client:
        bad = [client.post("/v1/completions", json=ask("bad", stream=stream)) for stream in (False, True)]
        good = [client.post("/v1/completions", json=ask(model)) for model in ("good", BASE_NAME)]
        refused, served = await asyncio.gather(asyncio.gather(*bad), asyncio.gather(*good))
        for response in refused:
            assert_error(response, 500, code="artifact_corrupt")
        assert [response.status_code for response in served] == [200, 200]
        assert site.digest("acme", "bad") not in site.engine.held
        details = [line["error_detail"] for line in site.lines() if line["error_code"] == "artifact_corrupt"]
        assert len(details) == 2
        assert all(broken.weights.key in detail for detail in details)
        monkeypatch.setattr(load_backoff, "FIRST_BACKOFF_S", 0.25)
        assert_error(await client.post("/v1/completions", json=ask("bad")), 500, code="artifact_corrupt")
        blob.write_bytes(whole)
        response = await client.post("/v1/completions", json=ask("bad"))
        assert_error(response, 503, code="overloaded")
        assert response.headers["retry-after"] == "1"
        assert "artifact_corrupt" in response.json()["error"]["message"]
        await asyncio.sleep(1.05)  # it failed two or three times: twice or four times the first
        assert (await complete(client, "bad"))["model"] == "bad@1"


async def test_what_falls_out_of_host_memory_comes_back(tmp_path: Path) -> None:
    site = Site(tmp_path, config=ServerConfig(max_host_adapters=2))
    key = site.tenant("acme", "a", "b", "c")
    async with site.client(key) as client:
        for model in ("a", "b", "a", "c"):
            await complete(client, model)
        assert site.engine.retired == [site.digest("acme", "b")]
        assert set(site.engine.held) == {site.digest("acme", "a"), site.digest("acme", "c")}
        assert (await complete(client, "b"))["x_loraplex"]["cold"]
    site.close()


async def test_leased_adapters_stay_and_one_too_many_is_told_to_wait(tmp_path: Path) -> None:
    config = ServerConfig(max_host_adapters=2, host_patience_s=0.01)
    site = Site(tmp_path, engine=fake_engine(delay_s=0.02), config=config)
    keys = [site.tenant(name, "a", "b", first_seed=seed) for name, seed in (("acme", 1), ("globex", 5), ("hooli", 9))]
    async with site.client(keys[0]) as client, site.client(keys[1]) as other, site.client(keys[2]) as third:
        running = [asyncio.create_task(complete(one, "a", max_tokens=400)) for one in (client, other)]
        await until(lambda: len(site.engine.running) == 2)
        mine, theirs = [await one.post("/v1/completions", json=ask("b")) for one in (client, third)]
        assert_error(mine, 429, code="caller_limit")
        assert_error(theirs, 503, code="overloaded")
        for response in (mine, theirs):
            assert "--max-cpu-loras" in response.json()["error"]["message"]
            assert response.headers["retry-after"] == "1"
        assert (await complete(client, BASE_NAME))["model"] == BASE_NAME
        assert not any(one.done() for one in running)
        site.engine.delay_s = 0.0
        assert [answer["model"] for answer in await asyncio.gather(*running)] == ["a@1", "a@1"]
        assert site.engine.retired == []
        assert (await complete(client, "b"))["model"] == "b@1"
    site.close()


async def test_the_second_tenant_of_the_same_weights_is_told_what_the_first_was(tmp_path: Path) -> None:
    """And what the engine says of its pool, which is the same for all, goes to the log alone."""
    site = Site(tmp_path)
    keys = [site.tenant(name, "a") for name in ("acme", "globex")]
    assert site.digest("acme", "a") == site.digest("globex", "a")
    told = []
    for engine_cold in (False, True):
        site.engine.cold, site.engine.load_s = engine_cold, 0.5
        for key in keys:
            async with site.client(key) as client:
                found = (await complete(client, "a"))["x_loraplex"]
                told.append((found["cold"], found["load_s"]))
    assert told[0][0]
    assert told == [told[0], (True, told[1][1]), (False, 0.0), (False, 0.0)]
    assert told[1][1] > 0
    assert [line["cold"] for line in site.lines()] == [True, False, True, True]
    site.close()


async def test_without_leases_running_requests_lose_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant of the test above: an LRU that drops what requests use."""
    monkeypatch.setattr(host_adapters._Entry, "is_idle", property(lambda entry: entry.is_ready))
    monkeypatch.setattr(host_adapters.HostAdapters, "release", lambda self, tenant, digest: None)
    monkeypatch.setattr(host_adapters.HostRoom, "is_within_share", lambda self, tenant, num_bytes: True)
    site = Site(tmp_path, engine=fake_engine(delay_s=0.02), config=ServerConfig(max_host_adapters=1))
    async with site.client(site.tenant("acme", "a", "b")) as client:
        running = asyncio.create_task(complete(client, "a", max_tokens=400))
        await until(lambda: len(site.engine.running) == 1)
        assert (await complete(client, "b"))["model"] == "b@1"
        assert site.engine.retired == [site.digest("acme", "a")]
        assert not running.done()
        site.engine.delay_s = 0.0
        await running
    site.close()


async def test_a_lease_ends_with_the_answer_however_it_ends(tmp_path: Path) -> None:
    site = Site(tmp_path, engine=fake_engine(), config=ServerConfig(max_host_adapters=1))
    key = site.tenant("acme", "a", "b")
    async with site.client(key) as client:
        await complete(client, "a")
        chunks(await client.post("/v1/completions", json=ask("a", stream=True)))
        site.engine.error, site.engine.error_after = RuntimeError("broken"), 2
        assert (await client.post("/v1/completions", json=ask("a"))).status_code == 500
        await client.post("/v1/completions", json=ask("a", stream=True))
        site.engine.error = None
        too_long = await client.post("/v1/completions", json=ask("a", prompt="x" * 600))
        assert_error(too_long, 400, code="context_length_exceeded")
        assert (await complete(client, "b"))["model"] == "b@1"  # it could not if a lease were left
    site.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["waiting", "running"])
def test_a_lease_ends_when_the_client_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, when: str
) -> None:
    site = Site(tmp_path, engine=fake_engine(delay_s=0.02), config=ServerConfig(max_host_adapters=1))
    key, gate, loads = site.tenant("acme", "a"), threading.Event(), []
    real = Registry.read

    def slow(self: Registry, *args: Any) -> Any:
        loads.append(args)
        assert when == "running" or gate.wait(30)
        return real(self, *args)

    monkeypatch.setattr(Registry, "read", slow)
    live = LiveServer(site.app)
    try:
        content = json.dumps(ask("a", max_tokens=400, stream=stream)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", live.port)) as connection:
            connection.sendall(head.encode() + content)
            wait_until(lambda: bool(site.engine.running if when == "running" else loads))
        gate.set()
        (entry,) = site.app.state.service.catalog._host._entries.values()
        wait_until(lambda: entry.is_ready and not entry.leases and not site.engine.running)
        wait_until(lambda: bool(site.log.getvalue()))
        assert site.lines()[-1]["status"] in (200, 499)
        assert site.engine.num_output_tokens < 400
    finally:
        live.stop()
        site.close()


# ---------------------------------------------------------------------- versions
async def test_new_requests_get_the_new_version_and_running_ones_keep_theirs(tmp_path: Path) -> None:
    site = Site(tmp_path, engine=fake_engine(delay_s=0.02))
    key = site.tenant("acme", "one")
    other = site.world.reopen()  # as another process would do it
    second = site.world.verified("acme", "one", 7)
    async with site.client(key) as client:
        await complete(client, "one")
        running = asyncio.create_task(complete(client, "one", max_tokens=400))
        await until(lambda: bool(site.engine.running))
        other.adapters.activate(OPERATOR, "acme", "one", second.number, expected=1)
        await asyncio.sleep(0.3)  # within which every process has noticed
        assert (await complete(client, "one"))["model"] == "one@2"
        assert not running.done()
        site.engine.delay_s = 0.0
        old = await running
        assert old["model"] == "one@1"
        assert old["choices"][0]["text"] == fake_text(site.digest("acme", "one", 1), HELLO, 400)
        site.registry.adapters.rollback(OPERATOR, "acme", "one", expected=2)
        assert (await complete(client, "one"))["model"] == "one@1"
        assert (await complete(client, "one@2"))["model"] == "one@2"
    other.close()
    site.close()


# ---------------------------------------------------------------------- metrics and probes
async def test_metrics_are_for_operators_where_they_name_adapters_of_tenants(site: Site) -> None:
    key = site.tenant("acme", "one")
    async with site.client() as client:
        assert_error(await client.get("/metrics"), 401, code="invalid_api_key")
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
    async with site.client(key) as client:
        assert_error(await client.get("/metrics"), 403, code="permission_denied")
    async with site.client(site.operator_key("acme")) as client:
        assert "vllm:lora_requests_info" in (await client.get("/metrics")).text


async def test_metrics_can_be_opened(tmp_path: Path) -> None:
    site = Site(tmp_path, config=ServerConfig(public_metrics=True))
    async with site.client() as client:
        assert (await client.get("/metrics")).status_code == 200
        assert_error(await client.get("/v1/models"), 401)
    site.close()


async def test_nobody_is_let_in_while_the_registry_cannot_be_asked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(registry: Registry, key: str) -> None:
        raise RegistryUnavailable("The database cannot be reached.")

    key = site.tenant("acme", "one")
    monkeypatch.setattr(Registry, "recall_principal", fail)
    for given in (key, site.operator_key("acme")):
        async with site.client(given) as client:
            for path in ("/v1/models", "/metrics"):
                assert_error(await client.get(path), 503, code="registry_unavailable")
            assert_error(await client.post("/v1/completions", json=ask("one")), 503, code="registry_unavailable")
    assert site.engine.started == []
    assert [line["error_detail"] for line in site.lines()] == ["The database cannot be reached."] * 6


async def test_ready_says_no_while_the_registry_cannot_be_reached(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(registry: Registry) -> None:
        raise RegistryUnavailable("The database cannot be reached.")

    monkeypatch.setattr(Registry, "check_ready", fail)
    async with site.client() as client:
        assert_error(await client.get("/ready"), 503, code="registry_unavailable")
        assert (await client.get("/health")).status_code == 200
