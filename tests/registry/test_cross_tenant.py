"""Nobody reaches what is another's (RELIABILITY.md, T09): callers, owners, adapters, operations and forms of a name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from loraplex.core import AdapterRefused, LoraplexError, ModelNotFound
from loraplex.registry import NotInMemory, PermissionDenied, Principal, Role, TenantNotFound, access, resolver

from .helpers import BASE, OPERATOR, PASSED, World, adapter_dir, bad_adapter_dir

TENANTS = ("acme", "globex", "hooli", "initech", "umbrella")
ADAPTERS = ("one", "two", "three")
ABSENT = "absent"  # a tenant and an adapter that do not exist


@dataclass(frozen=True)
class Target:
    """What an operation is tried on."""

    tenant: str
    adapter: str
    key_id: str
    directory: Path


Operation = Callable[[World, Principal, Target], object]

ADMIN_OPERATIONS: dict[str, Operation] = {
    "keys.list": lambda w, p, t: w.registry.keys.list(p, t.tenant),
    "keys.create": lambda w, p, t: w.registry.keys.create(p, t.tenant, Role.TENANT),
    "keys.create bound": lambda w, p, t: w.registry.keys.create(p, t.tenant, Role.TENANT, bound_adapter=t.adapter),
    "keys.revoke": lambda w, p, t: w.registry.keys.revoke(p, t.tenant, t.key_id),
    "publish": lambda w, p, t: w.registry.publish(p, t.tenant, t.adapter, t.directory, BASE, base_unverified=True),
    "adapters.list": lambda w, p, t: w.registry.adapters.list(p, t.tenant),
    "adapters.show": lambda w, p, t: w.registry.adapters.show(p, t.tenant, t.adapter),
    "adapters.version": lambda w, p, t: w.registry.adapters.version(p, t.tenant, t.adapter, 1),
    "adapters.activate": lambda w, p, t: w.registry.adapters.activate(p, t.tenant, t.adapter, 2, expected=1),
    "adapters.rollback": lambda w, p, t: w.registry.adapters.rollback(p, t.tenant, t.adapter, expected=2),
    "adapters.delete_version": lambda w, p, t: w.registry.adapters.delete_version(p, t.tenant, t.adapter, 2),
    "adapters.delete": lambda w, p, t: w.registry.adapters.delete(p, t.tenant, t.adapter),
    "verify_audit": lambda w, p, t: w.registry.verify_audit(p, t.tenant),
    "audit_entries": lambda w, p, t: w.registry.audit_entries(p, t.tenant),
}
OPERATOR_OPERATIONS: dict[str, Operation] = {
    "tenants.create": lambda w, p, t: w.registry.tenants.create(p, "new"),
    "tenants.list": lambda w, p, t: w.registry.tenants.list(p),
    "tenants.disable": lambda w, p, t: w.registry.tenants.disable(p, t.tenant),
    "tenants.enable": lambda w, p, t: w.registry.tenants.enable(p, t.tenant),
    "adapters.record_verification": lambda w, p, t: w.registry.adapters.record_verification(
        p, t.tenant, t.adapter, 1, PASSED
    ),
    "adapters.skip_verification": lambda w, p, t: w.registry.adapters.skip_verification(p, t.tenant, t.adapter, 1),
    "adapters.grant": lambda w, p, t: w.registry.adapters.grant(p, t.tenant, t.adapter, "acme"),
    "adapters.revoke_grant": lambda w, p, t: w.registry.adapters.revoke_grant(p, t.tenant, t.adapter, "acme"),
    "verify_audit of all": lambda w, p, t: w.registry.verify_audit(p),
}


@pytest.fixture
def filled(world: World) -> World:
    """Five tenants with three adapters each, of two verified versions, the first active."""
    for tenant in TENANTS:
        world.tenant(tenant)
        for adapter in ADAPTERS:
            world.active(tenant, adapter, seed=1)
            world.verified(tenant, adapter, seed=2)
    return world


def targets(world: World, tenant: str) -> Iterator[Target]:
    key_id = world.principal(tenant).key_id if tenant != ABSENT else "a" * 12
    for adapter in ADAPTERS:
        yield Target(tenant, adapter, key_id, adapter_dir(world.folder, 1))


def outcome(call: Callable[[], object], hide: str) -> tuple[str, str, str] | None:
    """What a caller learns from a failure, without the name that it gave itself; None for a success."""
    try:
        call()
    except LoraplexError as error:
        return type(error).__name__, error.code, error.message.replace(hide, "*")
    return None


def answer_to(world: World, operation: Operation, caller: Principal, target: Target) -> tuple[str, str, str] | None:
    return outcome(lambda: operation(world, caller, target), target.tenant)


def snapshot(world: World) -> object:
    """Everything that an operation could change."""
    with world.registry._store.database.read() as connection:
        from loraplex.registry.schema import metadata

        return {
            name: sorted(map(tuple, connection.execute(table.select())), key=repr)
            for name, table in metadata.tables.items()
        }


def test_admins_of_others_meet_nothing(filled: World) -> None:
    """Callers x owners x adapters x operations; the answer is that to a tenant which does not exist."""
    callers = {tenant: filled.principal(tenant, Role.TENANT_ADMIN) for tenant in TENANTS}
    things = {tenant: list(targets(filled, tenant)) for tenant in (*TENANTS, ABSENT)}
    before, denied = snapshot(filled), 0
    for caller in callers.values():
        for name, operation in ADMIN_OPERATIONS.items():
            nothing = [answer_to(filled, operation, caller, target) for target in things[ABSENT]]
            assert {answer[0] if answer else None for answer in nothing} == {"TenantNotFound"}
            for owner in TENANTS:
                if owner != caller.tenant:
                    answers = [answer_to(filled, operation, caller, target) for target in things[owner]]
                    assert answers == nothing, (caller.tenant, owner, name)
                    denied += len(answers)
    assert denied == 5 * 4 * 3 * len(ADMIN_OPERATIONS)
    assert snapshot(filled) == before


def test_admins_may_do_all_of_it_to_their_own(filled: World) -> None:
    """The positive control: without it, refusing everything would pass."""
    for tenant in TENANTS:
        caller = filled.principal(tenant, Role.TENANT_ADMIN)
        for target in targets(filled, tenant):
            for name, operation in ADMIN_OPERATIONS.items():
                if name != "keys.revoke" or target.adapter == ADAPTERS[0]:
                    assert operation(filled, caller, target) is not False, name


@pytest.mark.parametrize("role", [Role.TENANT, Role.TENANT_ADMIN])
def test_roles_bound_what_a_key_may_do_to_its_own_tenant(filled: World, role: Role) -> None:
    caller = filled.principal("acme", role)
    operations = dict(OPERATOR_OPERATIONS) if role is Role.TENANT_ADMIN else {**ADMIN_OPERATIONS, **OPERATOR_OPERATIONS}
    before = snapshot(filled)
    for tenant in ("acme", "globex", ABSENT):
        for target in targets(filled, tenant) if tenant == "acme" else [Target(tenant, "one", "a" * 12, filled.folder)]:
            for name, operation in operations.items():
                with pytest.raises(PermissionDenied):
                    operation(filled, caller, target)
                assert name
    after = snapshot(filled)
    before_keys, after_keys = (state.pop("api_keys") for state in (before, after))  # type: ignore[attr-defined]
    assert len(after_keys) == len(before_keys) + len(ADAPTERS[:1])  # the target's own key
    for state in (before, after):
        for table in ("audit_log", "epoch", "tenants"):
            state.pop(table)  # type: ignore[attr-defined]
    assert before == after


FORMS = ("{tenant}/{adapter}", "{tenant}/{adapter}@1", "{tenant}/{adapter}@2", "{tenant}/{adapter}@7")


def count_leaks(world: World) -> int:
    """How often a caller learns of another's adapter by its name, over all callers, owners, adapters and forms."""
    leaks = tried = 0
    for tenant in TENANTS:
        caller = world.principal(tenant, Role.TENANT)
        for form in FORMS:
            nothing = form.format(tenant=ABSENT, adapter=ABSENT)
            expected = outcome(lambda: world.registry.resolve(caller, nothing, BASE), nothing)  # noqa: B023
            for owner in set(TENANTS) - {tenant}:
                for adapter in ADAPTERS:
                    model = form.format(tenant=owner, adapter=adapter)
                    got = outcome(lambda: world.registry.resolve(caller, model, BASE), model)  # noqa: B023
                    leaks += got != expected
                    tried += 1
    assert tried == 5 * 4 * 3 * len(FORMS)
    return leaks


