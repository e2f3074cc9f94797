"""Keys, prompts, paths and names of others are in no answer, log line or metric they do not belong in (T11)."""

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from loraplex.core.comparison import AdapterComparison
from loraplex.registry import RegistryConfig, RegistryUnavailable
from loraplex.server import ServerConfig, auth, context, create_app
from loraplex.server.redaction import Redactor
from loraplex.testing import FakeEngine
from tests.registry.helpers import OPERATOR, adapter_dir, bad_adapter_dir

from .helpers import FakeCatalog, assert_error
from .registry_world import BASE_NAME, Site, ask

pytestmark = pytest.mark.anyio

PROMPT = "canary-prompt-7f3a"
USER = "canary-user-91bc"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "canary-root").mkdir()
    site = Site(tmp_path, config=ServerConfig(adapter_roots=((tmp_path / "canary-root").resolve(),)))
    yield site
    site.close()


def bodies(model: str) -> list[tuple[str, str, Any]]:
    """Requests that go well and requests that go wrong in every way, each with the canaries in it."""
    generation = [
        ask(model, prompt=PROMPT, user=USER),
        ask(model, prompt=PROMPT, user=USER, stream=True),
        ask(model, prompt=[PROMPT, 5]),
        ask(model, prompt=PROMPT, temperature=9),
        ask(model, prompt=PROMPT, max_tokens=10**6),
        ask(model, prompt=PROMPT * 100),
        ask(model, prompt=PROMPT, unknown=USER),
        ask(model, prompt=PROMPT, stop=[""]),
        ask("canary-model", prompt=PROMPT),
        ask(None, prompt=PROMPT),
        {"prompt": PROMPT},
        [PROMPT],
    ]
    chat = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
    return [
        *(("POST", "/v1/completions", body) for body in generation),
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/chat/completions", {**chat, "stream": True}),
        ("POST", "/v1/chat/completions", {**chat, "messages": [{"role": "user", "content": PROMPT, "x": USER}]}),
        ("POST", "/v1/chat/completions", {**chat, "messages": [{"role": PROMPT, "content": PROMPT}]}),
        ("POST", "/tokenize", {"model": model, "prompt": PROMPT, "return_token_strs": True}),
        ("POST", "/detokenize", {"model": model, "tokens": [ord(char) for char in PROMPT]}),
        ("POST", "/detokenize", {"model": model, "tokens": [PROMPT]}),
        ("GET", "/v1/models", None),
        ("GET", f"/v1/models/{model}", None),
        ("GET", f"/v1/models?after={USER}", None),
        ("GET", f"/v1/{PROMPT}", None),
        ("DELETE", "/v1/models", None),
        ("GET", "/metrics", None),
        ("GET", "/health", None),
        ("GET", "/ready", None),
    ]


async def shake(site: Site, keys: list[str | None], models: list[str]) -> list[httpx.Response]:
    """Every request with every key, well and with an engine that fails."""
    responses = []
    for failure in (None, RuntimeError(f"it broke on {PROMPT}"), RegistryUnavailable("no database")):
        for after in (0, 2):
            site.engine.error, site.engine.error_after = failure, after
            for key in keys:
                async with site.client(key) as client:
                    for model in models:
                        for method, path, body in bodies(model):
                            responses.append(await client.request(method, path, json=body))
    site.engine.error = None
    return responses


async def test_no_key_is_in_any_answer_log_line_or_metric(site: Site) -> None:
    keys = [site.tenant("acme", "one"), site.operator_key("acme"), site.tenant("globex", "canary-theirs")]
    wrong = keys[0][:-1] + ("a" if keys[0][-1] != "a" else "b")
    responses = await shake(site, [*keys, wrong, "sk-canary-other-service", None], ["one", BASE_NAME])
    assert {response.status_code for response in responses} >= {200, 400, 401, 403, 404, 405, 500, 503}
    assert len([response for response in responses if response.status_code >= 400]) >= 300
    texts = [f"{response.text}{response.headers}" for response in responses] + [site.log.getvalue()]
    for key in [*keys, wrong]:
        secret = key[22:]
        assert not [text for text in texts if secret in text or secret[:16] in text]
    assert not [text for text in texts if "sk-canary-other-service" in text]


async def test_no_prompt_is_in_a_log_line_or_a_metric_and_none_of_others_in_an_answer(site: Site) -> None:
    keys = [site.tenant("acme", "one"), site.operator_key("acme")]
    responses = await shake(site, [*keys, None], ["one"])
    metrics = [response.text for response in responses if str(response.url).endswith("/metrics")]
    for text in (site.log.getvalue(), *metrics):
        assert PROMPT not in text
        assert USER not in text
    failed = [response.text for response in responses if response.status_code >= 500]
    assert failed
    assert not [text for text in failed if PROMPT in text or "it broke" in text]
    assert {line["event"] for line in site.lines()} == {"request", "unexpected_error"}


