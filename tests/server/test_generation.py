"""Both generating routes: answers, streams, usage, choices, prompts, echo, stop, logprobs and identity."""

import httpx
import pytest

from loraplex.core import ServerError
from loraplex.testing import FakeEngine, fake_text

from .helpers import ALPHA, BASE, BETA, assert_error, chat, chunks, completion, events_of

pytestmark = pytest.mark.anyio

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USAGE = {"include_usage": True}


def usage(prompt: int, output: int, cached: int = 0) -> dict[str, object]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def test_completion_is_what_the_engine_made(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await client.post(COMPLETIONS, json=completion())
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    expected = fake_text(None, engine.encode("Hello"), 16)
    assert body["choices"] == [
        {"index": 0, "text": expected, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert body["usage"] == usage(6, 16)


async def test_chat_is_what_the_engine_made(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = (await client.post(CHAT, json=chat())).json()
    prompt = engine.encode("user: Hello\nassistant: ")
    assert body["object"] == "chat.completion"
    message = body["choices"][0]["message"]
    assert message == {"role": "assistant", "content": fake_text(None, prompt, 16), "refusal": None}
    assert body["usage"]["prompt_tokens"] == len(prompt)


async def test_chat_without_max_tokens_runs_to_the_context(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = (await client.post(CHAT, json=chat(max_tokens=None))).json()
    assert body["usage"]["total_tokens"] == engine.max_model_len
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
async def test_chat_takes_both_names_of_the_limit(client: httpx.AsyncClient, limit: str) -> None:
    body = (await client.post(CHAT, json=chat(**{"max_tokens": None, limit: 3}))).json()
    assert body["usage"]["completion_tokens"] == 3


async def test_chat_refuses_two_different_limits(client: httpx.AsyncClient) -> None:
    assert_error(await client.post(CHAT, json=chat(max_completion_tokens=3)), 400, "max_completion_tokens")


async def test_chat_content_parts_are_joined(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts, "name": "ann"}]
    await client.post(CHAT, json=chat(messages=messages))
    prompt = engine.decode(engine.started[0].prompt_token_ids)
    assert prompt == "system: be brief\nuser: one\ntwo\nassistant: "


async def test_an_answer_can_be_sent_back_as_a_message(client: httpx.AsyncClient) -> None:
    answer = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None, "audio": None}
    messages = [{"role": "user", "content": "a"}, answer, {"role": "user", "content": "b"}]
    assert (await client.post(CHAT, json=chat(messages=messages))).status_code == 200


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"logprobs": 2}, {"stop": ["e", "qqq"]}, {"echo": True}])
async def test_streamed_completion_equals_the_whole_one(client: httpx.AsyncClient, fields: dict[str, object]) -> None:
    body = completion(prompt=["one", "two"], seed=7, **fields)
    whole = (await client.post(COMPLETIONS, json=body)).json()
    parts = chunks(await client.post(COMPLETIONS, json={**body, "stream": True, "stream_options": USAGE}))
    for expected in whole["choices"]:
        mine = [
            part["choices"][0] for part in parts if part["choices"] and part["choices"][0]["index"] == expected["index"]
        ]
        assert "".join(part["text"] for part in mine) == expected["text"]
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == [expected["finish_reason"]]
        assert mine[-1]["stop_reason"] == expected["stop_reason"]
        if "logprobs" in fields:
            for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [item for part in mine for item in part["logprobs"][key]] == expected["logprobs"][key]
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"] == whole["usage"]
    assert all(part["usage"] is None for part in parts[:-1])


async def test_streamed_chat_equals_the_whole_one(client: httpx.AsyncClient) -> None:
    body = chat(n=2, logprobs=True, top_logprobs=2)
    whole = (await client.post(CHAT, json=body)).json()
    parts = chunks(await client.post(CHAT, json={**body, "stream": True}))
    assert all("usage" not in part for part in parts)
    assert [part["choices"][0]["delta"] for part in parts[:2]] == [{"role": "assistant", "content": ""}] * 2
    for expected in whole["choices"]:
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == expected["index"]]
        assert "".join(part["delta"].get("content", "") for part in mine) == expected["message"]["content"]
        logprobs = [item for part in mine if part["logprobs"] for item in part["logprobs"]["content"]]
        assert logprobs == expected["logprobs"]["content"]