def test_models_of_others_look_exactly_like_none(filled: World) -> None:
    assert count_leaks(filled) == 0
    for tenant in TENANTS:
        caller = filled.principal(tenant)
        mine = {model.ref.name for model in filled.registry.list_models(caller, BASE).models}
        assert mine == set(ADAPTERS)
        for adapter in ADAPTERS:  # the positive control
            for form in (*FORMS[:3], "{adapter}", "{adapter}@2"):
                found = filled.registry.resolve(caller, form.format(tenant=tenant, adapter=adapter), BASE)
                assert found is not None
                assert found.tenant == tenant


def test_without_the_check_of_grants_others_are_reached(filled: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the test above."""
    ids = {tenant.name: tenant.tenant_id for tenant in filled.registry.tenants.list(OPERATOR)}

    def granter(self: object, principal: Principal, model: str, address: object, epoch: int) -> object:
        tenant = address.tenant  # type: ignore[attr-defined]
        if tenant not in ids:
            raise ModelNotFound(model)
        return ids[tenant]

    monkeypatch.setattr(resolver.Resolver, "_granter", granter)
    assert count_leaks(filled) > 0


def test_without_the_check_of_tenants_admins_reach_others(filled: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: `find_tenant` is what keeps admins apart."""
    caller = filled.principal("acme", Role.TENANT_ADMIN)
    with pytest.raises(TenantNotFound):
        filled.registry.adapters.show(caller, "globex", "one")
    real = access.find_tenant
    monkeypatch.setattr(access, "find_tenant", lambda connection, principal, name: real(connection, OPERATOR, name))
    assert filled.registry.adapters.show(caller, "globex", "one").versions


def test_an_operator_manages_all_but_calls_only_what_is_its_own(filled: World) -> None:
    operator = filled.principal("acme", Role.OPERATOR)
    assert len(filled.registry.adapters.list(operator, "globex")) == 3
    with pytest.raises(ModelNotFound):
        filled.registry.resolve(operator, "globex/one", BASE)
    assert filled.registry.resolve(operator, "one", BASE) is not None


def test_a_grant_opens_one_adapter_to_one_tenant(filled: World) -> None:
    filled.registry.adapters.grant(OPERATOR, "globex", "one", "acme")
    for tenant in TENANTS:
        caller = filled.principal(tenant)
        for owner in set(TENANTS) - {tenant}:
            for adapter in ADAPTERS:
                got = outcome(lambda: filled.registry.resolve(caller, f"{owner}/{adapter}", BASE), "")  # noqa: B023
                assert (got is None) == ((tenant, owner, adapter) == ("acme", "globex", "one"))
    admin = filled.principal("acme", Role.TENANT_ADMIN)
    for operation in ADMIN_OPERATIONS.values():  # a grant lets call, not manage
        with pytest.raises(TenantNotFound):
            operation(filled, admin, Target("globex", "one", "a" * 12, filled.folder))


@pytest.fixture
def bound(filled: World) -> World:
    """acme also has an adapter in each state; globex's `one` and `two` are granted to acme, acme's `one` to globex."""
    adapters = filled.registry.adapters
    filled.verified("acme", "idle", seed=1)
    filled.publish("acme", "unverified", seed=1)
    with pytest.raises(AdapterRefused):
        filled.registry.publish(
            OPERATOR, "acme", "refused", bad_adapter_dir(filled.folder), BASE, base_fingerprint=BASE.fingerprint
        )
    filled.active("acme", "deleted", seed=1)
    adapters.delete(OPERATOR, "acme", "deleted")
    for owner, adapter, grantee in (("globex", "one", "acme"), ("globex", "two", "acme"), ("acme", "one", "globex")):
        adapters.grant(OPERATOR, owner, adapter, grantee)
    return filled


def spellings(tenant: str, adapter: str, caller: str) -> list[str]:
    """Every way in which a caller can write an adapter, with and without versions that exist."""
    paths = [f"{tenant}/{adapter}", *([adapter] if tenant == caller else [])]
    return [path + version for path in paths for version in ("", "@1", "@2", "@7")]


def recalled(world: World, caller: Principal, model: str) -> tuple[str, str, str] | None:
    """`outcome` from memory; that memory does not know is an answer too."""
    try:
        return outcome(lambda: world.registry.recall_version(caller, model, BASE), model)
    except NotInMemory:
        return "NotInMemory", "", ""


def bound_leaks(world: World, caller: Principal, mine: tuple[str, str]) -> list[str]:
    """Models besides its own of which a bound key learns more than that there is nothing."""
    registry, leaks, tried = world.registry, [], 0
    nothing = outcome(lambda: registry.resolve(caller, ABSENT, BASE), ABSENT)
    assert nothing is not None
    assert nothing[:2] == ("ModelNotFound", "model_not_found")
    places = [(tenant, adapter) for tenant in TENANTS for adapter in ADAPTERS]
    places += [("acme", state) for state in ("idle", "unverified", "refused", "deleted")]
    models = [model for place in places if place != mine for model in spellings(*place, caller.tenant)]
    for model in [*models, BASE.name, f"{ABSENT}/{ABSENT}"]:
        answers = [
            outcome(lambda: registry.resolve(caller, model, BASE), model),  # noqa: B023
            recalled(world, caller, model),
        ]
        leaks += [model] if answers != [nothing, nothing] else []
        tried += 1
    assert tried >= 4 * 14
    return leaks


BINDINGS = [  # key of, bound to, owner and adapter
    ("acme", "one", ("acme", "one")),
    ("acme", "acme/one", ("acme", "one")),
    ("acme", "globex/one", ("globex", "one")),
    ("globex", "acme/one", ("acme", "one")),
    ("hooli", "three", ("hooli", "three")),
]


@pytest.mark.parametrize(("tenant", "binding", "mine"), BINDINGS)
def test_a_bound_key_meets_nothing_but_its_adapter(
    bound: World, tenant: str, binding: str, mine: tuple[str, str]
) -> None:
    """Callers x adapters in every state x spellings, from the database and from memory: all exactly as absent."""
    open_key = bound.principal(tenant)  # warms the memory with all that the tenant may call
    for model in (*ADAPTERS, "globex/two", "acme/one", "idle@1"):
        outcome(lambda: bound.registry.resolve(open_key, model, BASE), "")  # noqa: B023
    caller = bound.principal(tenant, bound_adapter=binding)
    own = mine[1] if mine[0] == tenant else "/".join(mine)
    assert caller.bound_adapter == own
    assert bound_leaks(bound, caller, mine) == []
    allowed = [None, *(model for model in spellings(*mine, tenant) if not model.endswith("@7"))]
    for model in allowed:  # the positive control: its own, in all spellings
        found = bound.registry.resolve(caller, model, BASE)
        assert found is not None
        assert (found.tenant, found.ref.name) == (mine[0], own)
    assert [model.ref.name for model in bound.registry.list_models(caller, BASE).models] == [own]
    before = snapshot(bound)
    for target in [*targets_of(bound, tenant), *targets_of(bound, mine[0])]:
        for operation in {**ADMIN_OPERATIONS, **OPERATOR_OPERATIONS}.values():
            with pytest.raises(PermissionDenied):
                operation(bound, caller, target)
    assert snapshot(bound) == before


def targets_of(world: World, tenant: str) -> list[Target]:
    return [Target(tenant, adapter, "a" * 12, adapter_dir(world.folder, 1)) for adapter in ADAPTERS]


def test_states_are_told_to_a_key_that_is_not_bound(bound: World) -> None:
    """The floor of the test above: there is something to tell."""
    caller = bound.principal("acme")
    models = ("idle", "unverified@1", "refused@1", "deleted", "globex/one")
    answers = [outcome(lambda: bound.registry.resolve(caller, model, BASE), model) for model in models]  # noqa: B023
    told = [answer[0] if answer is not None else None for answer in answers]
    assert told == ["AdapterNotActive", "AdapterNotVerified", "AdapterNotVerified", "AdapterDeleted", None]


def test_a_binding_that_is_looked_at_last_tells_states(bound: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: without the comparison of addresses before the look-up."""
    caller = bound.principal("acme", bound_adapter="one")
    monkeypatch.setattr(resolver, "_place", lambda principal, address: ())
    assert set(bound_leaks(bound, caller, ("acme", "one"))) >= {"idle", "deleted", "acme/unverified@1", "globex/two"}
