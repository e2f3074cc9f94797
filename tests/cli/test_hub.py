"""Adapters from Hugging Face, with a stub in place of its servers."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partialmethod
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import httpx
import httpx2
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from loraplex.cli.hub import HubSource, fetched, parse_source
from loraplex.core import AdapterRefused, ConfigError, InvalidRequest, ServerError
from tests.registry.helpers import OPERATOR

from .foreign_server import serving
from .hostile import GOOD_CONFIG, GOOD_WEIGHTS, hostile_files, leftovers
from .places import FINGERPRINT, Commands, Place, Ran

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Sibling:
    rfilename: str
    size: int | None


@dataclass
class Hub:
    """What the stub serves, and what it was asked for."""

    files: dict[str, bytes]
    sha: str | None = COMMIT
    sizes: dict[str, int | None] = field(default_factory=dict)
    error: Exception | None = None
    asked: list[Any] = field(default_factory=list)

    @property
    def siblings(self) -> list[Sibling]:
        return [Sibling(name, self.sizes.get(name, len(data))) for name, data in self.files.items()]

    def model_info(self, repo: str, *, revision: str | None, files_metadata: bool) -> "Hub":
        self.asked.append((repo, revision))
        if self.error is not None:
            raise self.error
        return self

    def snapshot_download(self, repo: str, *, revision: str, allow_patterns: list[str], local_dir: str) -> str:
        self.asked.append((repo, revision, allow_patterns))
        for name, data in self.files.items():
            if name in allow_patterns:
                Path(local_dir, name).parent.mkdir(exist_ok=True, parents=True)
                Path(local_dir, name).write_bytes(data)
        return local_dir


def _model_info(api: object, hub: Hub, repo: str, **words: Any) -> Hub:
    return hub.model_info(repo, **words)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {"adapter_config.json": GOOD_CONFIG, "adapter_model.safetensors": GOOD_WEIGHTS, "training_args.bin": b"x"}
    hub = Hub(files)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", partialmethod(_model_info, hub))
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    yield hub


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("hf:acme/support", HubSource("acme/support", None)),
        ("hf:acme/support@v1.0", HubSource("acme/support", "v1.0")),
        ("hf:acme/support@refs/pr/3", HubSource("acme/support", "refs/pr/3")),
        ("hf:acme/support/sql", HubSource("acme/support", None, "sql")),
        ("hf:acme/support/out/checkpoint-500@v1/x", HubSource("acme/support", "v1/x", "out/checkpoint-500")),
    ],
)
def test_sources_are_repositories_with_revisions(text: str, source: HubSource) -> None:
    assert parse_source(text) == source


@pytest.mark.parametrize(
    "text",
    [
        "hf:",
        "hf:a",
        "hf:a/b/",
        "hf:a/b/c/",
        "hf:a/b//c",
        "hf:a/b/./c",
        "hf:a/b/*",
        "hf:a/b/[c]",
        "hf:a/b/" + "c" * 250,
        "hf:../b",
        "hf:a/..",
        "hf:a/b@",
        "hf:a/b@../x",
        "hf:a/b@-x",
        "hf:https://x/y",
        "hf:a/b c",
    ],
)
def test_other_sources_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="hf:org/repo@revision"):
        parse_source(text)


def test_two_files_of_one_commit_are_taken_and_removed_again(hub: Hub) -> None:
    with fetched(HubSource("acme/support", "main")) as found:
        assert sorted(path.name for path in found.directory.iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        assert found.source == f"hf:acme/support@{COMMIT}"
    assert not found.directory.exists()
    assert hub.asked == [
        ("acme/support", "main"),
        ("acme/support", COMMIT, ["adapter_config.json", "adapter_model.safetensors"]),
    ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("adapter_config.json", "CONFIG_MISSING"), ("adapter_model.safetensors", "WEIGHTS_MISSING")],
)
def test_a_repository_without_an_adapter_is_refused_before_anything_is_taken(hub: Hub, name: str, reason: str) -> None:
    del hub.files[name]
    with pytest.raises(AdapterRefused) as refused, fetched(HubSource("acme/support", None)):
        pass
    assert refused.value.reason_code == reason
    assert len(hub.asked) == 1


@pytest.mark.parametrize("size", [1001, None])
def test_files_past_the_limit_are_refused_before_anything_is_taken(hub: Hub, size: int | None) -> None:
    hub.sizes["adapter_model.safetensors"] = size
    with pytest.raises(AdapterRefused, match="limit is 1000"), fetched(HubSource("acme/support", None), 1000):
        pass
    assert len(hub.asked) == 1


@pytest.mark.parametrize("sha", [None, "main", "", "0" * 39])
def test_what_cannot_be_pinned_is_not_taken(hub: Hub, sha: str | None) -> None:
    hub.sha = sha
    with pytest.raises(ConfigError, match="names no commit"), fetched(HubSource("acme/support", None)):
        pass
    assert len(hub.asked) == 1


def test_two_files_of_a_folder_are_taken(hub: Hub) -> None:
    hub.files = {f"out/sql/{name}": data for name, data in hub.files.items()} | hub.files
    with fetched(parse_source("hf:acme/support/out/sql@v1")) as found:
        assert (found.directory.parts[-2:], found.source) == (("out", "sql"), f"hf:acme/support/out/sql@{COMMIT}")
        assert (found.directory / "adapter_config.json").read_bytes() == GOOD_CONFIG
    assert hub.asked[1][2] == ["out/sql/adapter_config.json", "out/sql/adapter_model.safetensors"]


def test_what_lies_in_a_folder_is_not_taken_for_what_lies_at_the_top(hub: Hub) -> None:
    hub.files = {f"sql/{name}": data for name, data in hub.files.items()}
    with pytest.raises(AdapterRefused, match="write hf:org/repo/folder"), fetched(HubSource("acme/support", None)):
        pass


def _answered(status: int) -> HfHubHTTPError:
    request = httpx2.Request("GET", "http://hub/api")
    return HfHubHTTPError(f"{status} of the Hub\n\nsays why", response=httpx2.Response(status, request=request))


@pytest.mark.parametrize(
    "error",
    [OfflineModeIsEnabled("offline mode is enabled"), OSError(28, "No space left"), _answered(404), _answered(401)],
)
def test_what_the_caller_can_mend_is_said_in_one_line(hub: Hub, error: Exception) -> None:
    hub.error = error
    source = HubSource("acme/support", None)
    with pytest.raises(ConfigError, match="hf:acme/support cannot be fetched") as refused, fetched(source):
        pass
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectError("no route"),
        httpx2.ConnectError("no route"),
        httpx2.ReadTimeout(""),
        httpx2.InvalidURL("no URL"),
        ConnectionResetError(104, "reset"),
        LocalEntryNotFoundError("Got: ConnectError\nPlease check"),
        _answered(429),
        _answered(503),
    ],
)
def test_a_hub_that_does_not_answer_is_no_mistake_of_the_caller(hub: Hub, error: Exception) -> None:
    hub.error = error
    source = HubSource("acme/support", None)
    with pytest.raises(ServerError, match="hf:acme/support cannot be fetched") as failed, fetched(source):
        pass
    assert failed.value.code == "hub_unreachable"
    assert "\n" not in failed.value.message


# ---------------------------------------------------------------------- the real client
class _RealHub(BaseHTTPRequestHandler):
    """One repository with an adapter in a folder, as huggingface.co answers."""

    files: ClassVar = {"sql/adapter_config.json": GOOD_CONFIG, "sql/adapter_model.safetensors": GOOD_WEIGHTS}

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        file = path.removeprefix(f"/acme/support/resolve/{COMMIT}/")
        if path.startswith("/api/models/acme/support/tree/"):
            entries = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in self._all()]
            self._answer(json.dumps(entries).encode())
        elif path == "/api/models/acme/support":
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self._all()]
            self._answer(json.dumps({"id": "acme/support", "sha": COMMIT, "siblings": siblings}).encode())
        elif file in self.files:
            self._answer(self.files[file])
        else:
            self._answer(b"{}", 404)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _all(self) -> list[tuple[str, bytes]]:
        return [*self.files.items(), ("sql/training_args.bin", b"x")]

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def real_hub() -> Iterator[str]:
    with serving(_RealHub) as url:
        yield url


_FETCH = """
import sys
from loraplex.cli.hub import fetched, parse_source
with fetched(parse_source(sys.argv[1])) as found:
    for path in sorted(found.directory.iterdir()):
        if path.is_file():
            print(path.name, len(path.read_bytes()))
    print(found.source)
