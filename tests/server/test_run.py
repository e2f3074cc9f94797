"""A real server on a loopback port: the openai client, disconnects, slow readers, header limits, shutdown."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from fastapi import FastAPI

from loraplex.server import RunConfig, ServerConfig, create_app
from loraplex.testing import FakeEngine

from .helpers import BASE, FakeCatalog, LiveServer, completion, wait_until

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def sdk(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as sdk:
        yield sdk


def raw_request(port: int, body: dict[str, object]) -> socket.socket:
    """A socket on which the request has been sent."""
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    return connection


def test_openai_completion(sdk: openai.OpenAI, engine: FakeEngine) -> None:
    extra = {"ignore_eos": True, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [5]}
    answer = sdk.completions.create(model="beta", prompt="Hello", logprobs=2, extra_body=extra)
    assert answer.model == "beta@1"
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.tokens or ()) == 16
    params = engine.started[0].params
    assert (params.top_k, params.min_p, params.repetition_penalty, params.stop_token_ids) == (5, 0.1, 1.1, (5,))


def test_openai_chat_with_logprobs(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model=BASE, messages=HELLO, logprobs=True, top_logprobs=3, max_tokens=4)  # type: ignore[arg-type]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content[0].top_logprobs) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(logprobs.content)


def test_openai_streams_equal_whole_answers(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(model="beta", messages=HELLO, max_tokens=32)  # type: ignore[arg-type]
    stream = sdk.chat.completions.create(
        model="beta",
        messages=HELLO,  # type: ignore[arg-type]
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    parts = list(stream)
    assert (
        "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        == whole.choices[0].message.content
    )
    assert parts[-1].usage == whole.usage
    assert {part.model for part in parts} == {"beta@1"}


def test_openai_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == [BASE, "acme/alpha", "beta"]
    assert sdk.models.retrieve("beta").owned_by == "loraplex"


def test_openai_errors_have_their_classes(sdk: openai.OpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.completions.create(model="nope", prompt="x")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError):
        sdk.completions.create(model=BASE, prompt="x", n=99)
    engine.error, engine.error_after = RuntimeError("x"), 2
    with pytest.raises(openai.APIError, match="unexpected error"):
        list(sdk.completions.create(model=BASE, prompt="x", stream=True, extra_body={"ignore_eos": True}))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_disconnect_cancels(live: LiveServer, engine: FakeEngine, stream: bool, prompt: str | list[str]) -> None:
    engine.delay_s = 0.02
    num_prompts = len(prompt) if isinstance(prompt, list) else 1
    connection = raw_request(live.port, completion(prompt=prompt, stream=stream, max_tokens=400))
    if stream:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    wait_until(lambda: len(engine.started) == num_prompts)
    connection.close()
    wait_until(lambda: len(engine.cancelled) == num_prompts)
    assert engine.running == {}
    assert engine.num_output_tokens < 400


def test_disconnect_before_the_first_token_cancels(live: LiveServer, engine: FakeEngine) -> None:
    engine.delay_s = 30.0
    connection = raw_request(live.port, completion(stream=True))
    wait_until(lambda: len(engine.started) == 1)
    connection.close()
    wait_until(lambda: len(engine.cancelled) == 1)


def test_reader_that_reads_nothing_is_cancelled_without_hurting_others() -> None:
    engine = FakeEngine(max_model_len=20_000)
    app = create_app(engine, FakeCatalog(), ServerConfig(stall_timeout_s=0.2, access_log=False))
    live = LiveServer(app)
    connection = raw_request(live.port, completion(stream=True, n=8, logprobs=20, max_tokens=19_000))
    wait_until(lambda: len(engine.cancelled) == 1, timeout_s=30)
    assert httpx.post(f"{live.url}/v1/completions", json=completion()).status_code == 200
    assert engine.num_output_tokens < 8 * 19_000
    connection.close()
    live.stop()


def test_finished_requests_are_not_cancelled(live: LiveServer, engine: FakeEngine) -> None:
    for stream in (False, True):
        httpx.post(f"{live.url}/v1/completions", json=completion(stream=stream, prompt=["a", "b"]))
    assert engine.cancelled == []
    assert len(engine.started) == 4


def test_huge_headers_are_refused(live: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Big: " + b"a" * 2**17)
        assert connection.recv(100).startswith(b"HTTP/1.1 4")
    assert httpx.get(f"{live.url}/health").status_code == 200


def test_lying_content_length_is_413(live: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: 99999999\r\n\r\n{")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_shutdown_lets_running_answers_finish(app: FastAPI, engine: FakeEngine) -> None:
    engine.delay_s = 0.02
    live = LiveServer(app)
    with httpx.stream("POST", f"{live.url}/v1/completions", json=completion(stream=True)) as response:
        live.server.should_exit = True
        text = response.read().decode()
    live.stop()
    assert text.endswith("data: [DONE]\n\n")


def test_stream_that_outlasts_the_drain_ends_with_an_error(app: FastAPI, engine: FakeEngine) -> None:
    engine.delay_s = 0.3
    live = LiveServer(app, RunConfig(port=0, drain_s=1))
    body = completion(stream=True, max_tokens=100)
    with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=10) as response:
        live.server.should_exit = True
        text = response.read().decode()
    live.stop()
    assert '"code":"engine_dead"' in text
    assert "[DONE]" not in text
    assert len(engine.cancelled) == 1


def test_whole_answer_that_outlasts_the_drain_is_503(app: FastAPI, engine: FakeEngine) -> None:
    engine.delay_s = 30.0
    live = LiveServer(app, RunConfig(port=0, drain_s=1))
    connection = raw_request(live.port, completion())
    wait_until(lambda: len(engine.started) == 1)
    live.stop()
    assert connection.recv(2**16).startswith(b"HTTP/1.1 503")
    connection.close()
    assert len(engine.cancelled) == 1


PROGRAM = """
import sys
from loraplex.server import ServerConfig, create_app, serve
from loraplex.testing import FakeEngine
sys.path.insert(0, {tests!r})
from server.helpers import FakeCatalog
app = create_app(FakeEngine(delay_s=0.01), FakeCatalog(), ServerConfig(access_log=False))
serve(app, "127.0.0.1", 0, on_ready=lambda host, port: print(port, flush=True), lame_duck_s=0.5, drain_s=5)
assert not [name for name in sys.modules if name == "torch"], "torch came in"
"""


CUT_OFF = {"level": "error", "event": "requests_cut_off", "num_requests": 2}


def test_second_signal_ends_at_once_with_one_line() -> None:
    program = [sys.executable, "-c", PROGRAM.format(tests=str(Path(__file__).parent.parent))]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        port = int(process.stdout.readline())
        connections = [raw_request(port, completion(stream=stream, max_tokens=490)) for stream in (False, True)]
        assert connections[1].recv(15) == b"HTTP/1.1 200 OK"
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        lines = process.stderr.read().splitlines()
        assert process.wait(10) == 0
    assert [{**json.loads(line), "timestamp": None} for line in lines] == [{**CUT_OFF, "timestamp": None}]
    whole, streamed = (connection.makefile("rb").read() for connection in connections)
    assert whole.startswith(b"HTTP/1.1 503")
    assert b'"code":"engine_dead"' in streamed
    for connection in connections:
        connection.close()


def test_sigterm_drains_and_exits_with_zero() -> None:
    tests = str(Path(__file__).parent.parent)
    program = [sys.executable, "-c", PROGRAM.format(tests=tests)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        with httpx.stream("POST", f"{url}/v1/completions", json=completion(stream=True, max_tokens=100)) as response:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            assert httpx.get(f"{url}/ready").status_code == 503
            text = response.read().decode()
        assert process.wait(10) == 0
    assert text.endswith("data: [DONE]\n\n")
