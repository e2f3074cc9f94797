"""What the demo shows."""

import io
import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from loraplex.cli import demo_scenes as scenes
from loraplex.cli.demo import demo_base, find_adapters, present
from loraplex.cli.demo_calls import curl_line
from loraplex.cli.launch import LoraModule
from loraplex.cli.tables import describe_targets
from loraplex.core import ConfigError
from loraplex.registry import Registry, RegistryConfig
from loraplex.server import ServerConfig, create_app
from loraplex.server.admin_operations import AdminOperations
from loraplex.testing import FakeEngine
from tests.registry.helpers import BASE, OPERATOR, adapter_dir, check_here
from tests.server.helpers import LiveServer


def test_adapters_of_a_folder_are_found_in_order_of_name(tmp_path: Path) -> None:
    for name in ("sql", "json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    assert find_adapters(tmp_path) == [LoraModule("json", tmp_path / "json"), LoraModule("sql", tmp_path / "sql")]


def test_a_folder_without_an_adapter_for_each_tenant_is_refused_with_the_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--adapters"):
        find_adapters(tmp_path)
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="--adapters"):
        find_adapters(tmp_path)


def test_the_shipped_adapters_are_found() -> None:
    found = find_adapters(None)
    assert len(found) >= 4
    assert all((module.path / "adapter_model.safetensors").is_file() for module in found)


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        (("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), "all"),
        (("o_proj", "v_proj", "k_proj", "q_proj"), "attention"),
        (("gate_proj", "up_proj", "down_proj"), "mlp"),
        (("q_proj", "v_proj"), "q,v"),
        (("down_proj",), "down"),
    ],
)
def test_targets_are_described_in_few_letters(targets: tuple[str, ...], text: str) -> None:
    assert describe_targets(targets) == text


def test_the_curl_line_is_a_request_for_the_model_with_a_key() -> None:
    words = shlex.split(curl_line("http://127.0.0.1:8000", "lpx_live_x", "pirate"))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert {"Content-Type: application/json", "Authorization: Bearer lpx_live_x"} <= set(words)
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "pirate"
    assert body["messages"][0]["role"] == "user"


def test_cache_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path, progress: object) -> Path:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("loraplex.model.gguf_import.ensure_demo_base", refuse)
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        demo_base(Console(quiet=True))


# ---------------------------------------------------------------------- the scenes, on a fake engine
@dataclass
class Show:
    """A stage before a live server."""

    stage: scenes.Stage
    url: str
    text: Callable[[], str]


@pytest.fixture
def show(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Show]:
    engine = FakeEngine(description=replace(BASE, vocab_size=258), only_held=True)
    modules = tuple(LoraModule(name, adapter_dir(tmp_path, seed)) for seed, name in enumerate(("a", "b", "c"), 1))
    console = Console(file=io.StringIO(), width=getattr(request, "param", 200))
    with Registry(RegistryConfig(tmp_path / "data"), validate=check_here) as registry:
        server = LiveServer(create_app(engine, registry, ServerConfig(access_log=False)))
        operations = AdminOperations(registry, registry.local_operator())
        stage = scenes.Stage(console, operations, engine.base, engine.compare, modules)
        try:
            yield Show(stage, server.url, console.file.getvalue)  # type: ignore[attr-defined]
        finally:
            server.stop()


def row(text: str, *words: str) -> list[str]:
    """The words of the only line that holds all of these."""
    (line,) = [line for line in text.splitlines() if all(word in line.split() for word in words)]
    return line.split()


def test_each_tenant_has_adapters_that_were_compared(show: Show) -> None:
    cast, made = scenes.set_up(show.stage, lambda done, total: None)
    assert cast.names == {"acme": ("a", "b"), "globex": ("c",)}
    assert [one.version.state for one in made] == ["verified"] * 3
    scenes.show_adapters(show.stage, made)
    assert row(show.text(), "globex/c")[-1] == made[2].version.digest[:8]  # type: ignore[index]


def test_the_batch_shows_who_asked_and_what_answered(show: Show) -> None:
    cast, made = scenes.set_up(show.stage, lambda done, total: None)
    scenes.mixed_batch(show.stage, show.url, cast)
    text = show.text()
    assert row(text, "acme", BASE.name)[2] == "-"
    for who, name, one in (("acme", "a@1", made[0]), ("acme", "b@1", made[1]), ("globex", "c@1", made[2])):
        assert row(text, who, name)[2] == one.version.digest[:8]  # type: ignore[index]


