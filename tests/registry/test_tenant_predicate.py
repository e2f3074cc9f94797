"""Every statement on a tenant's table names the tenant (RELIABILITY.md, 2.2), read from the statements that run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import ClauseElement, Delete, Insert, Select, Update, event, select, update
from sqlalchemy.sql import visitors
from sqlalchemy.sql.elements import BinaryExpression, BindParameter
from sqlalchemy.sql.operators import eq

from loraplex.registry import Role
from loraplex.registry.schema import TENANT_TABLES, adapters, tenants, versions

from .helpers import BASE, FAILED, OPERATOR, World

# Statements that span tenants on purpose say why.
CROSS_TENANT = {"authentication", "a stored file may belong to versions of several tenants"}


def tables_of(statement: ClauseElement) -> set[object]:
    return {element for element in visitors.iterate(statement) if element in TENANT_TABLES}


def names_the_tenant(statement: ClauseElement) -> bool:
    """True if some column `tenant_id` (`grantee_id` of a grant) of a tenant's table is compared with a value."""
    for element in visitors.iterate(statement):
        if isinstance(element, BinaryExpression) and element.operator is eq:
            sides = (element.left, element.right)
            columns = [side for side in sides if getattr(side, "table", None) in TENANT_TABLES]
            values = [side for side in sides if isinstance(side, BindParameter)]
            if values and any(column.name in ("tenant_id", "grantee_id") for column in columns):
                return True
    return False


def selects_in(statement: ClauseElement) -> list[ClauseElement]:
    return [part for part in visitors.iterate(statement) if isinstance(part, Select) and tables_of(part)]


def arms(statement: ClauseElement) -> list[ClauseElement]:
    """The parts that must each name the tenant: the innermost SELECTs, or the statement itself."""
    return [part for part in selects_in(statement) if selects_in(part) == [part]] or [statement]


def fault(statement: Any, options: Any) -> str | None:
    """Why a statement may not run, or None."""
    if not isinstance(statement, (Select, Update, Delete, Insert)) or not tables_of(statement):
        return None
    if options.get("cross_tenant") in CROSS_TENANT:
        return None
    if isinstance(statement, Insert):
        given = {getattr(column, "name", column) for column in (statement._values or {})}
        return None if "tenant_id" in given else f"an INSERT sets {sorted(given)}"
    bad = [str(arm) for arm in arms(statement) if not names_the_tenant(arm)]
    return f"no tenant in {bad}" if bad else None


@contextmanager
def watched(world: World) -> Iterator[tuple[list[str], list[str]]]:
    """(faults, statements on tenants' tables) of all that runs meanwhile."""
    faults: list[str] = []
    seen: list[str] = []

    def check(connection: Any, statement: Any, multi: Any, params: Any, execution_options: Any) -> None:
        options = {**getattr(statement, "get_execution_options", dict)(), **execution_options}
        if isinstance(statement, ClauseElement) and tables_of(statement):
            seen.append(str(statement))
        if (found := fault(statement, options)) is not None:
            faults.append(found)

    engine = world.registry._store.database.engine
    event.listen(engine, "before_execute", check)
    try:
        yield faults, seen
    finally:
        event.remove(engine, "before_execute", check)


def use_everything(world: World) -> None:
    """Every operation that has a statement of its own."""
    registry, adapters_ = world.registry, world.registry.adapters
    for tenant in ("acme", "globex"):
        world.tenant(tenant)
    world.active("acme", "sup", seed=1)
    world.active("acme", "sup", seed=2)
    world.publish("acme", "sup", seed=3)
    adapters_.rollback(OPERATOR, "acme", "sup", expected=2)
    adapters_.skip_verification(OPERATOR, "acme", "sup", 3)
    adapters_.record_verification(OPERATOR, "acme", "sup", 3, FAILED)
    adapters_.grant(OPERATOR, "acme", "sup", "globex")
    own, granted = world.principal("acme"), world.principal("globex", bound_adapter="acme/sup")
    admin = world.principal("acme", Role.TENANT_ADMIN)
    for caller, model in ((own, "sup"), (own, "sup@2"), (granted, None)):
        registry.resolve(caller, model, BASE)
        registry.list_models(caller, BASE)
    adapters_.list(admin, "acme")
    adapters_.show(admin, "acme", "sup")
    registry.keys.list(admin, "acme")
    registry.keys.revoke(admin, "acme", own.key_id)
    registry.audit_entries(admin, "acme")
    registry.verify_audit(OPERATOR)
    adapters_.delete_version(admin, "acme", "sup", 3)
    adapters_.revoke_grant(OPERATOR, "acme", "sup", "globex")
    adapters_.delete(admin, "acme", "sup")
    registry.sweep(older_than_s=-5)


def test_every_statement_names_the_tenant(world: World) -> None:
    with watched(world) as (faults, seen):
        use_everything(world)
    assert faults == []
    used = {table.name for table in TENANT_TABLES if any(table.name in statement for statement in seen)}
    assert used == {table.name for table in TENANT_TABLES}  # the floor: all tables were used
    assert len(set(seen)) >= 35


def test_a_statement_without_the_tenant_is_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: the predicate taken out of one function."""
    from loraplex.registry import repository

    real = repository._versions

    def versions_of(owner: object, adapter: repository.AdapterRow) -> object:
        return select(versions).where(versions.c.adapter_id == adapter.adapter_id)

    monkeypatch.setattr(repository, "_versions", versions_of)
    with watched(world) as (faults, _):
        world.tenant("acme")
        world.publish("acme", "sup")
    assert faults
    assert real is not versions_of


@pytest.mark.parametrize(
    "statement",
    [
        select(adapters),
        select(adapters).where(adapters.c.name == "x"),
        select(adapters).where(adapters.c.tenant_id == versions.c.tenant_id),
        select(adapters).where(tenants.c.tenant_id == "x"),
        update(versions).values(state="x").where(versions.c.number == 1),
        versions.delete(),
        adapters.insert().values(name="x"),
        select(adapters).where(adapters.c.tenant_id == "x").union_all(select(adapters)).subquery().select(),
    ],
    ids=lambda statement: type(statement).__name__,
)
def test_the_check_finds(statement: Any) -> None:
    assert fault(statement, {}) is not None


@pytest.mark.parametrize(
    "statement",
    [
        select(tenants),
        select(adapters).where(adapters.c.tenant_id == "x"),
        update(versions).values(state="x").where(versions.c.tenant_id == "x"),
        adapters.insert().values(name="x", tenant_id="y"),
    ],
    ids=lambda statement: type(statement).__name__,
)
def test_the_check_lets_pass(statement: Any) -> None:
    assert fault(statement, {}) is None
