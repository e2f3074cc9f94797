"""Which routes answer without a key, and which keys they take."""

import httpx
import pytest
from fastapi.routing import APIRoute

from loraplex.core import ConfigError
from loraplex.server import ServerConfig, create_app
from loraplex.testing import FakeEngine

from .helpers import BASE, FakeCatalog, assert_error, chat, completion

KEY = "sk-test-0123456789"
PUBLIC = {"/health", "/ready", "/metrics"}
BODIES = {
    "/v1/completions": completion(),
    "/v1/chat/completions": chat(),
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}

pytestmark = pytest.mark.anyio


def routes() -> list[tuple[str, str]]:
    """Method and path of every route of the app, from its own table, not ours."""
    app = create_app(FakeEngine(), FakeCatalog(), ServerConfig(api_key=KEY))
    found = []
    for route in app.routes:
        assert isinstance(route, APIRoute), f"{route!r} would bypass the key"
        found += [(method, route.path) for method in sorted(route.methods)]
    return found


async def call(method: str, path: str, headers: list[tuple[str, str]]) -> httpx.Response:
    app = create_app(FakeEngine(), FakeCatalog(), ServerConfig(api_key=KEY, access_log=False))
    path = path.replace("{model:path}", BASE)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return await client.request(method, path, json=BODIES.get(path), headers=headers)


def test_the_public_list_is_what_we_think() -> None:
    assert {path for _, path in routes()} >= PUBLIC
    assert len(routes()) == 10


@pytest.mark.parametrize(("method", "path"), routes())
@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "")],
        [("Authorization", KEY)],
        [("Authorization", f"Basic {KEY}")],
        [("Authorization", f"Bearer {KEY}x")],
        [("Authorization", f"Bearer {KEY[:-1]}")],
        [("Authorization", f"Bearer {KEY.upper()}")],
        [("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {KEY}")],
        [("Host", "test/health?"), ("X-Forwarded-Prefix", "/health")],
    ],
)
async def test_only_public_routes_answer_without_the_key(
    method: str, path: str, headers: list[tuple[str, str]]
) -> None:
    response = await call(method, path, headers)
    if path in PUBLIC:
        assert response.status_code == 200
    else:
        assert_error(response, 401, code="invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
        assert KEY not in response.text


@pytest.mark.parametrize(("method", "path"), routes())
async def test_every_route_answers_with_the_key(method: str, path: str) -> None:
    assert (await call(method, path, [("Authorization", f"Bearer {KEY}")])).status_code == 200


async def test_the_key_is_checked_before_the_body() -> None:
    app = create_app(FakeEngine(), FakeCatalog(), ServerConfig(api_key=KEY, access_log=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert_error(await client.post("/v1/completions", content=b"\xff{"), 401)


@pytest.mark.parametrize("key", ["", "short", "has a space", "ключ-ключ-ключ", "tab\tbed-key"])
def test_unusable_keys_are_a_config_error(key: str) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        ServerConfig(api_key=key)


def test_the_key_is_not_in_the_repr() -> None:
    assert KEY not in repr(ServerConfig(api_key=KEY))


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_unusable_timeouts_are_a_config_error(value: float) -> None:
    with pytest.raises(ConfigError, match="stall_timeout_s"):
        ServerConfig(stall_timeout_s=value)
