"""Adapters from Hugging Face, with a stub in place of its servers."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from loraplex.cli.hub import HubSource, fetched, parse_source
from loraplex.core import AdapterRefused, ConfigError, InvalidRequest
from tests.registry.helpers import OPERATOR

from .hostile import GOOD_CONFIG, GOOD_WEIGHTS, hostile_files, leftovers
from .places import FINGERPRINT, Place

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
    ],
)
def test_sources_are_repositories_with_revisions(text: str, source: HubSource) -> None:
    assert parse_source(text) == source


@pytest.mark.parametrize(
    "text",
    [
        "hf:",
        "hf:a",
        "hf:a/b/c",
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


@pytest.mark.parametrize(
    "error",
    [OfflineModeIsEnabled("offline mode is enabled"), httpx.ConnectError("no route"), OSError(28, "No space left")],
)
def test_what_goes_wrong_is_said_in_one_line(hub: Hub, error: Exception) -> None:
    hub.error = error
    source = HubSource("acme/support", None)
    with pytest.raises(ConfigError, match="hf:acme/support cannot be fetched") as refused, fetched(source):
        pass
    assert "\n" not in refused.value.message


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
