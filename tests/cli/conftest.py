"""Places for the administrator's commands."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from loraplex.registry import Registry, RegistryConfig
from loraplex.server import ServerConfig, create_app
from tests.registry.helpers import BASE, World, check_here
from tests.server.helpers import LiveServer

from .places import Commands, Place, operator_key, served_base

_VARIABLES = ("DATA_DIR", "DATABASE_URL", "ARTIFACTS_URL", "URL", "API_KEY")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    """Runs commands at no place."""
    for name in _VARIABLES:
        monkeypatch.delenv(f"LORAPLEX_{name}", raising=False)
    return Commands(monkeypatch, capsys)


@pytest.fixture(params=["local", "http"])
def place(request: pytest.FixtureRequest, run: Commands, tmp_path: Path) -> Iterator[Place]:
    """A registry with the tenants acme and beta, and commands that work on it as operator."""
    patch = run.monkeypatch
    patch.setattr(
        "loraplex.registry.registry.validate_in_subprocess", lambda c, w, base, *limits: check_here(c, w, base)
    )
    settings = RegistryConfig(tmp_path / "data")
    with Registry(settings) as registry:
        world = World(registry, tmp_path, settings)
        for tenant in ("acme", "beta"):
            registry.tenants.create(registry.local_operator(), tenant)
        make = _local if request.param == "local" else _http
        yield from make(run, world)


def _local(run: Commands, world: World) -> Iterator[Place]:
    engine = served_base()
    run.monkeypatch.setattr("loraplex.cli.local_client.describe", lambda base: BASE)
    run.monkeypatch.setattr("loraplex.cli.local_client.load_comparer", lambda base: (BASE, engine.compare))
    run.monkeypatch.setenv("LORAPLEX_DATA_DIR", str(world.config.data_dir))
    yield Place("local", run, world, engine, lambda key: None)


def _http(run: Commands, world: World) -> Iterator[Place]:
    engine = served_base()
    server = LiveServer(create_app(engine, world.registry, ServerConfig(access_log=False)))
    run.monkeypatch.setenv("LORAPLEX_URL", server.url)
    set_key = partial(run.monkeypatch.setenv, "LORAPLEX_API_KEY")
    set_key(operator_key(world))
    try:
        yield Place("http", run, world, engine, set_key)
    finally:
        server.stop()
