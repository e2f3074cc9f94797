"""Keys, prompts, paths and names of others are in no answer, log line or metric they do not belong in (T11)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.core.comparison import AdapterComparison
from loraplex.registry import RegistryConfig, RegistryUnavailable
from loraplex.server import ServerConfig, auth, context
from tests.registry.helpers import OPERATOR, adapter_dir, bad_adapter_dir

from .helpers import assert_error
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


def test_the_registrys_settings_do_not_show_passwords(tmp_path: Path) -> None:
    config = RegistryConfig(tmp_path, "postgresql://u:canary@h/d", "s3://canary/x")
    assert "canary" not in repr(config)
    assert "canary" not in repr(ServerConfig(api_key="canary-0123456789"))


async def test_a_log_that_holds_what_it_should_not_is_seen(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: a middleware that logs the Authorization header would fail the first test."""
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
    assert key[22:] in site.log.getvalue()
