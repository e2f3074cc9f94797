"""`loraplex fingerprint`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.core import BaseRefused
from loraplex.engine import EngineConfig, load_base
from tests.conftest import MakeBase


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["fingerprint", *words], catch_exceptions=True)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_it_is_the_one_that_is_served(tiny_base: MakeBase) -> None:
    base = tiny_base("llama")
    served = load_base(base, EngineConfig(num_threads=1)).description.fingerprint
    assert run(str(base)) == f"{served}\n"
    found = json.loads(run(str(base), "--json"))
    assert (found["fingerprint"], found["model_type"]) == (served, "llama")
    assert found["bytes"] == (base / "model.safetensors").stat().st_size
    assert found["tensors"] > 10


def test_other_weights_have_another(tiny_base: MakeBase) -> None:
    assert run(str(tiny_base("llama"))) != run(str(tiny_base("llama", seed=1)))


def test_what_is_no_base_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BaseRefused):
        run(str(tmp_path))
