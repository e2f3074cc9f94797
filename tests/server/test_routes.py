"""Models, tokens and probes."""

import asyncio
import threading

import httpx
import pytest
from fastapi import FastAPI

from loraplex.core import ConfigError, limits
from loraplex.server import ServerConfig, create_app
from loraplex.testing import FakeEngine

from .helpers import ALPHA, BASE, BETA, FakeCatalog, assert_error

pytestmark = pytest.mark.anyio


async def test_models_are_the_base_and_its_adapters(client: httpx.AsyncClient) -> None:
    body = (await client.get("/v1/models")).json()
    assert body["object"] == "list"
    base, alpha, beta = body["data"]
    assert (base["id"], base["root"], base["parent"]) == (BASE, BASE, None)
    assert (alpha["id"], alpha["root"], alpha["parent"]) == (ALPHA.name, ALPHA.digest, BASE)
    assert (alpha["created"], beta["parent"]) == (1_700_000_000, BASE)
    assert (beta["id"], beta["version"], beta["max_model_len"]) == (BETA.name, 1, 512)
    for card in body["data"]:
        assert (card["object"], card["owned_by"], type(card["created"])) == ("model", "loraplex", int)


async def test_cards_tell_the_declared_base_and_that_nothing_proves_it(client: httpx.AsyncClient) -> None:
    base, alpha, beta = (await client.get("/v1/models")).json()["data"]
    assert (base["declared_base"], base["base_verified"]) == (None, None)
    assert (alpha["declared_base"], alpha["base_verified"]) == ("acme/base-135M", False)
    assert (beta["declared_base"], beta["base_verified"]) == (None, False)
    assert (await client.get(f"/v1/models/{ALPHA.name}")).json() == alpha


def test_catalog_of_another_base_is_a_config_error() -> None:
    for name in ("other-base", "beta"):
        with pytest.raises(ConfigError, match=name):
            create_app(FakeEngine(base_name=name), FakeCatalog(), ServerConfig())


@pytest.mark.parametrize(("model", "root"), [(BASE, BASE), ("acme/alpha", "a" * 64), ("beta@1", "b" * 64)])
async def test_one_model_is_found_by_any_of_its_names(client: httpx.AsyncClient, model: str, root: str) -> None:
    card = (await client.get(f"/v1/models/{model}")).json()
    assert (card["id"], card["root"]) == (model, root)


@pytest.mark.parametrize("model", ["nope", "alpha", "beta@2", "..%2f..%2fetc", "%00", "x" * 300])
async def test_unknown_model_is_404(client: httpx.AsyncClient, model: str) -> None:
    assert_error(await client.get(f"/v1/models/{model}"), 404, "model", "model_not_found")


async def test_line_break_in_a_model_name_is_404(client: httpx.AsyncClient) -> None:
    assert_error(await client.get("/v1/models/beta%0d%0aX: y"), 404)


async def test_tokenize_and_detokenize_are_inverse(client: httpx.AsyncClient) -> None:
    body = (await client.post("/tokenize", json={"model": "beta", "prompt": "Hé", "return_token_strs": True})).json()
    assert body["tokens"] == [256, 72, 195, 169]
    assert (body["count"], body["max_model_len"], len(body["token_strs"])) == (4, 512, 4)
    back = (await client.post("/detokenize", json={"tokens": body["tokens"]})).json()
    assert back == {"prompt": "Hé"}


async def test_tokenize_without_special_tokens(client: httpx.AsyncClient) -> None:
    body = (await client.post("/tokenize", json={"prompt": "H", "add_special_tokens": False})).json()
    assert (body["tokens"], body["token_strs"]) == ([72], None)


async def test_tokenize_takes_a_conversation(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": "x"}]
    body = (await client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})).json()
    assert engine.decode(body["tokens"]) == "user: x\n"


LIMIT = limits.MAX_DETOKENIZED_TOKENS


