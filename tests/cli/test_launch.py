"""Adapters on the command line, and what is said when they load."""

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from loraplex.adapters import CatalogEntry
from loraplex.cli.launch import LoraModule, base_warning, launch, parse_lora_module, target_warning
from loraplex.core import AdapterDigest, AdapterRef, AdapterRefused, ConfigError
from loraplex.engine import EngineConfig
from loraplex.server import ServerConfig

from ..conftest import MakeAdapter, MakeBase


@pytest.mark.parametrize(
    ("text", "module"),
    [
        ("sql=adapters/sql", LoraModule("sql", Path("adapters/sql"))),
        ("a=b=c", LoraModule("a", Path("b=c"))),
        ('{"name": "sql", "path": "adapters/sql"}', LoraModule("sql", Path("adapters/sql"))),
        (' {"name": "sql", "path": "x", "base_model_name": "y"}', LoraModule("sql", Path("x"))),
    ],
)
def test_both_forms_are_read(text: str, module: LoraModule) -> None:
    assert parse_lora_module(text) == module


@pytest.mark.parametrize("text", ["", "sql", "=path", "sql=", "="])
def test_a_word_without_name_and_path_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not name=path"):
        parse_lora_module(text)


@pytest.mark.parametrize("text", ["{", '{"name": "sql"}', '{"path": "x"}', '{"name": "sql", "path": 3}', "{} {}"])
def test_json_without_name_and_path_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match='JSON with "name" and "path"'):
        parse_lora_module(text)


def test_a_long_word_is_shown_in_part() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_lora_module("x" * 5000)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("key", ["base_model_nam", "rank"])
def test_json_with_an_unknown_key_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_lora_module(json.dumps({"name": "sql", "path": "x", key: "y"}))
    assert key in caught.value.message
    assert "base_model_name" in caught.value.message


@pytest.mark.parametrize(("target_ms", "warned"), [(1e-3, True), (1e6, False), (None, False)])
def test_a_target_that_cannot_be_kept_is_told_at_start(
    tiny_base: MakeBase, target_ms: float | None, warned: bool
) -> None:
    config = EngineConfig(kv_pages=64, max_model_len=64, max_num_seqs=4, tpot_target_ms=target_ms)
    launched = launch(tiny_base("llama"), [], config, ServerConfig(), Console(file=io.StringIO()))
    try:
        warning = target_warning(launched)
    finally:
        launched.close()
    assert (warning is not None) == warned
    if warning is not None:
        assert all(part in warning for part in ("--tpot-target-ms 0.001", "4 sequences (--max-num-seqs)", "64 tokens"))


# ---------------------------------------------------------------------- loading
def load(base: Path, *modules: LoraModule) -> str:
    """What `launch` says on the console."""
    console = Console(file=io.StringIO(), width=200)
    config = EngineConfig(memory_bytes=2**23, num_threads=1)
    launch(base, list(modules), config, ServerConfig(), console).engine.stop()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_a_refused_adapter_is_named(tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path) -> None:
    base = tiny_base("llama")
    good = LoraModule("good", tiny_adapter(base))
    for modules, code, words in (
        ((good, LoraModule("sql", tmp_path / "gone")), "CONFIG_MISSING", "does not exist"),
        ((good, good), "NAME_CONFLICT", "choose another name"),
    ):
        with pytest.raises(AdapterRefused) as caught:
            load(base, *modules)
        assert caught.value.reason_code == code
        assert caught.value.message.startswith(f"--lora-modules {modules[-1].name}={modules[-1].path}: ")
        assert words in caught.value.message


def test_an_adapter_of_another_base_is_warned_of(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path
) -> None:
    base = tiny_base("llama")
    for name, declared in (("same", f"org/{base.name.upper()}"), ("other", "org/Elsewhere")):
        shutil.copytree(tiny_adapter(base), tmp_path / name)
        path = tmp_path / name / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": declared}))
    said = load(base, LoraModule("same", tmp_path / "same"), LoraModule("other", tmp_path / "other"))
    words = f"says it was trained on 'org/Elsewhere', and {base.name!r} is served: base unverified."
    assert said == f"warning: adapter other {words}\n"


@pytest.mark.parametrize(
    ("declared", "served_name", "directory", "warned"),
    [
        (None, "mine", "/models/Llama-7B", False),
        ("org/llama-7b", "mine", "/models/Llama-7B", False),
        ("org/llama-7b/", "LLAMA-7b", "/models/x", False),
        ("/old/llama-7b", "mine", "/hub/models--org--Llama-7B/snapshots/0123", False),
        ("org/llama-8b", "llama-7b", "/models/Llama-7B", True),
        ("", "llama-7b", "/models/Llama-7B", True),
    ],
)
def test_names_of_bases_are_compared_by_their_last_part(
    declared: str | None, served_name: str, directory: str, warned: bool
) -> None:
    entry = CatalogEntry(AdapterRef("a", 1, AdapterDigest("0" * 64)), 4, (), 0, declared, 0.0)
    assert (base_warning(entry, served_name, Path(directory)) is not None) == warned
