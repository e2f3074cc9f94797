"""Adapters on the command line."""

from pathlib import Path

import pytest

from loraplex.cli.launch import LoraModule, parse_lora_module
from loraplex.core import ConfigError


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
