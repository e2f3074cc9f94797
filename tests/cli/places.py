"""The administrator's commands on a data directory and on a server, run as a user would."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from loraplex.cli.main import main
from loraplex.core.comparison import AdapterComparison
from loraplex.registry import Role
from loraplex.testing import FakeEngine
from tests.registry.helpers import BASE, World

FINGERPRINT = BASE.fingerprint
PASSED = AdapterComparison(1e-4, 1e-6, 0.5, 1e-2)
FAILED = AdapterComparison(2.0, 0.3, 0.5, 1e-2)


@dataclass(frozen=True)
class Ran:
    """What a command left: exit status, and what it printed."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output, which must be one JSON document."""
        return json.loads(self.out)


@dataclass
class Commands:
    """Runs `loraplex WORDS` in this process, at a place."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *words: object) -> Ran:
        self.capsys.readouterr()
        self.monkeypatch.setattr("sys.argv", ["loraplex", *map(str, words)])
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        captured = self.capsys.readouterr()
        return Ran(status, captured.out, captured.err)

    def good(self, *words: object) -> Any:
        """The JSON document of a command that must succeed."""
        ran = self(*words, "--json")
        assert ran.status == 0, ran.err
        return ran.document

    def refused(self, *words: object) -> str:
        """The one line of a command that must be refused as the caller's error."""
        ran = self(*words)
        assert ran.status == 2, (ran.status, ran.out, ran.err)
        assert ran.out == ""
        (line,) = ran.err.splitlines()
        assert line.startswith("error "), line
        return line


@dataclass
class Place:
    """Where the commands work, with what tests look at behind their back."""

    name: str  # "local" or "http"
    run: Commands
    world: World
    engine: FakeEngine
    as_key: Callable[[str | None], None]  # work with another key; only on a server

    @property
    def base(self) -> tuple[str, ...]:
        """What a command needs to know the base by."""
        return ("--base", "/the/base") if self.name == "local" else ()

    def add(self, directory: Path, name: str = "support", *words: str) -> tuple[object, ...]:
        """A command that adds an adapter to acme."""
        claim = () if "--base-unverified" in words else ("--base-fingerprint", FINGERPRINT)
        return ("adapter", "add", directory, "--tenant", "acme", "--name", name, *self.base, *claim, *words)


def served_base() -> FakeEngine:
    """An engine of the test adapters' base."""
    return FakeEngine(description=replace(BASE, vocab_size=258))


def operator_key(world: World) -> str:
    """Of a tenant of its own."""
    world.tenant("ops")
    return world.key("ops", Role.OPERATOR)
