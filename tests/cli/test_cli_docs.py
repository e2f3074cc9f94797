"""docs/cli.md tells of each command what the command itself tells."""

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from loraplex.cli.main import app
from tests.test_docs import make_cli_docs, read, section

GROUPS: Any = {name: one for name, one in typer.main.get_command(app).commands.items() if hasattr(one, "commands")}  # type: ignore[attr-defined]

COMMANDS = [[name, *sub] for name in GROUPS for sub in ([], *([one] for one in GROUPS[name].commands))]
COMMANDS += [[], *([name] for name in typer.main.get_command(app).commands if name not in GROUPS)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help(words: list[str]) -> None:
    """Brackets in a text would be taken for rich's markup."""
    shown = CliRunner().invoke(app, [*words, "--help"])
    assert (shown.exit_code, shown.exception) == (0, None)
    assert "Usage" in shown.output


@pytest.mark.parametrize("group", GROUPS)
def test_options_with_another_meaning_are_told_with_their_command(group: str) -> None:
    """Commands of a group share a table only of what means the same to all of them."""
    whole = section(read("cli.md"), f"## `loraplex {group}`")
    shared = whole[whole.index("All of them also take:") :]
    for name, command in GROUPS[group].commands.items():
        own = section(whole, f"### `loraplex {group} {name}`").partition("All of them also take:")[0]
        for param in command.params:
            told = [text for text in (own, shared) if make_cli_docs()._cell(param.help) in text]
            assert len(told) == 1, (name, param.name)