"""


def run_python(code: str, endpoint: str, home: Path, *words: object) -> Ran:
    """The library reads its endpoint when it is imported, so this takes a process of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "LORAPLEX_"))}
    env = {**kept, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "*"}
    command = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    return Ran(done.returncode, done.stdout, done.stderr)


def test_the_real_client_takes_two_files_of_a_folder(real_hub: str, tmp_path: Path) -> None:
    ran = run_python(_FETCH, real_hub, tmp_path, "hf:acme/support/sql")
    assert ran.status == 0, ran.err
    assert ran.out.splitlines() == [
        f"adapter_config.json {len(GOOD_CONFIG)}",
        f"adapter_model.safetensors {len(GOOD_WEIGHTS)}",
        f"hf:acme/support/sql@{COMMIT}",
    ]


@pytest.mark.parametrize(
    ("repo", "status", "code"), [("acme/none", 2, "config_error"), ("acme/support", 3, "hub_unreachable")]
)
def test_the_real_client_fails_in_one_line(
    run: Commands, real_hub: str, tmp_path: Path, repo: str, status: int, code: str
) -> None:
    """The repository is not there; nothing listens at the address (port 9, discard)."""
    data = tmp_path / "data"
    run.good("tenant", "create", "acme", "--data-dir", data)
    words = ("--tenant", "acme", "--name", "a", "--base", "/x", "--base-unverified", "--data-dir", data)
    endpoint = real_hub if status == 2 else "http://127.0.0.1:9"
    main = "from loraplex.cli.main import main; main()"
    ran = run_python(main, endpoint, tmp_path, "adapter", "add", f"hf:{repo}", *words)
    assert (ran.status, ran.out) == (status, ""), ran.err
    (line,) = ran.err.splitlines()
    assert line.startswith(f"error {code}: hf:{repo} cannot be fetched from Hugging Face: ")


