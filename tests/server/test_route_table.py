"""No route answers without a key but those on the public list, however it is named (RELIABILITY.md, T08)."""

import asyncio
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute

from loraplex.core import AdapterRef
from loraplex.registry import Role
from loraplex.server import Access, Caller, ServerConfig, create_app
from loraplex.server import app as app_module
from loraplex.server.context import context_of
from loraplex.testing import FakeEngine

from .helpers import FakeCatalog, LiveServer
from .registry_world import BASE_NAME, Site

pytestmark = pytest.mark.anyio

KEY = "sk-test-0123456789"
PUBLIC = {"/health", "/ready"}
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "get", "BREW")
CLOSED = {401, 404, 405}  # no key, no such route, no such method: no handler ran

BAD_AUTHORIZATION: list[list[tuple[bytes, bytes]]] = [
    [],
    [(b"authorization", b"Bearer sk-wrong-0123456789")],
]
FORMS: list[tuple[str, list[tuple[bytes, bytes]]]] = [
    ("{path}", []),
    ("/{path}", []),
    ("//{path}", []),
    ("{path}/", []),
    ("{path}//", []),
    ("{path}/.", []),
    ("/.{path}", []),
    ("/x/..{path}", []),
    ("/health/..{path}", []),
    ("/health{path}", []),
    ("/metrics/..{path}", []),
    ("/%2e{path}", []),
    ("/health/%2e%2e{path}", []),
    ("/health%2f..{path}", []),
    ("{path}%2f", []),
    ("{path}%00", []),
    ("{path}%20", []),
    ("{path};/health", []),
    ("{path};x=1", []),
    ("{path}?/health", []),
    ("{path}?x=/../health", []),
    ("{path}#/health", []),
    ("{path}%23/health", []),
    ("{path}%3f/health", []),
    ("{path}\\health", []),
    ("{upper}", []),
    ("{title}", []),
    ("{encoded}", []),
    ("http://x{path}", []),
    ("http://x/health{path}", []),
    ("{path}", [(b"host", b"x/health?")]),
    ("{path}", [(b"host", b"x/health#")]),
    ("{path}", [(b"host", b"x/?")]),
    ("{path}", [(b"host", b"x:80/metrics\\")]),
    ("{path}", [(b"host", b"")]),
    ("{path}", [(b"host", b"a"), (b"host", b"b/health?")]),
    ("{path}", [(b"x-forwarded-prefix", b"/health"), (b"x-forwarded-host", b"x/health?")]),
    ("{path}", [(b"x-original-url", b"/health"), (b"x-rewrite-url", b"/health")]),
    ("{path}", [(b"x-http-method-override", b"GET"), (b"x-method-override", b"GET")]),
    ("{path}", [(b"user-agent", b"kube-probe/1.0"), (b"origin", b"http://localhost"), (b"x-real-ip", b"127.0.0.1")]),
]


def routes(app: FastAPI) -> list[tuple[str, str]]:
    """Method and path of every route of the app, from its own table, not ours; parameters filled in."""
    found = []
    for route in app.routes:
        assert isinstance(route, APIRoute), f"{route!r} would bypass the key"
        path = route.path.replace("{model:path}", BASE_NAME).replace("{version}", "1").replace("{name}", "one")
        found += [(method, path.replace("{", "").replace("}", "")) for method in sorted(route.methods)]
    return found


def test_every_route_is_bound_to_a_guard_or_on_the_public_list(tmp_path: Path) -> None:
    site = Site(tmp_path, config=ServerConfig(adapter_roots=()))
    by_path = {spec.path: spec for spec in app_module.route_table(site.app.state.service)}
    assert len(site.app.routes) >= 30
    for route in site.app.routes:
        assert isinstance(route, APIRoute)
        assert bool(route.dependencies) == (route.path not in PUBLIC), route.path
    assert {path for path, spec in by_path.items() if spec.access is Access.PUBLIC} == PUBLIC
    operators = {path for path, spec in by_path.items() if spec.access is Access.OPERATOR}
    assert {"/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"} <= operators
    assert all(spec.access in (Access.ADMIN, Access.OPERATOR) for path, spec in by_path.items() if "/admin/" in path)
    site.close()


async def status_of(app: FastAPI, method: str, target: str, headers: list[tuple[bytes, bytes]]) -> int:
    """The status of a request whose target and headers are sent as they stand, as uvicorn would hand them on."""
    raw_path, _, query = target.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 1),
        "scheme": "http",
        "method": method,
        "root_path": "",
        "path": unquote(raw_path),
        "raw_path": raw_path.encode(),
        "query_string": query.encode(),
        "headers": [(b"content-type", b"application/json"), *headers],
    }
    statuses = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app(scope, receive, send)  # type: ignore[arg-type]
    (status,) = statuses
    assert isinstance(status, int)
    return status


def targets(path: str) -> Iterator[tuple[str, list[tuple[bytes, bytes]]]]:
    encoded = "".join(f"%{ord(char):02x}" if char.isalpha() else char for char in path)
    for form, headers in FORMS:
        yield form.format(path=path, upper=path.upper(), title=path.title(), encoded=encoded), headers


