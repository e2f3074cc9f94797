"""What a command brings in before it has anything to do: a page of help comes at once."""

import subprocess
import sys

import pytest

from loraplex.cli.key import KeyRole
from loraplex.registry import Role

HEAVY = ("alembic", "fastapi", "httpx", "numpy", "obstore", "sqlalchemy", "starlette", "torch", "uvicorn")
PROGRAM = f"""
import sys
from loraplex.cli.main import main
try:
    main()
except SystemExit as end:
    assert end.code in (None, 0), end.code
found = [name for name in {HEAVY!r} if name in sys.modules]
assert not found, found
"""


@pytest.mark.parametrize(
    "words",
    ["", "adapter", "adapter add", "adapter list", "tenant limits", "key create", "audit list", "serve", "demo"],
)
def test_help_imports_nothing_heavy(words: str) -> None:
    command = [sys.executable, "-c", PROGRAM, *words.split(), "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "Usage" in ended.stdout


def test_roles_of_the_command_are_those_of_the_registry() -> None:
    assert [(role.name, role.value) for role in KeyRole] == [(role.name, role.value) for role in Role]
