"""The access log: one line a request, with what ran and never with what was said."""

import io
import json
from typing import Any

import httpx
import pytest

from loraplex.core import NonFiniteOutput
from loraplex.server import ServerConfig, create_app
from loraplex.testing import FakeEngine

from .helpers import BETA, FakeCatalog, completion

pytestmark = pytest.mark.anyio


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("stream", [False, True])
async def test_line_names_the_weights_that_ran(
    client: httpx.AsyncClient, engine: FakeEngine, log_stream: io.StringIO, stream: bool
) -> None:
    body = completion(model="beta", stream=stream, prompt="canary-prompt", user="canary-user")
    response = await client.post("/v1/completions", json=body)
    (line,) = lines(log_stream)
    assert line["event"] == "request"
    assert line["request_id"] == response.headers["x-request-id"]
    assert (line["route"], line["status"]) == ("/v1/completions", 200)
    assert (line["model"], line["requested_model"]) == ("beta@1", "beta")
    assert (line["adapter_digest"], line["base_fingerprint"]) == (BETA.digest, engine.base.fingerprint)
    assert (line["prompt_tokens"], line["output_tokens"]) == (14, 16)
    assert line["seconds"] > 0
    assert "canary" not in log_stream.getvalue()


async def test_error_paths_log_no_prompt_and_no_key(engine: FakeEngine, log_stream: io.StringIO) -> None:
    key = "canary-key-0001"
    app = create_app(engine, FakeCatalog(), ServerConfig(api_key=key), log_stream)
    headers = {"Authorization": f"Bearer {key}"}
    engine.error = RuntimeError("it broke on canary-prompt")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for body in (
            completion(prompt="canary-prompt"),
            completion(prompt="canary-prompt", stream=True),
            completion(prompt=["canary-prompt", 5]),
            completion(model="nope", prompt="canary-prompt"),
        ):
            await client.post("/v1/completions", json=body, headers=headers)
            await client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}-wrong"})
    assert "canary" not in log_stream.getvalue()
    statuses = [line["status"] for line in lines(log_stream) if line["event"] == "request"]
    assert statuses == [500, 401, 500, 401, 400, 401, 404, 401]
    assert any(line["event"] == "unexpected_error" for line in lines(log_stream))


async def test_error_in_a_stream_is_on_the_line(
    client: httpx.AsyncClient, engine: FakeEngine, log_stream: io.StringIO
) -> None:
    engine.error, engine.error_after = RuntimeError("it broke"), 2
    await client.post("/v1/completions", json=completion(stream=True))
    line = lines(log_stream)[-1]
    assert (line["status"], line["error_code"], line["output_tokens"]) == (200, "internal_error", 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_weights_that_ran_before_an_error_are_named(
    client: httpx.AsyncClient, engine: FakeEngine, log_stream: io.StringIO, stream: bool
) -> None:
    engine.error, engine.error_after = NonFiniteOutput("beta@1"), 2
    response = await client.post("/v1/completions", json=completion(model="beta", stream=stream))
    assert response.status_code == (200 if stream else 500)
    assert response.headers["x-loraplex-adapter"] == f"name=beta; version=1; digest={BETA.digest}"
    line = lines(log_stream)[-1]
    assert (line["model"], line["adapter_digest"], line["error_code"]) == ("beta@1", BETA.digest, "non_finite_output")
    assert line["error_detail"] == "The model 'beta@1' produced NaN or infinite values; the request was stopped."


async def test_the_message_of_a_clients_mistake_is_not_logged(
    client: httpx.AsyncClient, log_stream: io.StringIO
) -> None:
    await client.post("/v1/completions", json=completion(temperature="canary"))
    assert (lines(log_stream)[-1]["error_code"], lines(log_stream)[-1]["error_detail"]) == ("invalid_request", None)
    assert "canary" not in log_stream.getvalue()


async def test_model_name_cannot_forge_a_line(client: httpx.AsyncClient, log_stream: io.StringIO) -> None:
    await client.post("/v1/completions", json=completion(model='x"}\n{"event": "forged'))
    assert [line["event"] for line in lines(log_stream)] == ["request"]
