"""What the demo shows."""

import json
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from loraplex.cli.demo import curl_line, demo_base, describe_targets, find_adapters
from loraplex.cli.launch import LoraModule
from loraplex.core import ConfigError


def test_adapters_of_a_folder_are_found_in_order_of_name(tmp_path: Path) -> None:
    for name in ("sql", "json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    assert find_adapters(tmp_path) == [LoraModule("json", tmp_path / "json"), LoraModule("sql", tmp_path / "sql")]


def test_a_folder_without_adapters_is_refused_with_the_option(tmp_path: Path) -> None:
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


def test_the_curl_line_is_a_request_for_the_model() -> None:
    words = shlex.split(curl_line("http://127.0.0.1:8000", "pirate"))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert "Content-Type: application/json" in words
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "pirate"
    assert body["messages"][0]["role"] == "user"


def test_cache_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path, progress: object) -> Path:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("loraplex.model.gguf_import.ensure_demo_base", refuse)
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        demo_base(Console(quiet=True))
