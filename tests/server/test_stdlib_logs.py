"""What libraries log while a server runs is JSON on its log, and quotes nothing that a client sent."""

import asyncio
import io
import json
import logging
import socket
import threading
import time
import warnings
from typing import Any

import pytest
from fastapi import FastAPI

from loraplex.core.own_text import OwnText
from loraplex.server import ServerConfig, create_app
from loraplex.server.stdlib_logs import logs_as_json
from loraplex.testing import FakeEngine

from .helpers import FakeCatalog, LiveServer, wait_until

CANARY = "canary-prompt-5d1e"


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def service_log(stream: io.StringIO) -> Any:
    return create_app(FakeEngine(), FakeCatalog(), ServerConfig(api_key="canary-key-0001"), stream).state.service.log


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def fail() -> None:
    raise ValueError(f"it broke on {CANARY}")


def test_an_exception_is_its_class_and_place(service_log: Any, stream: io.StringIO) -> None:
    with logs_as_json(service_log):
        try:
            fail()
        except ValueError:
            logging.getLogger("some.logger").exception("It failed\non %s", CANARY)
    (line,) = lines(stream)
    assert (line["event"], line["level"], line["logger"]) == ("log_record", "error", "some.logger")
    assert (line["message"], line["error"]) == ("It failed", "ValueError")
    assert any(frame.endswith(" fail") for frame in line["frames"])
    assert CANARY not in stream.getvalue()


def test_only_numbers_and_our_own_text_are_put_into_messages_and_keys_never(
    service_log: Any, stream: io.StringIO
) -> None:
    with warnings.catch_warnings(), logs_as_json(service_log):
        warnings.simplefilter("always")
        logging.getLogger("a").warning("%d of %s", 3, CANARY)
        logging.getLogger("a").warning("%d of %d", 3, 4)
        logging.getLogger("a").warning("adapter %s: %d", OwnText("abc"), 5)
        logging.getLogger("a").warning("adapter %s: %s", OwnText("abc"), CANARY)
        logging.getLogger("a").warning("the key lpx_live_abc and canary-key-0001")
        logging.getLogger("a").info("not shown")
        warnings.warn("mind the gap", UserWarning, stacklevel=1)
    messages = [line["message"] for line in lines(stream)]
    assert messages[:2] == ["%d of %s", "3 of 4"]
    assert messages[2:4] == ["adapter abc: 5", "adapter %s: %s"]
    assert messages[4] == "the key [redacted] and [redacted]"
    assert "mind the gap" in messages[5]
    assert "canary" not in stream.getvalue()


def test_a_lost_task_and_a_failing_thread_are_lines_without_their_messages(
    service_log: Any, stream: io.StringIO
) -> None:
    async def lost() -> None:
        fail()

    async def main() -> None:
        task = asyncio.create_task(lost())
        await asyncio.wait({task})
        asyncio.get_running_loop().call_exception_handler(
            {"message": "Task exception was never retrieved", "task": task, "exception": task.exception()}
        )

    with logs_as_json(service_log):
        asyncio.run(main())
        thread = threading.Thread(target=fail, name="the-thread")
        thread.start()
        thread.join()
    task_line, thread_line = lines(stream)
    assert (task_line["logger"], task_line["message"]) == ("asyncio", "Task exception was never retrieved")
    assert (thread_line["event"], thread_line["thread"], thread_line["error"]) == (
        "thread_failed",
        "the-thread",
        "ValueError",
    )
    assert CANARY not in stream.getvalue()


def test_all_is_put_back(service_log: Any, stream: io.StringIO) -> None:
    before = (list(logging.getLogger().handlers), threading.excepthook, warnings.showwarning)
    with logs_as_json(service_log):
        pass
    assert (list(logging.getLogger().handlers), threading.excepthook, warnings.showwarning) == before
    logging.getLogger("a").warning("after")
    assert stream.getvalue() == ""


def test_what_uvicorn_says_of_a_bad_request_is_a_line(
    app: FastAPI, log_stream: io.StringIO, capfd: pytest.CaptureFixture[str]
) -> None:
    live = LiveServer(app)
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        connection.sendall(b"GARBAGE " + CANARY.encode() + b"\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    wait_until(lambda: "Invalid HTTP request" in log_stream.getvalue())
    time.sleep(0.05)
    live.stop()
    assert [(line["event"], line["logger"]) for line in lines(log_stream)] == [("log_record", "uvicorn.error")]
    assert CANARY not in log_stream.getvalue()
    assert capfd.readouterr().err == ""