def test_without_the_extra_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install 'loraplex\[hub\]'"), fetched(HubSource("acme/support", None)):
        pass


def test_the_commit_is_printed_and_recorded(hub: Hub, place: Place) -> None:
    words = ("--tenant", "acme", "--name", "support", *place.base, "--base-fingerprint", FINGERPRINT)
    ran = place.run("adapter", "add", "hf:acme/support@main", *words)
    assert ran.status == 0, ran.err
    assert f"Fetched hf:acme/support@{COMMIT}." in ran.err
    publish = place.world.registry.audit_entries(OPERATOR, "acme")[-2]
    assert (publish.action, publish.details["source"]) == ("version.publish", f"hf:acme/support@{COMMIT}")


def test_hostile_repositories_are_refused_and_never_run(hub: Hub, place: Place, tmp_path: Path) -> None:
    """RELIABILITY.md, T01, by the third way in."""
    canary = tmp_path / "canary"
    words = ("--tenant", "acme", "--name", "support", *place.base, "--base-fingerprint", FINGERPRINT)
    for case in hostile_files(canary):
        hub.files |= {"adapter_config.json": case.config, "adapter_model.safetensors": case.weights}
        ran = place.run("adapter", "add", "hf:acme/support", *words)
        assert (ran.status, ran.out) == (2, ""), case.name
        assert not canary.exists(), case.name
    assert leftovers(place.world.config.data_dir) == []
