"""The table of statuses and the one shape of errors."""

import httpx
import pytest

from loraplex.core import (
    AdapterRefused,
    CallerLimitReached,
    ContextTooLong,
    DeadlinePassed,
    InvalidRequest,
    LoraplexError,
    ModelNotFound,
    Overloaded,
    OverloadReason,
    RefusalReason,
    ServerError,
)
from loraplex.core.registry_errors import StoreUnavailable
from loraplex.server.errors import ERROR_KINDS, kind_of, reply_for
from loraplex.server.routes import ROUTES
from loraplex.testing import FakeEngine

from .helpers import assert_error, completion


def subclasses(cls: type[LoraplexError]) -> set[type[LoraplexError]]:
    return {cls}.union(*(subclasses(child) for child in cls.__subclasses__()))


def test_every_error_class_of_ours_has_a_status() -> None:
    ours = {cls for cls in subclasses(LoraplexError) if cls.__module__.startswith("loraplex.")}
    assert ours <= set(ERROR_KINDS), f"missing: {ours - set(ERROR_KINDS)}"


def test_a_class_outside_the_table_takes_the_status_above_it() -> None:
    class Odd(ContextTooLong):
        pass

    assert kind_of(Odd("x")) is ERROR_KINDS[ContextTooLong]


@pytest.mark.parametrize(
    ("error", "status", "param", "code"),
    [
        (InvalidRequest("m", "top_p"), 400, "top_p", "invalid_request"),
        (ContextTooLong("m", "prompt"), 400, "prompt", "context_length_exceeded"),
        (ModelNotFound("x"), 404, "model", "model_not_found"),
        (Overloaded("m", 0.2), 503, None, "overloaded"),
        (CallerLimitReached("m", 0.2), 429, None, "caller_limit"),
        (DeadlinePassed("m", 0.2), 504, None, "deadline_exceeded"),
        (ServerError("m"), 500, None, "server_error"),
    ],
)
def test_reply_carries_status_param_and_code(error: LoraplexError, status: int, param: str, code: str) -> None:
    reply = reply_for(error)
    assert (reply.kind.status, reply.param, reply.code) == (status, param, code)


def test_refusals_carry_their_reason() -> None:
    reply = reply_for(AdapterRefused(RefusalReason.RANK_TOO_LARGE, "rank 512 is above 64"))
    assert reply.body()["error"]["reason"] == "RANK_TOO_LARGE"  # type: ignore[index]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Overloaded("m", 1.0), "QUEUE_FULL"),
        (Overloaded("m", 1.0, OverloadReason.ADAPTER_LOAD), "ADAPTER_LOAD"),
        (CallerLimitReached("m", 1.0), "SHARE"),
        (DeadlinePassed("m", 1.0), "DEADLINE"),
    ],
)
def test_overloads_carry_their_reason_and_when_to_come_again(error: Overloaded, reason: str) -> None:
    reply = reply_for(error)
    assert reply.body()["error"]["reason"] == reason  # type: ignore[index]
    assert reply.response().headers["retry-after"] == "1"


def test_foreign_errors_say_nothing_of_their_cause() -> None:
    assert "secret" not in str(reply_for(RuntimeError("secret")).body())


def test_overloaded_tells_whole_seconds_and_at_least_one() -> None:
    assert [reply_for(Overloaded("m", s)).retry_after_s for s in (0.0, 1.2, 3.0)] == [1, 2, 3]
    unavailable = StoreUnavailable("m")
    assert reply_for(unavailable).response().headers["retry-after"] == "1"
    unavailable.retry_after_s = 8.0
    assert reply_for(unavailable).retry_after_s == 8


@pytest.mark.anyio
@pytest.mark.parametrize("spec", ROUTES, ids=lambda spec: spec.path)
async def test_wrong_method_has_the_shape_on_every_route(client: httpx.AsyncClient, spec: object) -> None:
    response = await client.request("PATCH", spec.path.replace("{model:path}", "x"))  # type: ignore[attr-defined]
    assert_error(response, 405, code="method_not_allowed")


@pytest.mark.anyio
@pytest.mark.parametrize("spec", [spec for spec in ROUTES if spec.method == "POST"], ids=lambda spec: spec.path)
async def test_bad_bodies_have_the_shape_on_every_route(client: httpx.AsyncClient, spec: object) -> None:
    path = spec.path  # type: ignore[attr-defined]
    assert_error(await client.post(path, json={}), 400)
    assert_error(await client.post(path, json={"zzz": 1}), 400, "zzz")
    assert_error(await client.post(path, content=b"{}"), 415)
    assert_error(await client.post(path, content=b"{", headers={"Content-Type": "application/json"}), 400)


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/", "/v1", "/docs", "/openapi.json", "/v1/completions/", "//v1/models"])
async def test_unknown_route_has_the_shape(client: httpx.AsyncClient, path: str) -> None:
    assert_error(await client.get(path), 404, code="route_not_found")


@pytest.mark.anyio
async def test_unexpected_errors_have_the_shape(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.error = RuntimeError("secret cause")
    for stream in (False, True):
        response = await client.post("/v1/completions", json=completion(stream=stream))
        assert_error(response, 500, code="internal_error")
        assert "secret" not in response.text
