"""A server with a registry on either database, seen by its administrators."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import Any

import httpx

from loraplex.registry import Role
from loraplex.server import ServerConfig, create_app
from loraplex.testing import FakeEngine
from tests.registry.helpers import BASE, World

FINGERPRINT = BASE.fingerprint


@dataclass
class AdminSite:
    """A registry of two tenants, `acme` and `beta`, with an app over it."""

    world: World
    engine: FakeEngine = field(default_factory=lambda: FakeEngine(description=replace(BASE, vocab_size=258)))
    log: StringIO = field(default_factory=StringIO)

    def __post_init__(self) -> None:
        self.app = create_app(self.engine, self.world.registry, ServerConfig(body_timeout_s=2), self.log)
        for tenant in ("acme", "beta"):
            self.world.tenant(tenant)
        self.operator = self.world.key("beta", Role.OPERATOR)
        self.admin = self.world.key("acme", Role.TENANT_ADMIN)

    @asynccontextmanager
    async def client(self, key: str | None) -> AsyncIterator[httpx.AsyncClient]:
        """A client with a key, at `/admin/v1/`."""
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test/admin/v1/", headers=headers, timeout=60
        ) as client:
            yield client


def form(config: bytes, weights: bytes, **fields: str) -> dict[str, Any]:
    """Arguments of an upload, of a base that is known unless it says otherwise."""
    data = fields or {"base_fingerprint": FINGERPRINT}
    return {"files": {"config": ("c", config), "weights": ("w", weights)}, "data": data}
