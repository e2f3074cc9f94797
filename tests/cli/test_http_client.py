"""The commands on a server: keys, what answers that is no admin API, and what the caller may not do."""

import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from loraplex.registry import Role
from loraplex.server import ServerConfig, create_app
from loraplex.testing import FakeEngine
from tests.registry.helpers import adapter_dir
from tests.server.helpers import FakeCatalog, LiveServer

from .foreign_server import serving
from .places import Commands, Place

only_http = pytest.mark.parametrize("place", ["http"], indirect=True)
SECRET = "lpx_live_not_a_real_key_but_secret"


@only_http
def test_a_tenant_admin_works_on_its_own_tenant_without_naming_it(place: Place, tmp_path: Path) -> None:
    place.as_key(place.world.key("acme", Role.TENANT_ADMIN))
    directory = adapter_dir(tmp_path, 1)
    added = place.run.good("adapter", "add", directory, "--name", "support", "--base-unverified", "--activate")
    assert (added["version"]["tenant"], added["alias"]["active"]) == ("acme", 1)
    assert [one["name"] for one in place.run.good("adapter", "list")["adapters"]] == ["support"]
    assert place.run.good("adapter", "show", "support")["adapter"]["tenant"] == "acme"
    assert len(place.run.good("key", "list")["keys"]) == 1
    own = place.run.good("audit", "verify", "--tenant", "acme")
    assert (own["ok"], own["chains"]) == (True, 1)
    assert place.run.good("audit", "verify") == own


@only_http
def test_what_the_key_does_not_allow_is_said_with_its_code(place: Place, tmp_path: Path) -> None:
    place.as_key(place.world.key("acme", Role.TENANT_ADMIN))
    assert "permission_denied" in place.run.refused("tenant", "list")
    words = ("--name", "support", "--base-unverified", "--skip-verification")
    assert "permission_denied" in place.run.refused("adapter", "add", adapter_dir(tmp_path, 1), *words)
    assert place.run.good("adapter", "list")["adapters"] == []  # it was refused before anything was sent
    other = place.run.refused("adapter", "list", "--tenant", "beta")
    assert other == place.run.refused("adapter", "list", "--tenant", "nobody").replace("nobody", "beta")
    place.as_key(place.world.key("acme"))
    assert "permission_denied" in place.run.refused("adapter", "list")
    assert "permission_denied" in place.run.refused("audit", "verify")
    place.as_key("lpx_live_nonsense")
    assert "invalid_api_key" in place.run.refused("adapter", "list")


@only_http
def test_the_key_may_stand_in_a_file(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text(place.world.key("acme", Role.TENANT_ADMIN) + "\n")
    monkeypatch.setenv("LORAPLEX_API_KEY", "lpx_live_nonsense")
    assert place.run.good("adapter", "list", "--api-key-file", file)["adapters"] == []
    assert "cannot be read" in place.run.refused("adapter", "list", "--api-key-file", tmp_path / "none")
    (tmp_path / "odd").write_text("two words")
    line = place.run.refused("adapter", "list", "--api-key-file", tmp_path / "odd")
    assert "two words" not in line


@only_http
def test_a_url_may_end_as_clients_write_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    url = os.environ["LORAPLEX_URL"]
    for ending in ("/", "/v1", "/v1/"):
        monkeypatch.setenv("LORAPLEX_URL", url + ending)
        assert len(place.run.good("tenant", "list")["tenants"]) == 3


@only_http
@pytest.mark.parametrize("name", ["..", ".", "", "../../v1/models", "a/b"])
def test_names_never_lead_to_another_path(place: Place, name: str) -> None:
    assert place.run.refused("adapter", "list", "--tenant", name).startswith("error invalid_request: ")
    assert place.run.refused("key", "revoke", name, "--tenant", "acme").startswith("error invalid_request: ")


def test_a_server_wants_a_key(run: Commands) -> None:
    assert "LORAPLEX_API_KEY" in run.refused("tenant", "list", "--url", "http://127.0.0.1:1")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://x:notaport"])
def test_what_is_no_url_is_refused(run: Commands, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("LORAPLEX_API_KEY", SECRET)
    line = run.refused("tenant", "list", "--url", url)
    assert "is not a URL" in line
    assert SECRET not in line


def test_a_server_without_a_registry_is_told_apart(run: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    server = LiveServer(create_app(FakeEngine(), FakeCatalog(), ServerConfig(api_key=SECRET, access_log=False)))
    monkeypatch.setenv("LORAPLEX_API_KEY", SECRET)
    try:
        line = run.refused("tenant", "list", "--url", server.url)
    finally:
        server.stop()
    assert line.startswith("error route_not_found: ")
    assert "--data-dir" in line


class _Stranger(BaseHTTPRequestHandler):
    """Answers 200 and a page, or 302 to another place."""

    def do_GET(self) -> None:
        self.send_response(302 if "keys" in self.path else 200)
        self.send_header("Location", "http://127.0.0.1:1/elsewhere")
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def stranger() -> Iterator[str]:
    with serving(_Stranger) as url:
        yield url


def test_what_is_no_loraplex_is_status_3_and_is_not_followed(
    run: Commands, monkeypatch: pytest.MonkeyPatch, stranger: str
) -> None:
    """A key never goes where another server points."""
    monkeypatch.setenv("LORAPLEX_API_KEY", SECRET)
    page = run("tenant", "list", "--url", stranger)
    assert (page.status, "cannot read" in page.err) == (3, True)
    redirect = run("key", "list", "--tenant", "acme", "--url", stranger)
    assert (redirect.status, "status 302" in redirect.err) == (3, True)
    assert SECRET not in page.err + redirect.err