async def test_nothing_of_another_tenant_is_in_an_answer_or_on_a_line_of_ours(site: Site) -> None:
    key, theirs = site.tenant("acme", "one"), site.tenant("canary-tenant", "canary-adapter", first_seed=5)
    async with site.client(theirs) as client:
        assert (await client.post("/v1/completions", json=ask("canary-adapter"))).status_code == 200
    digest = site.digest("canary-tenant", "canary-adapter")
    site.log.truncate(0)
    site.log.seek(0)
    responses = await shake(site, [key], ["one", "two"])
    for text in (*(f"{response.text}{response.headers}" for response in responses), site.log.getvalue()):
        assert not any(word in text for word in ("canary-tenant", "canary-adapter", digest))


async def test_no_path_of_the_server_is_in_an_answer(site: Site) -> None:
    """Not where adapters lie, not where the registry is; what a client wrote itself may come back to it."""
    key, operator = site.tenant("acme", "one"), site.operator_key("acme")
    root = site.folder.resolve() / "canary-root"
    adapter_dir(site.folder, 8).rename(root / "good")
    bad_adapter_dir(site.folder).rename(root / "bad")
    artifact = site.registry.adapters.version(OPERATOR, "acme", "one", 1).artifact
    assert artifact is not None
    blob = next((site.folder / "data/artifacts/blobs").rglob(artifact.weights.key))
    blob.unlink()
    answers = []
    async with site.client(key) as client:
        response = await client.post("/v1/completions", json=ask("one"))
        assert_error(response, 500, code="artifact_missing")
        answers.append(response)
    async with site.client(operator) as client:
        for name, path in (("bad", "bad"), ("good", "good"), ("good", "good"), ("gone", "gone")):
            body = {"lora_name": name, "lora_path": f"{root}/{path}"}
            answers.append(await client.post("/v1/load_lora_adapter", json=body))
        site.engine.comparison = AdapterComparison(9.0, 1.0, 9.0, 0.1)
        body = {"lora_name": "good", "lora_path": f"{root}/good", "load_inplace": True}
        answers.append(await client.post("/v1/load_lora_adapter", json=body))
        answers.append(await client.get("/v1/models"))
    assert [answer.status_code for answer in answers] == [500, 400, 200, 400, 404, 400, 200]
    for answer in answers:
        sent = json.loads(answer.request.content)["lora_path"] if b"lora_path" in answer.request.content else None
        text = answer.text.replace(sent, "") if sent is not None else answer.text
        assert str(site.folder) not in text, text


async def test_log_lines_name_caller_and_weights_and_have_one_set_of_fields(site: Site) -> None:
    key = site.tenant("acme", "one")
    operator = site.operator_key("acme")
    async with site.client(key) as client:
        answers = [
            await client.post("/v1/completions", json=ask("one")),
            await client.post("/v1/completions", json=ask("one", stream=True)),
            await client.post("/v1/completions", json=ask("none")),
            await client.get("/v1/nowhere"),
        ]
    async with site.client(operator) as client:
        answers.append(await client.get("/metrics"))
    async with site.client(key[:-1]) as client:
        answers.append(await client.post("/v1/completions", json=ask("one")))
    lines = site.lines()
    assert [line["request_id"] for line in lines] == [answer.headers["x-request-id"] for answer in answers]
    assert [line["status"] for line in lines] == [200, 200, 404, 404, 200, 401]
    codes = [None, None, "model_not_found", "route_not_found", None, "invalid_api_key"]
    assert [line["error_code"] for line in lines] == codes
    assert [line["tenant"] for line in lines] == ["acme", "acme", "acme", None, "acme", None]
    ids = [key[9:21], key[9:21], key[9:21], None, operator[9:21], None]
    assert [line["key_id"] for line in lines] == ids
    assert [line["version"] for line in lines] == [1, 1, None, None, None, None]
    assert [line["requested_model"] for line in lines] == ["one", "one", "none", None, None, None]
    assert lines[0]["adapter_digest"] == site.digest("acme", "one")
    assert lines[0]["base_fingerprint"] == site.engine.base.fingerprint
    assert (lines[0]["cold"], lines[1]["cold"]) == (True, False)
    assert lines[0]["load_s"] > 0
    assert len({frozenset(line) for line in lines}) == 1


