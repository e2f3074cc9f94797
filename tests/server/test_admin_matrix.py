"""Nobody manages what is another's (RELIABILITY.md, T09): callers, owners, adapters and all admin routes.

Bad keys on these routes are in test_cross_tenant.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.registry import Role
from loraplex.server import admin_routes
from loraplex.server.admin_operations import AdminOperations
from loraplex.server.admin_routes import ADMIN_ROUTES
from loraplex.server.callers import Access
from loraplex.server.routing import RouteSpec
from tests.cli.hostile import GOOD_CONFIG, GOOD_WEIGHTS
from tests.registry.helpers import OPERATOR

from .admin_site import form
from .helpers import assert_error
from .registry_world import Site

pytestmark = pytest.mark.anyio

TENANTS = ("acme", "globex", "hooli", "initech", "umbrella")
KINDS = ("one", "two", "three")
ABSENT = "absent"
REQUEST_ID = {"X-Request-Id": "same"}
OWNED = [spec for spec in ADMIN_ROUTES if "{tenant}" in spec.path]
BODIES: dict[str, dict[str, Any]] = {
    "activate": {"json": {"version": 1, "expected": 1}},
    "rollback": {"json": {"expected": 1}},
    "verify": {"json": {}},
    "keys": {"json": {}},
    "disable": {"json": {}},
    "enable": {"json": {}},
    "versions": form(GOOD_CONFIG, GOOD_WEIGHTS),
}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Five tenants with three active adapters and a key to be revoked each."""
    site = Site(tmp_path)
    for number, tenant in enumerate(TENANTS):
        site.tenant(tenant, *(f"{tenant}-{kind}" for kind in KINDS), first_seed=1 + len(KINDS) * number)
    yield site
    site.close()


def key_id(site: Site, tenant: str) -> str:
    """A key of the tenant; of nobody, one that could be."""
    return site.registry.keys.list(OPERATOR, tenant)[0].key_id if tenant != ABSENT else "a" * 12


async def call(client: httpx.AsyncClient, spec: RouteSpec, values: dict[str, str]) -> httpx.Response:
    body = BODIES.get(spec.path.rpartition("/")[2], {}) if spec.method == "POST" else {}
    return await client.request(spec.method, spec.path.format(**values), headers=REQUEST_ID, **body)


def seen(response: httpx.Response, values: dict[str, str]) -> tuple[object, ...]:
    """What a caller learns, without the names that it gave itself."""
    text = response.text
    for value in sorted(values.values(), key=len, reverse=True):
        text = text.replace(value, "*")
    hidden = ("content-length", "date")
    return response.status_code, text, sorted((k, v) for k, v in response.headers.items() if k not in hidden)


def target(site: Site, owner: str, kind: str) -> dict[str, str]:
    name, key = f"{owner}-{kind}", key_id(site, owner)
    return {"tenant": owner, "name": name, "version": "1", "grantee": "hooli", "key_id": key}


async def count_leaks(site: Site) -> tuple[int, int]:
    """How often an answer on another's differs from one on nothing; and how many were compared."""
    leaks = tried = 0
    for caller in TENANTS:
        async with site.client(site.world.key(caller, Role.TENANT_ADMIN)) as client:
            for spec in OWNED:
                nothing = target(site, ABSENT, "one")
                expected = seen(await call(client, spec, nothing), nothing)
                for owner in TENANTS:
                    for kind in KINDS if owner != caller else ():
                        values = target(site, owner, kind)
                        leaks += seen(await call(client, spec, values), values) != expected
                        tried += 1
    return leaks, tried


async def test_what_is_anothers_looks_like_nothing_on_every_route_and_is_not_changed(site: Site) -> None:
    before = [site.registry.adapters.list(OPERATOR, tenant) for tenant in TENANTS]
    leaks, tried = await count_leaks(site)
    assert leaks == 0
    assert tried == 5 * 4 * 3 * len(OWNED)
    assert [site.registry.adapters.list(OPERATOR, tenant) for tenant in TENANTS] == before
    for tenant in TENANTS:
        actions = [entry.action for entry in site.registry.audit_entries(OPERATOR, tenant, limit=1000)]
        assert actions.count("key.create") == 3  # the tenant's, the world's, and this test's own
        assert {"key.revoke", "tenant.disable", "grant.add", "version.delete"} & set(actions) == set()
    assert site.engine.compared == []


async def test_what_is_ones_own_can_be_managed_on_every_route(site: Site) -> None:
    """The positive control: without it, refusing everything would pass."""
    deletions_last = sorted(OWNED, key=lambda spec: (spec.method == "DELETE", "{key_id}" in spec.path))
    async with site.client(site.world.key("acme", Role.TENANT_ADMIN)) as client:
        for spec in deletions_last:
            values = target(site, "acme", "two" if spec.method == "DELETE" else "one")
            response = await call(client, spec, values)
            if spec.access is Access.OPERATOR:
                assert_error(response, 403, code="permission_denied")
            elif spec.path.endswith("rollback"):
                assert_error(response, 409, code="version_state")  # there is no earlier one
            elif spec.path.endswith("versions/{version}"):
                assert response.status_code in (404, 412)  # it is active, or gone with its adapter
            else:
                assert response.status_code in (200, 201), (spec.path, response.text)


async def test_with_the_operators_rights_others_are_reached(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: handlers that forget whose key it is."""
    monkeypatch.setattr(admin_routes, "_operations", lambda service, http: AdminOperations(site.registry, OPERATOR))
    assert (await count_leaks(site))[0] > 100
