"""A tenant's part of a server: who sets it, what it may be, how it reaches requests, and what is kept of it."""

import time
from typing import Any

import pytest
from sqlalchemy import text

from loraplex.core import InvalidRequest
from loraplex.registry import NotInMemory, PermissionDenied, Principal, Registry, Role, TenantLimits, TenantNotFound
from loraplex.registry.cache import POLL_EVERY_S

from .helpers import OPERATOR, World

ALL: Any = {"weight": 2.5, "priority": -20, "max_requests": 8, "tokens_per_minute": 6_000}


def limits(registry: Registry, tenant: str) -> TenantLimits:
    return registry.tenants.find(OPERATOR, tenant).limits


def test_a_tenant_for_whom_nothing_was_set_has_the_defaults(world: World) -> None:
    admin = world.tenant("acme")
    default = TenantLimits(weight=1.0, priority=0, max_requests=None, tokens_per_minute=None)
    assert limits(world.registry, "acme") == default == admin.limits
    assert [tenant.limits for tenant in world.registry.tenants.list(OPERATOR)] == [default]
    assert OPERATOR.limits == default


def test_limits_are_set_one_by_one_and_stay(world: World) -> None:
    world.tenant("acme")
    world.tenant("globex")
    tenants = world.registry.tenants
    assert tenants.change_limits(OPERATOR, "acme", ALL).limits == TenantLimits(2.5, -20, 8, 6_000)
    assert tenants.change_limits(OPERATOR, "acme", {"max_requests": None}).limits == TenantLimits(2.5, -20, None, 6_000)
    tenants.disable(OPERATOR, "acme")
    assert tenants.enable(OPERATOR, "acme").limits == TenantLimits(2.5, -20, None, 6_000)
    with world.reopen() as again:
        assert limits(again, "acme") == TenantLimits(2.5, -20, None, 6_000)
        assert limits(again, "globex") == TenantLimits()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("weight", 0, "weight is 0; it must be from 0.001 to 1000."),
        ("weight", 1000.5, "weight is 1000.5; it must be from 0.001 to 1000."),
        ("weight", float("nan"), "weight is nan; it must be from 0.001 to 1000."),
        ("priority", -101, "priority is -101; it must be from -100 to 100."),
        ("priority", 101, "priority is 101; it must be from -100 to 100."),
        ("max_requests", 0, "max_requests is 0; it must be from 1 to 1000000."),
        ("tokens_per_minute", 0, "tokens_per_minute is 0; it must be from 1 to 1000000000000."),
        ("tokens_per_minute", 10**12 + 1, "tokens_per_minute is 1000000000001; it must be from 1 to 1000000000000."),
    ],
)
def test_a_value_that_cannot_be_changes_nothing(world: World, field: str, value: float, message: str) -> None:
    world.tenant("acme")
    changes: Any = {**ALL, field: value}
    with pytest.raises(InvalidRequest) as caught:
        world.registry.tenants.change_limits(OPERATOR, "acme", changes)
    assert (caught.value.message, caught.value.param) == (message, field)
    assert limits(world.registry, "acme") == TenantLimits()
    assert [entry.action for entry in world.registry.audit_entries(OPERATOR, "acme")][-1] == "key.create"


def test_no_change_is_no_change(world: World) -> None:
    world.tenant("acme")
    with pytest.raises(InvalidRequest, match="at least one of weight, priority, max_requests and tokens_per_minute"):
        world.registry.tenants.change_limits(OPERATOR, "acme", {})


def test_only_operators_set_them_and_a_tenants_admin_sees_its_own(world: World) -> None:
    admin = world.tenant("acme")
    world.tenant("globex")
    tenants = world.registry.tenants
    for name in ("acme", "globex", "absent"):
        with pytest.raises(PermissionDenied):
            tenants.change_limits(admin, name, {"weight": 2.0})
    assert tenants.find(admin, "acme").limits == TenantLimits()
    for name in ("globex", "absent"):
        with pytest.raises(TenantNotFound):
            tenants.find(admin, name)
    with pytest.raises(PermissionDenied):
        tenants.find(world.principal("acme"), "acme")
    with pytest.raises(TenantNotFound):
        tenants.change_limits(OPERATOR, "absent", {"weight": 2.0})


def test_what_changed_is_on_record_before_and_after(world: World) -> None:
    world.tenant("acme")
    world.registry.tenants.change_limits(OPERATOR, "acme", {"weight": 2.5, "max_requests": 8})
    world.registry.tenants.change_limits(OPERATOR, "acme", {"max_requests": None})
    first, second = world.registry.audit_entries(OPERATOR, "acme")[-2:]
    assert (first.action, first.actor) == ("tenant.limits", "local")
    assert first.details == {
        "name": "acme",
        "weight_from": 1.0,
        "weight_to": 2.5,
        "max_requests_from": None,
        "max_requests_to": 8,
    }
    assert second.details == {"name": "acme", "max_requests_from": 8, "max_requests_to": None}
    assert world.registry.verify_audit(OPERATOR).ok


def test_the_next_request_has_the_new_limits(world: World) -> None:
    """As for a revoked key: the process that changed them forgets what it knew of the tenant's keys, and no other's."""
    world.tenant("acme")
    world.tenant("globex")
    key, other = world.key("acme"), world.key("globex")
    for one in (key, other):
        assert world.registry.authenticate(one).limits == TenantLimits()
    world.registry.tenants.change_limits(OPERATOR, "acme", {"weight": 3.0})
    with pytest.raises(NotInMemory):
        world.registry.recall_principal(key)
    assert world.registry.recall_principal(other).limits == TenantLimits()
    assert world.registry.authenticate(key).limits == TenantLimits(weight=3.0)
    assert world.registry.recall_principal(key).limits == TenantLimits(weight=3.0)


def test_another_process_has_them_within_the_time_of_a_poll(world: World) -> None:
    world.tenant("acme")
    key = world.key("acme", Role.TENANT)
    with world.reopen() as again:
        assert again.authenticate(key).limits == TenantLimits()
        world.registry.tenants.change_limits(OPERATOR, "acme", {"priority": -5})
        found: list[Principal] = []
        ends = time.monotonic() + 20 * POLL_EVERY_S
        while (not found or found[-1].limits == TenantLimits()) and time.monotonic() < ends:
            found.append(again.authenticate(key))
            time.sleep(POLL_EVERY_S / 5)
        assert found[-1].limits == TenantLimits(priority=-5)


def test_a_registry_of_before_has_the_defaults(world: World) -> None:
    from alembic import command
    from alembic.config import Config

    from loraplex.registry.database import _MIGRATIONS

    world.tenant("acme")
    key = world.key("acme")
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    with world.registry._store.database.write() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0002")
        columns = list(connection.execute(text("SELECT * FROM tenants")).keys())
        assert "weight" not in columns
    with world.reopen() as again:
        assert again.authenticate(key).limits == TenantLimits()
        assert again.tenants.change_limits(OPERATOR, "acme", ALL).limits == TenantLimits(2.5, -20, 8, 6_000)
