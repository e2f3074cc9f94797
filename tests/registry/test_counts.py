"""How much a registry holds."""

import pytest

from loraplex.registry import PermissionDenied, RegistryCounts, Role

from .helpers import OPERATOR, World


def test_enabled_tenants_and_active_adapters_are_counted(world: World) -> None:
    assert world.registry.tenants.count(OPERATOR) == RegistryCounts(0, 0)
    for tenant in ("acme", "globex", "hooli"):
        world.tenant(tenant)
    world.active("acme", "one")
    world.active("acme", "two")
    world.active("globex", "one")
    world.verified("globex", "idle")
    assert world.registry.tenants.count(OPERATOR) == RegistryCounts(3, 3)
    world.registry.adapters.delete(OPERATOR, "acme", "two")
    world.registry.tenants.disable(OPERATOR, "globex")
    assert world.registry.tenants.count(OPERATOR) == RegistryCounts(2, 1)
    with pytest.raises(PermissionDenied):
        world.registry.tenants.count(world.principal("acme", Role.TENANT_ADMIN))
