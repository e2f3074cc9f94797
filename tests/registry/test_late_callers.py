"""A key that loses its right while an operation runs changes nothing: it is looked at in the change's transaction."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import update

from loraplex.core import BaseDescription, LoraplexError
from loraplex.registry import AdapterFacts, PermissionDenied, Principal, Role, Unauthenticated, access
from loraplex.registry.blobs import StagedBlob
from loraplex.registry.schema import api_keys

from .helpers import BASE, OPERATOR, PASSED, Clock, MakeWorld, World, adapter_dir, bad_adapter_dir, check_here
from .test_cross_tenant import snapshot

Lose = Callable[[World, Principal], None]


def expire(world: World, principal: Principal) -> None:
    world.options["clock"].now += 100


def downgrade(world: World, principal: Principal) -> None:
    """No method does it; whoever has the database can."""
    with world.registry._store.change(OPERATOR) as change:
        row = (api_keys.c.tenant_id == principal.tenant_id) & (api_keys.c.key_id == principal.key_id)
        change.connection.execute(update(api_keys).where(row).values(role="tenant"))
        change.record(principal.tenant_id, OPERATOR.key_id, "test")


LOSSES: dict[str, tuple[Lose, type[LoraplexError]]] = {
    "revoked": (lambda w, p: void(w.registry.keys.revoke(OPERATOR, p.tenant, p.key_id)), Unauthenticated),
    "expired": (expire, Unauthenticated),
    "downgraded": (downgrade, PermissionDenied),
    "disabled": (lambda w, p: void(w.registry.tenants.disable(OPERATOR, p.tenant)), Unauthenticated),
}
CHANGES: dict[str, Callable[[World, Principal], object]] = {
    "publish": lambda w, p: w.registry.publish(
        p, "acme", "sup", adapter_dir(w.folder, 3), BASE, base_fingerprint=BASE.fingerprint
    ),
    "refuse": lambda w, p: w.registry.publish(
        p, "acme", "sup", bad_adapter_dir(w.folder), BASE, base_fingerprint=BASE.fingerprint
    ),
    "verify": lambda w, p: w.registry.adapters.record_verification(p, "acme", "sup", 2, PASSED),
    "skip": lambda w, p: w.registry.adapters.skip_verification(p, "acme", "sup", 3),
    "activate": lambda w, p: w.registry.adapters.activate(p, "acme", "sup", 2, expected=1),
    "rollback": lambda w, p: w.registry.adapters.rollback(p, "acme", "sup", expected=1),
    "delete": lambda w, p: w.registry.adapters.delete(p, "acme", "sup"),
    "grant": lambda w, p: w.registry.adapters.grant(p, "acme", "sup", "globex"),
    "keys.create": lambda w, p: w.registry.keys.create(p, "acme", Role.TENANT, expires_at=w.options["clock"].now + 1),
    "keys.revoke": lambda w, p: w.registry.keys.revoke(p, "acme", p.key_id),
    "tenants.create": lambda w, p: w.registry.tenants.create(p, "new"),
    "tenants.enable": lambda w, p: w.registry.tenants.enable(p, "acme"),
}


def void(result: object) -> None:
    """Nothing of a result."""


@pytest.fixture
def acme(make_world: MakeWorld) -> World:
    """acme/sup with versions 1 (active), 2 (verified) and 3 (validated)."""
    world = make_world(clock=Clock())
    world.tenant("acme")
    world.tenant("globex")
    world.active("acme", "sup", seed=1)
    world.verified("acme", "sup", seed=2)
    world.publish("acme", "sup", seed=1)
    return world


def rows(world: World) -> dict[str, Any]:
    found = snapshot(world)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_caller_that_came_in_before_changes_nothing_after(acme: World, change: str, loss: str) -> None:
    principal = acme.principal("acme", Role.OPERATOR, expires_at=acme.options["clock"].now + 50)
    lose, error = LOSSES[loss]
    lose(acme, principal)
    if (change, loss) == ("keys.create", "expired"):
        error = PermissionDenied  # no key can outlive one that has ended
    before = rows(acme)
    with pytest.raises(error):
        CHANGES[change](acme, principal)
    assert rows(acme) == before


@pytest.mark.parametrize("change", [name for name in CHANGES if name not in ("refuse", "rollback")])
def test_a_caller_that_may_can(acme: World, change: str) -> None:
    """The positive control."""
    CHANGES[change](acme, acme.principal("acme", Role.OPERATOR, expires_at=acme.options["clock"].now + 50))


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_an_upload_that_ends_after_its_key_publishes_nothing(make_world: MakeWorld, loss: str, good: bool) -> None:
    """The key is lost while the files are checked; a refusal is not recorded in its name either."""
    lose, error = LOSSES[loss]
    uploader: list[Principal] = []
    before: list[dict[str, Any]] = []

    def slow(config: StagedBlob, weights: StagedBlob, base: BaseDescription) -> AdapterFacts:
        lose(world, uploader[0])
        before.append(rows(world))
        return check_here(config, weights, base)

    world = make_world(clock=Clock(), validate=slow)
    world.tenant("acme")
    uploader.append(world.principal("acme", Role.TENANT_ADMIN, expires_at=world.options["clock"].now + 50))
    directory = adapter_dir(world.folder) if good else bad_adapter_dir(world.folder)
    with pytest.raises(error):
        world.registry.publish(uploader[0], "acme", "sup", directory, BASE, base_unverified=True)
    assert [rows(world)] == before
    world.registry.tenants.enable(OPERATOR, "acme")
    assert world.registry.adapters.list(OPERATOR, "acme") == ()


@pytest.mark.parametrize("loss", LOSSES)
def test_what_this_process_does_for_a_key_ends_with_the_key(acme: World, loss: str) -> None:
    """A server vouches for figures that a tenant's admin asked for."""
    admin = acme.principal("acme", Role.TENANT_ADMIN, expires_at=acme.options["clock"].now + 50)
    engine = replace(OPERATOR, key_id=admin.key_id)
    acme.registry.adapters.record_verification(engine, "acme", "sup", 3, PASSED)
    lose, error = LOSSES[loss]
    lose(acme, admin)
    before = rows(acme)
    with pytest.raises(error):
        acme.registry.adapters.record_verification(engine, "acme", "sup", 2, PASSED)
    assert rows(acme) == before


def test_a_key_of_another_tenant_or_of_none_is_not_the_callers(acme: World) -> None:
    admin, other = acme.principal("acme", Role.TENANT_ADMIN), acme.principal("globex", Role.TENANT_ADMIN)
    for principal in (replace(admin, key_id=other.key_id), replace(admin, key_id="a" * 12)):  # type: ignore[arg-type]
        with pytest.raises(Unauthenticated):
            acme.registry.adapters.activate(principal, "acme", "sup", 2, expected=1)


def test_without_the_second_look_a_revoked_key_publishes(acme: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant."""
    admin = acme.principal("acme", Role.TENANT_ADMIN)
    acme.registry.keys.revoke(OPERATOR, "acme", admin.key_id)
    monkeypatch.setattr("loraplex.registry.changes.check_caller", lambda connection, principal, now: None)
    assert acme.registry.adapters.activate(admin, "acme", "sup", 2, expected=1).active == 2
    assert access.check_caller is not None
