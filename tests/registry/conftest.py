"""Registries on every backend."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from loraplex.registry import Registry, RegistryConfig

from .helpers import BACKENDS, MakeWorld, World, check_here, postgres_database


@pytest.fixture(params=BACKENDS)
def make_world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeWorld]:
    """`make_world(**options)`: a registry in SQLite, and again in PostgreSQL where there is a server."""
    with ExitStack() as stack:
        url = stack.enter_context(postgres_database()) if request.param == "postgres" else None

        def make(config: dict[str, Any] | None = None, **options: Any) -> World:
            options = {"validate": check_here, **options}
            settings = RegistryConfig(tmp_path / "data", database_url=url, **(config or {}))
            registry = stack.enter_context(Registry(settings, **options))
            return World(registry, tmp_path, settings, **options)

        yield make


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    """A registry without tenants."""
    return make_world()
