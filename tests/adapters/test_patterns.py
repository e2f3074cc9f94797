"""Regular expressions where adapters are published: inside the process that validates, with its own limits around."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters import AdapterLimits, load_adapter, patterns
from loraplex.adapters.patterns import Pattern, PatternKind, match_names
from loraplex.core import AdapterRefused
from loraplex.registry import SandboxLimits, validate_in_subprocess
from loraplex.registry.changes import no_step
from loraplex.registry.directory_store import DirectoryStore

from .factories import make_base, make_config, make_tensors, write_adapter

HOSTILE = r"(([a-z_.0-9]+)+)+!"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectoryStore]:
    store = DirectoryStore(tmp_path / "artifacts", no_step)
    yield store
    store.close()


def validate(store: DirectoryStore, directory: Path, sandbox: SandboxLimits) -> Any:
    files = (directory / name for name in ("adapter_config.json", "adapter_model.safetensors"))
    config, weights = (store.stage(path.read_bytes()) for path in files)
    return validate_in_subprocess(config, weights, make_base(), AdapterLimits(), sandbox)


@pytest.mark.parametrize("sandbox", [SandboxLimits(), SandboxLimits(memory_bytes=2**29, cpu_s=5)])
def test_expressions_are_run_inside_the_validating_process(
    sandbox: SandboxLimits, store: DirectoryStore, tmp_path: Path
) -> None:
    config = make_config(target_modules=r".*\.(q|v)_proj", rank_pattern={r".*\.q_proj": 2}, exclude_modules=".*down.*")
    directory = write_adapter(tmp_path / "a", config, make_tensors())
    assert validate(store, directory, sandbox).digest == load_adapter(directory, make_base(), AdapterLimits()).digest


def test_hostile_expression_is_refused_where_it_is_published(store: DirectoryStore, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", make_config(target_modules=HOSTILE), make_tensors())
    started = time.monotonic()
    with pytest.raises(AdapterRefused) as caught:
        validate(store, directory, SandboxLimits())
    assert (caught.value.reason_code, caught.value.subject) == ("TOO_LARGE", "target_modules")
    assert time.monotonic() - started < 25


def test_expression_that_wants_more_memory_than_given_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_MEMORY_BYTES", 2**24)
    pattern = Pattern("target_modules", PatternKind.WHOLE, "(a|b)*c")
    with pytest.raises(AdapterRefused) as caught:
        match_names((pattern,), ("ab" * 200_000,))
    assert caught.value.reason_code == "TOO_LARGE"


def test_answers_are_kept_and_refusals_are_not() -> None:
    pattern = Pattern("target_modules", PatternKind.WHOLE, "x.*")
    assert match_names((pattern,), ("xa", "b")) is match_names((pattern,), ("xa", "b")) == (("", None),)
    for _ in range(2):
        with pytest.raises(AdapterRefused):
            match_names((Pattern("target_modules", PatternKind.WHOLE, "("),), ("a",))
