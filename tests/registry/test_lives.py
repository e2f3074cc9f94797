"""What is published under the name of a deleted adapter is another adapter: no grant and no key of before opens it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text

from loraplex.core import LoraplexError, ModelNotFound
from loraplex.registry import AdapterDeleted, NotInMemory, Principal, Role
from loraplex.registry.database import _MIGRATIONS, Database

from .helpers import BASE, OPERATOR, World


@pytest.fixture
def shared(world: World) -> World:
    """acme/sup, active, granted to globex and hooli."""
    for tenant in ("acme", "globex", "hooli"):
        world.tenant(tenant)
    world.active("acme", "sup", seed=1)
    for tenant in ("globex", "hooli"):
        world.registry.adapters.grant(OPERATOR, "acme", "sup", tenant)
    return world


def outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except (LoraplexError, NotInMemory) as error:
        return type(error)


def test_deletion_ends_every_grant(shared: World) -> None:
    adapters, admin = shared.registry.adapters, shared.principal("acme", Role.TENANT_ADMIN)
    guest = shared.principal("globex")
    assert shared.registry.resolve(guest, "acme/sup", BASE) is not None  # it is in memory
    adapters.delete(admin, "acme", "sup")
    assert adapters.show(admin, "acme", "sup").grantees == ()
    with pytest.raises(ModelNotFound) as caught:
        shared.registry.resolve(guest, "acme/sup", BASE)
    assert caught.type is ModelNotFound  # no tombstone for who has no grant
    entries = shared.registry.audit_entries(OPERATOR, "acme")
    ended = [(entry.actor, entry.details["grantee"]) for entry in entries if entry.action == "grant.remove"]
    assert ended == [(admin.key_id, "globex"), (admin.key_id, "hooli")]
    assert shared.registry.verify_audit(OPERATOR).ok


def test_a_grant_of_before_does_not_open_what_comes_after(shared: World) -> None:
    guest, open_key = shared.principal("globex"), shared.principal("hooli", bound_adapter="acme/sup")
    shared.registry.adapters.delete(OPERATOR, "acme", "sup")
    shared.active("acme", "sup", seed=2)
    for principal in (guest, open_key):
        for model in ("acme/sup", "acme/sup@1", "acme/sup@2"):
            with pytest.raises(ModelNotFound):
                shared.registry.resolve(principal, model, BASE)
        assert shared.registry.list_models(principal, BASE).models == ()
    shared.registry.adapters.grant(OPERATOR, "acme", "sup", "globex")  # the positive control: a new one does
    assert shared.registry.resolve(guest, "acme/sup", BASE) is not None


@pytest.mark.parametrize(("tenant", "mine"), [("acme", "sup"), ("globex", "acme/sup")])
def test_a_key_bound_before_is_worthless_afterwards(shared: World, tenant: str, mine: str) -> None:
    """Also where the new adapter is granted, warm in memory, or not active."""
    registry = shared.registry
    old = shared.principal(tenant, bound_adapter=mine)
    assert registry.resolve(old, None, BASE) is not None
    registry.adapters.delete(OPERATOR, "acme", "sup")
    version = shared.publish("acme", "sup", seed=2)
    registry.adapters.grant(OPERATOR, "acme", "sup", "globex")
    new = shared.principal(tenant, bound_adapter=mine)
    forms = (None, mine, f"{mine}@1", f"{mine}@2")

    def all_deleted() -> None:
        for model in forms:
            assert outcome(lambda: registry.resolve(old, model, BASE)) is AdapterDeleted, model  # noqa: B023
            assert outcome(lambda: registry.recall_version(old, model, BASE)) in (AdapterDeleted, NotInMemory)  # noqa: B023
        assert registry.list_models(old, BASE).models == ()

    all_deleted()  # not "not verified" or "not active": those would speak of the new one
    registry.adapters.skip_verification(OPERATOR, "acme", "sup", version.number)
    registry.adapters.activate(OPERATOR, "acme", "sup", version.number, expected=None)
    all_deleted()
    resolved = registry.resolve(new, None, BASE)  # the positive control, which also warms the memory
    assert resolved is not None
    assert (resolved.ref.name, resolved.ref.version) == (mine, 2)
    assert [model.ref.name for model in registry.list_models(new, BASE).models] == [mine]
    all_deleted()


def test_tombstones_and_numbers_go_on_over_lives(shared: World) -> None:
    owner = shared.principal("acme")
    for life in (2, 3):
        shared.registry.adapters.delete(OPERATOR, "acme", "sup")
        assert shared.active("acme", "sup", seed=life).number == life
        for number in range(1, life):
            with pytest.raises(AdapterDeleted):
                shared.registry.resolve(owner, f"sup@{number}", BASE)
    assert len(shared.registry.adapters.show(OPERATOR, "acme", "sup").versions) == 3


def test_a_refusal_begins_no_life(shared: World) -> None:
    """Only what can be called ends the binding's meaning; until then the tombstone answers."""
    from .helpers import bad_adapter_dir

    old = shared.principal("acme", bound_adapter="sup")
    shared.registry.adapters.delete(OPERATOR, "acme", "sup")
    with pytest.raises(LoraplexError):
        shared.registry.publish(OPERATOR, "acme", "sup", bad_adapter_dir(shared.folder), BASE, base_unverified=True)
    assert outcome(lambda: shared.registry.resolve(old, None, BASE)) is AdapterDeleted


def test_without_the_comparison_of_lives_old_keys_open_new_adapters(
    shared: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant of the tests above."""
    from loraplex.registry import repository
    from loraplex.registry.schema import adapters

    def revive(connection: object, owner: repository.Owner, adapter: repository.AdapterRow) -> None:
        statement = adapters.update().where(repository._same(owner, adapter)).values(deleted_at=None)
        connection.execute(statement)  # type: ignore[attr-defined]

    monkeypatch.setattr("loraplex.registry.publishing.revive", revive)
    old: Principal = shared.principal("acme", bound_adapter="sup")
    shared.registry.adapters.delete(OPERATOR, "acme", "sup")
    shared.active("acme", "sup", seed=2)
    assert shared.registry.resolve(old, None, BASE) is not None


def test_a_database_of_the_revision_before_is_brought_up(tmp_path: Path) -> None:
    """Keys stay bound, grants of what lives stay, grants of what was deleted end."""
    from alembic import command
    from alembic.config import Config

    database = Database(None, tmp_path)
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    with database.write() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        for statement in (
            "INSERT INTO tenants VALUES ('t', 'acme', 1, NULL, 1), ('u', 'globex', 1, NULL, 1)",
            "INSERT INTO adapters VALUES ('a', 't', 'sup', 2, 1, NULL), ('b', 't', 'old', 2, 1, 5)",
            "INSERT INTO grants VALUES ('a', 'u', 't', 1, 'local'), ('b', 'u', 't', 1, 'local')",
            "INSERT INTO api_keys VALUES ('k', 't', 'h', 'tenant', 'a', 1, 'local', NULL, NULL)",
            "INSERT INTO api_keys VALUES ('l', 't', 'h', 'tenant', NULL, 1, 'local', NULL, NULL)",
        ):
            connection.execute(text(statement))
    database.migrate()
    with database.read() as connection:
        assert connection.execute(text("SELECT adapter_id, life FROM adapters")).all() == [("a", 1), ("b", 1)]
        keys = connection.execute(text("SELECT key_id, bound_life FROM api_keys ORDER BY key_id")).all()
        assert keys == [("k", 1), ("l", None)]
        assert connection.execute(text("SELECT adapter_id FROM grants")).scalars().all() == ["a"]
    database.close()