async def open_doors(app: FastAPI, public: set[str], all_methods: bool = False) -> tuple[list[str], int]:
    """Requests without a good key that were let in, public routes apart; and how many were tried.

    `all_methods` tries every method with every form, not with the plain one alone.
    """
    found, tried = [], 0
    for method, path in routes(app):
        if path in public:
            continue
        for number, (target, headers) in enumerate(targets(path)):
            for other in (method, *METHODS) if number == 0 or all_methods else (method,):
                for authorization in BAD_AUTHORIZATION:
                    status = await status_of(app, other, target, [*headers, *authorization])
                    tried += 1
                    if status not in CLOSED:
                        found.append(f"{other} {target} {headers}: {status}")
    return found, tried


async def test_no_form_of_a_request_opens_a_route(tmp_path: Path) -> None:
    site = Site(tmp_path, config=ServerConfig(adapter_roots=(), access_log=False))
    site.tenant("acme", "one")
    found, tried = await open_doors(site.app, PUBLIC)
    assert found == []
    assert tried > 30 * 40 * 2
    assert site.engine.started == []
    site.close()


async def test_no_form_of_a_request_opens_a_route_of_a_server_with_one_key() -> None:
    config = ServerConfig(api_key=KEY, adapter_roots=(), access_log=False)
    app = create_app(FakeEngine(base_name=BASE_NAME), BaseOnly(), config)
    found, tried = await open_doors(app, PUBLIC | {"/metrics"}, all_methods=True)
    assert found == []
    assert tried > 8 * 40 * 2


class BaseOnly(FakeCatalog):
    """LocalModels without adapters."""

    def resolve(self, model: str) -> AdapterRef | None:
        return None if model == BASE_NAME else super().resolve("nope")


async def test_good_keys_open_every_route(tmp_path: Path) -> None:
    """The positive control: a request with an operator's key gets past the guard of every route."""
    site = Site(tmp_path, config=ServerConfig(adapter_roots=(), access_log=False))
    site.tenant("acme", "one")
    headers = [(b"authorization", f"Bearer {site.operator_key('acme')}".encode())]
    statuses = [await status_of(site.app, method, path, headers) for method, path in routes(site.app)]
    assert len(statuses) >= 30
    assert not {401, 403, 405} & set(statuses)
    assert statuses.count(200) >= 8
    site.close()


@pytest.mark.parametrize("role", list(Role))
async def test_each_role_opens_what_the_table_says(tmp_path: Path, role: Role) -> None:
    site = Site(tmp_path, config=ServerConfig(adapter_roots=(), access_log=False))
    site.tenant("acme", "one")
    headers = [(b"authorization", f"Bearer {site.world.key('acme', role)}".encode())]
    table = app_module.route_table(site.app.state.service)
    for spec, (method, path) in zip(table, routes(site.app), strict=True):
        status = await status_of(site.app, method, path, headers)
        assert (status == 403) == (not role.covers(spec.access.role)), (path, status)
    site.close()


async def test_without_the_guard_doors_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: a dependency that lets everyone in."""
    site = Site(tmp_path, config=ServerConfig(adapter_roots=(), access_log=False))
    site.tenant("acme", "one")
    principal = site.world.principal("acme", Role.OPERATOR)

    def open_guard(authenticate: object, access: Access) -> object:
        async def check(request: Request) -> None:
            context_of(request).caller = Caller(principal, principal.role)

        return check

    monkeypatch.setattr(app_module, "guard", open_guard)
    mutant = create_app(site.engine, site.registry, site.config)
    assert len((await open_doors(mutant, PUBLIC))[0]) >= 8
    site.close()


async def test_with_a_route_on_the_public_list_a_door_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: one route of the table lost its access."""
    site = Site(tmp_path, config=ServerConfig(access_log=False))
    table = app_module.route_table(site.app.state.service)
    lost = tuple(replace(spec, access=Access.PUBLIC) if spec.path == "/tokenize" else spec for spec in table)
    monkeypatch.setattr(app_module, "route_table", lambda service: lost)
    mutant = create_app(site.engine, site.registry, site.config)
    assert any("/tokenize" in line for line in (await open_doors(mutant, PUBLIC))[0])
    site.close()


# ---------------------------------------------------------------------- through uvicorn, byte for byte
def first_line(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(request)
        return connection.recv(4096).partition(b"\r\n")[0]


async def test_raw_requests_open_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path, config=ServerConfig(access_log=False))
    site.tenant("acme", "one")
    live = LiveServer(site.app)
    tried = 0
    try:
        for path in ("/v1/models", "/v1/models/one", "/metrics", "/admin/v1/tenants"):
            for target, extra in targets(path):
                lines = b"".join(name + b": " + value + b"\r\n" for name, value in extra)
                host = b"" if any(name == b"host" for name, _ in extra) else b"Host: x\r\n"
                request = b"GET " + target.encode() + b" HTTP/1.1\r\n" + host + lines + b"Connection: close\r\n\r\n"
                status = (await asyncio.to_thread(first_line, live.port, request)).split()[1]
                assert int(status) in CLOSED | {400}, (target, extra, status)  # uvicorn cannot read all of them
                tried += 1
        good = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {site.world.key('acme')}\r\n\r\n"
        assert b"200" in await asyncio.to_thread(first_line, live.port, good.encode())
        assert b"200" in await asyncio.to_thread(first_line, live.port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    finally:
        live.stop()
        site.close()
    assert tried == 4 * len(FORMS)
