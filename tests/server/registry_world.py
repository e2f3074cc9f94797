"""A server with a registry: tenants, keys in every state, verified adapters, and a fake engine that holds them."""

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from loraplex.registry import Registry, RegistryConfig, Role
from loraplex.server import ServerConfig, create_app
from loraplex.testing import FakeEngine
from loraplex.testing.fake_engine import VOCAB_SIZE
from tests.registry.helpers import BASE, OPERATOR, World, check_here

BASE_NAME = BASE.name
_SERVED = replace(BASE, vocab_size=VOCAB_SIZE)  # as the fake engine's tokens need it


def fake_engine(**options: Any) -> FakeEngine:
    """An engine for the base of the test adapters, strict about which adapters it was given."""
    return FakeEngine(description=_SERVED, only_held=True, **options)


@dataclass
class Site:
    """A registry with an app over it. Close it at the end."""

    folder: Path
    engine: FakeEngine = field(default_factory=fake_engine)
    config: ServerConfig = field(default_factory=ServerConfig)
    log: io.StringIO = field(default_factory=io.StringIO)
    clock: Any = None

    def __post_init__(self) -> None:
        settings = RegistryConfig(self.folder / "data")
        options: dict[str, Any] = {"validate": check_here, **({"clock": self.clock} if self.clock else {})}
        self.world = World(Registry(settings, **options), self.folder, settings, **options)
        self.app: FastAPI = create_app(self.engine, self.registry, self.config, self.log)

    @property
    def registry(self) -> Registry:
        return self.world.registry

    def tenant(self, name: str, *adapters: str, first_seed: int = 1) -> str:
        """A tenant with active adapters; one of its keys."""
        self.world.tenant(name)
        for seed, adapter in enumerate(adapters, start=first_seed):
            self.world.active(name, adapter, seed)
        return self.world.key(name)

    def operator_key(self, tenant: str) -> str:
        return self.world.key(tenant, Role.OPERATOR)

    def digest(self, tenant: str, adapter: str, version: int | None = None) -> str:
        """Of a version, or of the active one."""
        info = self.registry.adapters.show(OPERATOR, tenant, adapter).info
        number = version if version is not None else info.alias.active
        assert number is not None
        found = self.registry.adapters.version(OPERATOR, tenant, adapter, number)
        assert found.facts is not None
        return found.facts.digest

    def lines(self) -> list[dict[str, Any]]:
        """The log so far."""
        return [json.loads(line) for line in self.log.getvalue().splitlines()]

    @asynccontextmanager
    async def client(self, key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
        """A client with a key."""
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
            yield client

    def close(self) -> None:
        self.registry.close()


def ask(model: str | None, **fields: Any) -> dict[str, Any]:
    """Body of a short completion."""
    named = {} if model is None else {"model": model}
    return {**named, "prompt": "Hello", "max_tokens": 4, "ignore_eos": True, **fields}