def test_refusals_versions_damage_and_the_trail_are_shown(show: Show) -> None:
    cast, _ = scenes.set_up(show.stage, lambda done, total: None)
    scenes.refusals(show.stage, show.url, cast)
    theirs, nothing = row(show.text(), "globex", "acme/a"), row(show.text(), "globex", "acme/made-up")
    assert theirs[2:4] == nothing[2:4] == ["404", "model_not_found"]
    assert [word.replace("acme/a'", "acme/made-up'") for word in theirs[4:]] == nothing[4:]
    assert row(show.text(), "nobody")[2:4] == ["401", "invalid_api_key"]
    scenes.versions(show.stage, show.url, cast)
    order = [word for line in show.text().splitlines() for word in line.split()[1:2] if word.startswith("a@")]
    assert order == ["a@1", "a@2", "a@1"]
    scenes.damaged(show.stage)
    assert "WEIGHTS_CORRUPT" in show.text()
    assert "NONFINITE" in show.text()
    assert "accepted" not in show.text()
    scenes.audit_trail(show.stage)
    assert "verified: whole" in show.text()
    assert "alias.rollback" in show.text()
    assert not any(key in show.text() for key in cast.keys.values())


def test_the_second_version_is_the_first_with_half_its_scale(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of another tenant would not do as a version of this one's adapter."""
    published: dict[str, dict[str, Any]] = {}
    publish = scenes.AdminOperations.publish

    def watch(operations: AdminOperations, tenant: str, name: str, directory: Path, *rest: Any) -> Any:
        version = publish(operations, tenant, name, directory, *rest)
        published[f"{tenant}/{name}@{version.version}"] = {file.name: file.read_bytes() for file in directory.iterdir()}
        return version

    monkeypatch.setattr(scenes.AdminOperations, "publish", watch)
    cast, _ = scenes.set_up(show.stage, lambda done, total: None)
    scenes.versions(show.stage, show.url, cast)
    first, second = published["acme/a@1"], published["acme/a@2"]
    assert first["adapter_model.safetensors"] == second["adapter_model.safetensors"]
    alphas = [json.loads(one["adapter_config.json"])["lora_alpha"] for one in (first, second)]
    assert alphas == [alphas[0], alphas[0] / 2]


def test_a_pattern_of_scales_is_halved_too(tmp_path: Path) -> None:
    config = tmp_path / "adapter_config.json"
    config.write_text('{"alpha_pattern": {"v_proj": 24}, "r": 4}')
    scenes._halve(config)
    assert json.loads(config.read_text()) == {"lora_alpha": 4, "alpha_pattern": {"v_proj": 12}, "r": 4}


@pytest.mark.parametrize("show", [80], indirect=True)
def test_figures_and_reasons_are_whole_on_a_narrow_terminal(show: Show) -> None:
    _, made = scenes.set_up(show.stage, lambda done, total: None)
    scenes.show_adapters(show.stage, made)
    scenes.damaged(show.stage)
    lines = show.text().splitlines()
    assert max(map(len, lines)) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in show.text()
    gate = made[0].verification
    assert f"{gate.effect:.3g}" in row(show.text(), "acme/a")
    assert f"{gate.kl:.2g}" in row(show.text(), "acme/a")
    assert "infinity." in show.text()  # the end of the last message


@pytest.mark.parametrize("is_ending", [True, False])
def test_the_page_opens_with_what_is_served_and_ends_with_what_can_be_tried(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ending: bool
) -> None:
    """Counts are those after the adapters were put in; a server that stops is not offered."""

    def ready(launched: Any, host: str, port: int) -> str:
        return f"Ready: {launched.registry.tenants.count(OPERATOR).adapters} adapters"

    monkeypatch.setattr("loraplex.cli.demo.ready_line", ready)
    monkeypatch.setenv("DEMO_EXIT", "1" if is_ending else "")
    stage, (host, port) = show.stage, show.url.removeprefix("http://").split(":")
    launched: Any = SimpleNamespace(
        registry=stage.operations._registry,
        base=SimpleNamespace(description=stage.base),
        engine=SimpleNamespace(compare=stage.compare),
    )
    present(launched, list(stage.modules), host, int(port), tmp_path, stage.console)
    lines = show.text().splitlines()
    assert lines[0] == "Ready: 3 adapters"
    assert lines[-1].startswith("curl ") != is_ending
    assert ("curl" in show.text()) != is_ending
