"""Strict bodies: types, unknown fields, limits, duplicate keys, sizes."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from loraplex.core import InvalidRequest, limits
from loraplex.server import ServerConfig, create_app
from loraplex.server.body import parse_json, validate
from loraplex.server.schema import ChatBody, CompletionBody
from loraplex.testing import FakeEngine

from .helpers import FakeCatalog, assert_error, chat, completion

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON_HEADERS = {"Content-Type": "application/json"}
ROOM = 512 - 6  # context of the fake engine less the tokens of "Hello"

pytestmark = pytest.mark.anyio


async def send(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post(COMPLETIONS, json=completion(**fields))


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("max_tokens", [1, 2, ROOM - 1, ROOM], [0, -1, ROOM + 1, 2**24 + 1, 2**63, -(2**63)]),
        ("min_tokens", [0, 1, 16], [-1, 17, 2**31]),
        ("n", [1, 2, limits.MAX_N - 1, limits.MAX_N], [0, -1, limits.MAX_N + 1, 2**63]),
        ("temperature", [0, 0.0, 1, 1.99, 2, 2.0], [-0.01, 2.01, 1e308, -1]),
        ("top_p", [0.01, 0.99, 1, 1.0], [0, 0.0, -0.01, 1.01]),
        ("top_k", [-1, 0, 1, 2**31 - 2, 2**31 - 1], [-2, 2**31, 2**63]),
        ("min_p", [0, 0.5, 0.99, 1], [-0.01, 1.01]),
        ("presence_penalty", [-2, -1.99, 0, 1.99, 2], [-2.01, 2.01]),
        ("frequency_penalty", [-2, -1.99, 0, 1.99, 2], [-2.01, 2.01]),
        ("repetition_penalty", [0.01, 0.02, 9.99, 10], [0.009, 0, -1, 10.01]),
        (
            "seed",
            [limits.MIN_SEED, limits.MIN_SEED + 1, 0, limits.MAX_SEED],
            [limits.MIN_SEED - 1, limits.MAX_SEED + 1],
        ),
        ("logprobs", [0, 1, limits.MAX_LOGPROBS - 1, limits.MAX_LOGPROBS], [-1, limits.MAX_LOGPROBS + 1]),
        ("stop_token_ids", [[], [0], [257], [1] * 64], [[-1], [258], [2**31], [1] * 65]),
        ("stop", [[], ["q" * 63], "q" * 64, ["qq"] * 4], ["", [""], "q" * 65, ["qq"] * 5]),
        ("logit_bias", [{}, {"0": 100, "257": -100.0}], [{"258": 1}, {"1": 100.1}, {"1": -101}, {"-1": 1}, {"01": 1}]),
        ("prompt", ["a", [0], [257], ["a"] * 64], [[258], [-1], ["a"] * 65, [], [[]], "a" * 511, [1] * 512]),
        ("model", [], ["", "x" * 257]),
    ],
)
async def test_limits_hold_at_their_edges(
    client: httpx.AsyncClient, field: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        response = await send(client, **{field: value})
        assert response.status_code == 200, (value, response.text)
    for value in bad:
        assert_error(await send(client, **{field: value}), 400, field)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("model", [5, True, [], {}, None]),
        ("prompt", [5, True, None, {}, [True], [1.0], ["a", 1], [1, "a"], [[1], "a"], [None], [[True]], [["a"]]]),
        ("max_tokens", ["5", True, 5.0, 5.5, [], {}]),
        ("n", ["1", True, 1.0, [1]]),
        ("temperature", ["1", True, [], {}]),
        ("top_p", ["1", True]),
        ("top_k", ["1", True, 1.0]),
        ("min_p", ["0", False]),
        ("presence_penalty", ["0", False]),
        ("frequency_penalty", ["0", False]),
        ("repetition_penalty", ["1", True]),
        ("seed", ["1", True, 1.0]),
        ("stop", [5, True, [5], [None], {"a": 1}]),
        ("stop_token_ids", [5, "5", [True], ["5"], [5.0]]),
        ("logit_bias", [[], "x", {"a": 1}, {"1": "1"}, {"1": True}, {"1": None}, {"": 1}, {"9" * 5000: 1}]),
        ("logprobs", [True, "1", 1.0]),
        ("echo", [1, "true"]),
        ("stream", [1, "true"]),
        ("ignore_eos", [1, "true"]),
        ("min_tokens", [True, "1"]),
        ("skip_special_tokens", [1, "false"]),
        ("include_stop_str_in_output", [0]),
        ("user", [5]),
        ("metadata", ["x"]),
        ("store", [True, "no"]),
        ("service_tier", ["flex", 5]),
        ("stream_options", [True, {"include_usage": 1}, {"other": True}, {"include_usage": True}]),
        ("best_of", [2, True, 0]),
        ("suffix", ["x"]),
        ("prompt_embeds", ["x", []]),
        ("response_format", [{"type": "json_object"}, {"type": "text", "x": 1}]),
        ("use_beam_search", [True]),
        ("zzz", [None, 1]),
    ],
)
async def test_wrong_types_and_fields_are_400_and_named(
    client: httpx.AsyncClient, engine: FakeEngine, field: str, bad: list[Any]
) -> None:
    for value in bad:
        assert_error(await send(client, **{field: value}), 400, field)
    assert engine.started == []


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("messages", [None, [], "hi", [5], [{}], [{"role": "user"}], [{"role": "tool", "content": "x"}]]),
        ("messages", [[{"role": "user", "content": None}], [{"role": "user", "content": "x", "y": 1}]]),
        ("messages", [[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]]),
        ("messages", [[{"role": "user", "content": [{"type": "text", "text": "x", "z": 1}]}]]),
        ("messages", [[{"role": "assistant", "content": "x", "tool_calls": [{}]}]]),
        ("messages", [[{"role": "user", "content": "x"}] * (limits.MAX_MESSAGES + 1)]),
        ("logprobs", [1, "true"]),
        ("max_completion_tokens", [True, "1", 0]),
        ("tools", [[{"type": "function"}]]),
        ("functions", [[{}]]),
        ("tool_choice", ["auto", {}]),
        ("audio", [{}]),
        ("modalities", [["audio"], ["text", "audio"]]),
        ("reasoning_effort", ["low"]),
        ("chat_template", ["{{ 1 }}"]),
        ("chat_template_kwargs", [{"a": 1}]),
        ("echo", [True]),
        ("prompt", ["x"]),
    ],
)
async def test_chat_refuses_by_name(client: httpx.AsyncClient, field: str, bad: list[Any]) -> None:
    for value in bad:
        assert_error(await client.post(CHAT, json=chat(**{field: value})), 400, field)


@pytest.mark.parametrize("top", [0, 1, limits.MAX_LOGPROBS])
async def test_top_logprobs_in_range(client: httpx.AsyncClient, top: int) -> None:
    body = (await client.post(CHAT, json=chat(logprobs=True, top_logprobs=top))).json()
    assert len(body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == top


@pytest.mark.parametrize("top", [-1, limits.MAX_LOGPROBS + 1])
async def test_errors_name_the_field_as_it_was_written(client: httpx.AsyncClient, top: int) -> None:
    assert_error(await client.post(CHAT, json=chat(logprobs=True, top_logprobs=top)), 400, "top_logprobs")
    response = await client.post(CHAT, json=chat(max_tokens=None, max_completion_tokens=0))
    assert_error(response, 400, "max_completion_tokens")


async def test_harmless_and_neutral_fields_are_taken(client: httpx.AsyncClient) -> None:
    neutral = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "best_of": 1,
        "suffix": None,
        "response_format": {"type": "text"},
        "seed": None,
        "stop": None,
        "logit_bias": None,
    }
    assert (await send(client, **neutral)).status_code == 200
    chatty = {"tools": [], "tool_choice": "none", "modalities": ["text"], "parallel_tool_calls": True, "n": None}
    assert (await client.post(CHAT, json=chat(**chatty))).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"x" * i: None for i in range(limits.MAX_LOGIT_BIAS + 1)}),
        ("messages", [{"role": "user", "content": "x"}] * (limits.MAX_MESSAGES + 1)),
        ("prompt", [[1.5] * 100_000]),
        ("prompt", ["a"] * 40_000),
        ("model", "x" * 100_000),
        ("model", ["x"] * 40_000),
    ],
)
async def test_too_many_entries_are_refused_before_they_are_read(
    client: httpx.AsyncClient, field: str, value: object
) -> None:
    body = chat() if field == "messages" else completion()
    response = await client.post(CHAT if field == "messages" else COMPLETIONS, json={**body, field: value})
    assert_error(response, 400, field)
    assert len(response.json()["error"]["message"]) < 250


async def test_context_too_long_has_its_code(client: httpx.AsyncClient) -> None:
    assert_error(await send(client, prompt="a" * 600), 400, "prompt", "context_length_exceeded")
    long = [{"role": "user", "content": "a" * 600}]
    assert_error(await client.post(CHAT, json=chat(messages=long)), 400, "messages", "context_length_exceeded")


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model": "fake-base", "model": "beta", "prompt": "x"}',
        b'{"model": "fake-base", "prompt": "x", "logit_bias": {"1": 1, "1": 2}}',
        b'{"model": "fake-base", "prompt": "x", "temperature": NaN}',
        b'{"model": "fake-base", "prompt": "x", "temperature": Infinity}',
        b'{"model": "fake-base", "prompt": "x", "temperature": 1e400}',
        b'{"model": "fake-base", "prompt": "x", "n": ' + b"1" * 5000 + b"}",
        b'{"model": "fake-base", "prompt": "\\ud800"}',
        b'{"model": "fake-base", "prompt": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"",
        b"null",
        b"[]",
        b'"x"',
    ],
)
async def test_odd_json_is_400(client: httpx.AsyncClient, engine: FakeEngine, raw: bytes) -> None:
    assert_error(await client.post(COMPLETIONS, content=raw, headers=JSON_HEADERS), 400)
    assert engine.started == []


def test_duplicate_key_is_named() -> None:
    with pytest.raises(InvalidRequest, match="'b' stands twice"):
        parse_json(b'{"a": 1, "b": 1, "b": 2}')


def test_null_stands_for_an_absent_optional_field() -> None:
    body = validate({"model": "m", "prompt": "p", "temperature": None, "max_tokens": None}, CompletionBody)
    assert (body.temperature, body.max_tokens) == (1.0, 16)


def test_fields_are_either_taken_or_refused() -> None:
    for schema in (CompletionBody, ChatBody):
        assert not schema.unsupported.keys() & schema.model_fields.keys()


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
async def test_other_media_types_are_415(client: httpx.AsyncClient, media_type: str) -> None:
    content = json.dumps(completion()).encode()
    response = await client.post(COMPLETIONS, content=content, headers={"Content-Type": media_type})
    assert_error(response, 415, code="unsupported_media_type")


async def test_charset_parameter_is_fine_and_gzip_is_not(client: httpx.AsyncClient) -> None:
    content = json.dumps(completion()).encode()
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert (await client.post(COMPLETIONS, content=content, headers=headers)).status_code == 200
    response = await client.post(COMPLETIONS, content=content, headers={**headers, "Content-Encoding": "gzip"})
    assert_error(response, 415)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("extra", "status"), [(-1, 200), (0, 200), (1, 413)])
async def test_body_limit_holds_at_its_edge(engine: FakeEngine, chunked: bool, extra: int, status: int) -> None:
    limit = 1000
    app = create_app(engine, FakeCatalog(), ServerConfig(max_body_bytes=limit, access_log=False))
    content = json.dumps(completion()).encode().ljust(limit + extra)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(content), 100):
            yield content[start : start + 100]

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        response = await client.post(COMPLETIONS, content=pieces() if chunked else content, headers=JSON_HEADERS)
    assert response.status_code == status
    if status == 413:
        assert_error(response, 413, code="request_too_large")


async def test_body_that_does_not_arrive_is_408(engine: FakeEngine) -> None:
    app = create_app(engine, FakeCatalog(), ServerConfig(body_timeout_s=0.02, access_log=False))

    async def pieces() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(1)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        response = await client.post(COMPLETIONS, content=pieces(), headers=JSON_HEADERS)
    assert_error(response, 408, code="request_timeout")