async def misplaced(client: httpx.AsyncClient, key: str, root: Path | None) -> list[httpx.Response]:
    """Requests with a key in every place that a client can write to."""
    chat = {"model": BASE_NAME, "messages": [{"role": key, "content": "x"}]}
    bodies = (
        ask(key),
        ask(f"acme/{key}@1"),
        ask("x" * 60 + key),
        ask(BASE_NAME, temperature=key),
        ask(BASE_NAME, stop=[key, 5]),
        ask(BASE_NAME, logit_bias={key: 1}),
        ask(BASE_NAME, prompt=["x", [key]]),
        ask(BASE_NAME, **{key: 1}),
        ask(BASE_NAME, best_of=key),
        ask(BASE_NAME, service_tier=key),
    )
    answers = [await client.post("/v1/completions", json=body, headers={"X-Request-Id": key}) for body in bodies]
    answers.append(await client.post("/v1/chat/completions", json=chat))
    answers.append(await client.post("/v1/completions", content=f'{{"{key}":1,"{key}":2}}', headers=JSON))
    answers.append(await client.post("/v1/completions", content="{}", headers={"Content-Type": key}))
    answers.append(await client.post("/tokenize", json={"model": key, "prompt": "x"}))
    answers.append(await client.post("/detokenize", json={"tokens": [key]}))
    paths = (f"/v1/models/{key}", f"/v1/models/a/{key}", f"/{key}", f"/v1/models?after=&limit={key}")
    answers.extend([await client.get(path, headers={"X-Request-Id": f"id.{key}"}) for path in paths])
    for name, lora_path in ((key, str(root)), ("x", f"{root}/{key}"), (f"{key}@1", f"{root}/good")):
        answers.append(await client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": lora_path}))
    answers.append(await client.post("/v1/unload_lora_adapter", json={"lora_name": key}))
    paths = (f"tenants/{key}/keys", f"tenants/acme/adapters/{key}", f"tenants/acme/keys?{key}=1")
    answers.extend([await client.get(f"/admin/v1/{path}") for path in paths])
    answers.append(await client.post("/admin/v1/tenants", json={"tenant": key + "!"}))
    return answers


JSON = {"Content-Type": "application/json"}


async def test_a_key_that_was_written_to_the_wrong_place_does_not_come_back(site: Site) -> None:
    site.world.tenant("acme")
    key, other = site.operator_key("acme"), site.world.key("acme")
    root = site.folder.resolve() / "canary-root"
    adapter_dir(site.folder, 8).rename(root / "good")
    for mine in (key, other):
        async with site.client(key) as client:
            answers = await misplaced(client, mine, root)
        assert {answer.status_code for answer in answers} >= {400, 404, 415}
        assert all(answer.status_code >= 400 for answer in answers)
        for text in (*(f"{answer.text}{answer.headers}" for answer in answers), site.log.getvalue()):
            assert mine[9:21] not in text.replace(f'"key_id": "{mine[9:21]}"', ""), text
            assert mine[22:38] not in text, text
        assert sum("[redacted]" in answer.text for answer in answers) >= 12
    assert "[redacted]" in site.log.getvalue()


@pytest.mark.parametrize("key", ["canary-key-0001", "canary'-\\-\"-0002", "canary-" + "k" * 100])
async def test_the_one_key_of_a_server_does_not_come_back(key: str) -> None:
    log = StringIO()
    app = create_app(FakeEngine(base_name=BASE_NAME), FakeModels(), ServerConfig(api_key=key), log)
    transport, headers = httpx.ASGITransport(app), {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
        for model in (key, "x" * 60 + key):
            answers = [
                await client.post("/v1/completions", json=ask(model), headers={"X-Request-Id": key[:15]}),
                await client.post("/v1/completions", json=ask(BASE_NAME, temperature=model)),
                await client.post("/v1/completions", json=ask(BASE_NAME, **{model: 1})),
                await client.get(f"/v1/models/{quote(model)}"),
                await client.get(f"/{quote(model)}"),
            ]
            assert all(answer.status_code >= 400 for answer in answers)
            for text in (*(f"{answer.text}{answer.headers}" for answer in answers), log.getvalue()):
                assert "canary" not in text, text


class FakeModels(FakeCatalog):
    def resolve(self, model: str) -> Any:
        return None if model == BASE_NAME else super().resolve(model)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a lpx_live_abc_DEF b", "a [redacted] b"),
        ("LPX_LIVE_ABC", "[redacted]"),
        ("x=canary-1234;canary-12", "x=[redacted];[redacted]"),
        ("canary-", "canary-"),
        ("canary-1canary-1234", "[redacted][redacted]"),
    ],
)
def test_keys_and_beginnings_of_them_are_taken_out(text: str, shown: str) -> None:
    redactor = Redactor("canary-1234")
    assert redactor.text(text) == shown
    assert redactor.value({"a": [text, 1]}) == {"a": [shown, 1]}
    assert Redactor(None).text("canary-1234") == "canary-1234"


def test_the_registrys_settings_do_not_show_passwords(tmp_path: Path) -> None:
    config = RegistryConfig(tmp_path, "postgresql://u:canary@h/d", "s3://canary/x")
    assert "canary" not in repr(config)
    assert "canary" not in repr(ServerConfig(api_key="canary-0123456789"))


async def test_a_log_that_holds_what_it_should_not_is_seen(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: a middleware that logs the Authorization header, and no redaction, would fail the first test."""
    key = site.tenant("acme", "one")
    real = context._log_fields

    def leaky(given: context.RequestContext, scope: Any) -> dict[str, object]:
        return {**real(given, scope), "authorization": tokens[-1] if tokens else None}

    tokens: list[str] = []
    bearer = auth.bearer_token
    monkeypatch.setattr(auth, "bearer_token", lambda request: tokens.append(bearer(request)) or tokens[-1])
    monkeypatch.setattr(context, "_log_fields", leaky)
    async with site.client(key) as client:
        await client.get("/v1/models")
        assert key[22:] not in site.log.getvalue()
        monkeypatch.setattr(Redactor, "text", lambda self, text: text)
        await client.get("/v1/models")
    assert key[22:] in site.log.getvalue()