async def test_choices_are_indexed_by_prompt_and_then_by_n(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = (await client.post(COMPLETIONS, json=completion(prompt=["x", "y"], n=2, temperature=1))).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in body["choices"]]
    assert texts[0] == fake_text(None, engine.encode("x"), 16)
    assert texts[2] == fake_text(None, engine.encode("y"), 16)
    assert len(set(texts)) == 4
    assert body["usage"] == usage(4, 64)


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_counts_what_came_from_the_prefix_cache(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.cached_tokens = 4
    body = completion(prompt=["Hello", "x"], stream=stream, **({"stream_options": USAGE} if stream else {}))
    response = await client.post(COMPLETIONS, json=body)
    last = chunks(response)[-1] if stream else response.json()
    assert last["usage"] == usage(6 + 2, 32, 4 + 2)


@pytest.mark.parametrize("prompt", ["Hi", ["Hi"], [256, 72, 105], [[256, 72, 105]]])
async def test_every_form_of_prompt_means_the_same(client: httpx.AsyncClient, prompt: object) -> None:
    body = (await client.post(COMPLETIONS, json=completion(prompt=prompt, echo=True))).json()
    tokens = [256, 72, 105]
    assert body["choices"][0]["text"] == "Hi" + fake_text(None, tokens, 16)


async def test_prompts_run_at_the_same_time(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.delay_s = 0.001
    await client.post(COMPLETIONS, json=completion(prompt=["a", "b", "c"]))
    assert engine.peak_running == 3


async def test_stop_string_ends_the_text_before_it(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    text = fake_text(None, engine.encode("Hello"), 16)
    stop = text[5:8]
    choice = (await client.post(COMPLETIONS, json=completion(stop=stop))).json()["choices"][0]
    assert choice["text"] == text[: text.find(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    kept = (await client.post(COMPLETIONS, json=completion(stop=stop, include_stop_str_in_output=True))).json()
    assert kept["choices"][0]["text"].endswith(stop)


async def test_completion_logprobs_have_four_parallel_lists(client: httpx.AsyncClient) -> None:
    logprobs = (await client.post(COMPLETIONS, json=completion(logprobs=3))).json()["choices"][0]["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(values) for values in logprobs.values()} == {16}
    assert logprobs["text_offset"] == list(range(16))
    assert all(token in top for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))


async def test_top_logprobs_needs_logprobs(client: httpx.AsyncClient) -> None:
    assert_error(await client.post(CHAT, json=chat(top_logprobs=2)), 400, "top_logprobs")


async def test_echo_with_logprobs_is_refused(client: httpx.AsyncClient) -> None:
    assert_error(await client.post(COMPLETIONS, json=completion(echo=True, logprobs=1)), 400, "echo")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("model", "adapter"), [(BASE, None), ("beta", BETA), ("acme/alpha", ALPHA), ("beta@1", BETA)])
@pytest.mark.parametrize("stream", [False, True])
async def test_identity_agrees_everywhere(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, model: str, adapter: object, stream: bool
) -> None:
    engine.cold, engine.load_s = True, 0.25
    request = completion(model=model) if path == COMPLETIONS else chat(model=model)
    response = await client.post(path, json={**request, "stream": stream}, headers={"X-Request-Id": "abc-1"})
    bodies = chunks(response) if stream else [response.json()]
    fingerprint = engine.base.fingerprint
    tag = f"base-{fingerprint[:12]}"
    expected = None
    header = "none"
    if adapter is not None:
        ref = BETA if adapter is BETA else ALPHA
        expected = {"name": ref.name, "version": ref.version, "digest": ref.digest}
        header = f"name={ref.name}; version={ref.version}; digest={ref.digest}"
        tag += f".lora-{ref.digest[:12]}"
        model = ref.label
    assert response.headers["x-loraplex-adapter"] == header
    assert response.headers["x-loraplex-base"] == fingerprint
    assert response.headers["x-request-id"] == "abc-1"
    assert {body["model"] for body in bodies} == {model}
    assert {body["system_fingerprint"] for body in bodies} == {tag}
    for body in (bodies[0], bodies[-1]):
        shown = dict(body["x_loraplex"])
        assert set(shown.pop("timings")) == {"queue_s", "load_s", "prefill_s", "decode_s"}
        assert shown == {
            "adapter": expected,
            "base": {"name": BASE, "fingerprint": fingerprint},
            "cold": True,
            "load_s": 0.25,
            "request_id": "abc-1",
        }


async def test_adapters_answer_differently(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for model, digest in ((BASE, None), ("beta", BETA.digest), ("acme/alpha", ALPHA.digest)):
        body = (await client.post(COMPLETIONS, json=completion(model=model))).json()
        assert body["choices"][0]["text"] == fake_text(digest, engine.encode("Hello"), 16)


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_of_other_weights_is_withheld(client: httpx.AsyncClient, engine: FakeEngine, stream: bool) -> None:
    engine.serve_other = BETA
    for model in (BASE, "acme/alpha"):
        assert_error(await client.post(COMPLETIONS, json=completion(model=model, stream=stream)), 500)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_model_is_404_and_never_the_base(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, stream: bool
) -> None:
    request = completion(model="nope") if path == COMPLETIONS else chat(model="nope")
    response = await client.post(path, json={**request, "stream": stream})
    assert_error(response, 404, "model", "model_not_found")
    assert response.json()["error"]["type"] == "NotFoundError"
    assert engine.started == []


async def test_error_before_the_first_token_of_a_stream_is_an_http_error(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.max_running = 0
    response = await client.post(COMPLETIONS, json=completion(stream=True))
    assert_error(response, 503, code="overloaded")
    assert response.headers["retry-after"] == "2"


@pytest.mark.parametrize("error", [ServerError("it broke"), RuntimeError("secret cause")])
async def test_error_in_a_stream_is_an_event_and_no_done(
    client: httpx.AsyncClient, engine: FakeEngine, error: Exception
) -> None:
    engine.error, engine.error_after = error, 3
    response = await client.post(COMPLETIONS, json=completion(stream=True))
    events = events_of(response.text)
    assert len(events) == 4
    assert '"error":{"message"' in events[-1]
    assert "[DONE]" not in response.text
    assert "secret cause" not in response.text


async def test_one_failing_prompt_cancels_the_others(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.max_running = 2
    assert_error(await client.post(COMPLETIONS, json=completion(prompt=["a", "b", "c"])), 503)
    assert len(engine.cancelled) == 2
    assert engine.running == {}


async def test_client_request_id_is_never_an_engine_id(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.delay_s = 0.001
    for _ in range(2):
        response = await client.post(COMPLETIONS, json=completion(), headers={"X-Request-Id": "same"})
        assert response.headers["x-request-id"] == "same"
    assert len({request.request_id for request in engine.started}) == 2


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é", "-x"])
async def test_odd_request_id_is_replaced(client: httpx.AsyncClient, given: str) -> None:
    response = await client.get("/health", headers=[(b"X-Request-Id", given.encode("latin-1"))])
    assert len(response.headers["x-request-id"]) == 32
