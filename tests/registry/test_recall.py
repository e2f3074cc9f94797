"""What memory alone can tell: the same as the database, or that it cannot tell."""

from collections.abc import Callable

import pytest

from loraplex.core import InvalidRequest, LoraplexError, ModelNotFound
from loraplex.registry import NotInMemory, Principal, Role, Unauthenticated
from loraplex.registry.database import Database

from .helpers import BASE, OPERATOR, Clock, MakeWorld, World


@pytest.fixture
def no_database(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, whoever asks the database fails the test."""

    def forbid() -> None:
        def read(self: Database) -> None:
            raise AssertionError("the database was asked")

        monkeypatch.setattr(Database, "read", read)

    return forbid


def resolve_all(world: World, principal: Principal) -> None:
    for model in ("one", "one@1", "acme/one", "globex/two", "globex/two@1"):
        world.registry.resolve(principal, model, BASE)


@pytest.fixture
def filled(world: World) -> World:
    world.tenant("acme")
    world.tenant("globex")
    world.active("acme", "one", 1)
    world.active("globex", "two", 2)
    world.registry.adapters.grant(OPERATOR, "globex", "two", "acme")
    return world


def test_what_was_asked_for_a_moment_ago_needs_no_database(filled: World, no_database: Callable[[], None]) -> None:
    registry, key = filled.registry, filled.key("acme")
    principal = registry.authenticate(key)
    known = {model: registry.resolve(principal, model, BASE) for model in ("one", "one@1", "acme/one", "globex/two")}
    filled.registry._store.cache.refresh()
    no_database()
    assert registry.recall_principal(key) == principal
    for model, version in known.items():
        assert registry.recall_version(principal, model, BASE) == version
    assert registry.recall_version(principal, BASE.name, BASE) is None


def test_what_was_never_asked_for_is_not_in_memory(filled: World, no_database: Callable[[], None]) -> None:
    registry, key = filled.registry, filled.key("acme")
    principal = registry.authenticate(filled.key("acme"))
    registry._store.cache.refresh()
    no_database()
    with pytest.raises(NotInMemory):
        registry.recall_principal(key)
    for model in ("one", "one@1", "globex/two", "hooli/none", "none"):
        with pytest.raises(NotInMemory):
            registry.recall_version(principal, model, BASE)


def test_what_needs_no_database_is_refused_without_it(filled: World, no_database: Callable[[], None]) -> None:
    registry = filled.registry
    principal = registry.authenticate(filled.key("acme"))
    no_database()
    for junk in ("", "sk-0123456789", filled_key_with_bad_checksum()):
        with pytest.raises(Unauthenticated):
            registry.recall_principal(junk)
    with pytest.raises(ModelNotFound):
        registry.recall_version(principal, "no such name", BASE)
    with pytest.raises(InvalidRequest):
        registry.recall_version(principal, None, BASE)


def filled_key_with_bad_checksum() -> str:
    return "lpx_live_" + "a" * 12 + "_" + "0" * 38


def test_memory_that_may_be_old_does_not_tell(filled: World, monkeypatch: pytest.MonkeyPatch) -> None:
    registry, key = filled.registry, filled.key("acme")
    principal = registry.authenticate(key)
    resolve_all(filled, principal)
    cache = registry._store.cache
    now = cache._now()
    monkeypatch.setattr(cache, "_now", lambda: now + 0.3)
    for call in (lambda: registry.recall_principal(key), lambda: registry.recall_version(principal, "one", BASE)):
        with pytest.raises(NotInMemory):
            call()


@pytest.mark.parametrize("change", ["revoke", "disable", "activate", "rollback", "delete", "ungrant", "off"])
def test_memory_never_contradicts_what_this_process_changed(filled: World, change: str) -> None:
    """After each change, memory gives what the database gives, or does not tell."""
    registry, key = filled.registry, filled.key("acme")
    principal = registry.authenticate(key)
    filled.verified("acme", "one", 3)
    resolve_all(filled, principal)
    adapters = registry.adapters
    changes: dict[str, Callable[[], object]] = {
        "revoke": lambda: registry.keys.revoke(OPERATOR, "acme", principal.key_id),
        "disable": lambda: registry.tenants.disable(OPERATOR, "globex"),
        "activate": lambda: adapters.activate(OPERATOR, "acme", "one", 2, expected=1),
        "rollback": lambda: (
            adapters.activate(OPERATOR, "acme", "one", 2, expected=1),
            adapters.rollback(OPERATOR, "acme", "one", expected=2),
        ),
        "delete": lambda: adapters.delete(OPERATOR, "acme", "one"),
        "ungrant": lambda: adapters.revoke_grant(OPERATOR, "globex", "two", "acme"),
        "off": lambda: filled.registry.tenants.disable(OPERATOR, "acme"),
    }
    changes[change]()

    def outcome(call: Callable[[], object]) -> object:
        try:
            return call()
        except LoraplexError as error:
            return type(error)

    for _ in range(2):
        for model in ("one", "one@1", "acme/one", "globex/two", "globex/two@1"):
            try:
                told = outcome(lambda: registry.recall_version(principal, model, BASE))  # noqa: B023
            except NotInMemory:
                continue
            assert told == outcome(lambda: registry.resolve(principal, model, BASE))  # noqa: B023
        try:
            told = outcome(lambda: registry.recall_principal(key))
        except NotInMemory:
            pass
        else:
            assert told == outcome(lambda: registry.authenticate(key))
        outcome(lambda: registry.authenticate(key))
        for model in ("one", "one@1", "acme/one", "globex/two", "globex/two@1"):
            outcome(lambda: registry.resolve(principal, model, BASE))  # noqa: B023


def test_a_key_that_has_expired_is_refused_from_memory(make_world: MakeWorld) -> None:
    clock = Clock()
    world = make_world(clock=clock)
    world.tenant("acme")
    key = world.key("acme", Role.TENANT, expires_at=clock.now + 10)
    world.registry.authenticate(key)
    assert world.registry.recall_principal(key).tenant == "acme"
    clock.now += 10
    with pytest.raises(Unauthenticated):
        world.registry.recall_principal(key)