async def test_token_texts_are_given_up_to_the_limit(client: httpx.AsyncClient) -> None:
    body = {"prompt": "x" * LIMIT, "add_special_tokens": False, "return_token_strs": True}
    assert (await client.post("/tokenize", json=body)).json()["token_strs"] == ["x"] * LIMIT
    response = await client.post("/tokenize", json={**body, "prompt": "x" * (LIMIT + 1)})
    assert_error(response, 400, "return_token_strs")
    assert response.json()["error"]["message"].endswith(f"at most {LIMIT} tokens; the text has {LIMIT + 1}.")
    assert (await client.post("/tokenize", json={"prompt": "x" * LIMIT})).json()["count"] == LIMIT + 1


async def test_detokenize_takes_tokens_up_to_the_limit(client: httpx.AsyncClient) -> None:
    assert (await client.post("/detokenize", json={"tokens": [72] * LIMIT})).json() == {"prompt": "H" * LIMIT}
    response = await client.post("/detokenize", json={"tokens": [72] * (LIMIT + 1)})
    assert_error(response, 400, "tokens")
    assert str(LIMIT) in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "method"),
    [
        ("/tokenize", {"prompt": "x" * 5000}, "encode"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 5000}]}, "encode_chat"),
        ("/tokenize", {"prompt": "x" * 5000, "return_token_strs": True}, "decode"),
        ("/detokenize", {"tokens": [72] * 5000}, "decode"),
        ("/v1/completions", {"model": BASE, "prompt": ["x" * 2500] * 2}, "encode"),
        ("/v1/completions", {"model": BASE, "prompt": [[72] * 500] * 10, "max_tokens": 1, "echo": True}, "decode"),
        ("/v1/chat/completions", {"model": BASE, "messages": [{"role": "user", "content": "x" * 5000}]}, "encode_chat"),
    ],
)
async def test_long_texts_are_dealt_with_in_two_threads(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, object],
    method: str,
) -> None:
    names: set[str] = set()
    original = getattr(engine, method)

    def spy(*args: object) -> object:
        names.add(threading.current_thread().name)
        return original(*args)

    monkeypatch.setattr(FakeEngine, method, lambda self, *args: spy(*args))
    await asyncio.gather(*(client.post(path, json=body) for _ in range(8)))
    assert names <= {"loraplex-text_0", "loraplex-text_1"}
    assert names


async def test_token_prompts_become_text_only_for_an_echo(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[object] = []
    monkeypatch.setattr(FakeEngine, "decode", lambda self, token_ids: decoded.append(token_ids) or "Hi")
    body = {"model": BASE, "prompt": [72, 105], "max_tokens": 1}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert decoded == []
    answer = (await client.post("/v1/completions", json={**body, "echo": True})).json()
    assert decoded == [(72, 105)]
    assert answer["choices"][0]["text"].startswith("Hi")


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, {"messages": []}]
)
async def test_tokenize_needs_exactly_one_input(client: httpx.AsyncClient, body: dict[str, object]) -> None:
    assert_error(await client.post("/tokenize", json=body), 400, "prompt")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_tokens_of_an_unknown_model_are_404(client: httpx.AsyncClient, path: str) -> None:
    body = {"model": "nope", **({"prompt": "x"} if path == "/tokenize" else {"tokens": [1]})}
    assert_error(await client.post(path, json=body), 404, "model", "model_not_found")


@pytest.mark.parametrize("tokens", [[258], [-1], [True], ["1"], [2**63], 5])
async def test_detokenize_refuses_what_is_no_token(client: httpx.AsyncClient, tokens: object) -> None:
    assert_error(await client.post("/detokenize", json={"tokens": tokens}), 400, "tokens")


async def test_probes_follow_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/ready")).status_code == 200
    engine.alive = False
    assert_error(await client.get("/health"), 503, code="engine_dead")
    assert_error(await client.get("/ready"), 503, code="engine_dead")


async def test_draining_is_healthy_but_not_ready(client: httpx.AsyncClient, app: FastAPI) -> None:
    app.state.service.lifecycle.draining = True
    assert (await client.get("/health")).status_code == 200
    assert_error(await client.get("/ready"), 503)
