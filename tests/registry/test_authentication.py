"""From a key to a caller (RELIABILITY.md, T09, T10): every state of a key, one answer, the same time."""

import hmac
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import event

from loraplex.core import InvalidRequest, ModelNotFound
from loraplex.registry import PermissionDenied, Principal, Role, Unauthenticated, authentication
from loraplex.registry.keys import ApiKey, KeyId, new_key

from .helpers import OPERATOR, Clock, MakeWorld, World


def with_checksum(body: str) -> str:
    from loraplex.registry.keys import _checksum

    return body + _checksum(body)


def wrong_secret(key: str, position: int) -> str:
    """The key with one character of its secret changed and a right checksum."""
    start = key.rindex("_") + 1
    at = start + position
    return with_checksum(key[:at] + ("A" if key[at] != "A" else "B") + key[at + 1 : -6])


def unknown_id(key: str) -> str:
    other = new_key().reveal()
    return with_checksum(other[: other.rindex("_")] + key[key.rindex("_") : -6])


def refused(world: World, key: str) -> Unauthenticated:
    with pytest.raises(Unauthenticated) as caught:
        world.registry.authenticate(key)
    return caught.value


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def acme(make_world: MakeWorld, clock: Clock) -> World:
    world = make_world(clock=clock)
    world.tenant("acme")
    return world


def test_every_bad_key_gets_the_same_answer(acme: World, clock: Clock) -> None:
    acme.tenant("off")
    good, expiring, of_disabled = acme.key("acme"), acme.key("acme", expires_at=clock.now + 10), acme.key("off")
    for key in (good, expiring, of_disabled):
        acme.registry.authenticate(key)  # they are known, and in memory
    revoked = acme.key("acme")
    principal = acme.registry.authenticate(revoked)
    acme.registry.keys.revoke(OPERATOR, "acme", principal.key_id)
    acme.registry.tenants.disable(OPERATOR, "off")
    clock.now += 10
    bad = {
        "none": "",
        "malformed": "Bearer x",
        "bad checksum": good[:-1] + ("A" if good[-1] != "A" else "B"),
        "unknown id": unknown_id(good),
        "wrong secret, first": wrong_secret(good, 0),
        "wrong secret, last": wrong_secret(good, 31),
        "revoked": revoked,
        "expired": expiring,
        "disabled tenant": of_disabled,
        "not ascii": "é" * len(good),
        "lone surrogate": "\ud800" * len(good),
        "too long": good + "A" * 10_000,
    }
    answers = {name: refused(acme, key) for name, key in bad.items()}
    assert {(str(error), error.code, error.args, error.__cause__) for error in answers.values()} == {
        ("A valid API key is required.", "invalid_api_key", ("A valid API key is required.",), None)
    }
    assert len(answers) == 12
    assert acme.registry.authenticate(good).tenant == "acme"  # the floor: a good one is let in


def test_a_key_of_one_tenant_never_becomes_another(acme: World) -> None:
    """Keys that share their first characters, as a cache by prefix would confuse (CVE-2026-35030)."""
    acme.tenant("globex")
    keys = {tenant: acme.key(tenant) for tenant in ("acme", "globex")}
    for tenant, key in keys.items():
        assert acme.registry.authenticate(key).tenant == tenant
        for length in (20, 21, 22, 40, 53):
            other = keys["globex" if tenant == "acme" else "acme"]
            refused(acme, with_checksum(key[:length] + other[length:-6]))
        assert acme.registry.authenticate(key).tenant == tenant


def test_a_principal_says_who_calls(acme: World, clock: Clock) -> None:
    key = acme.key("acme", Role.TENANT_ADMIN, expires_at=clock.now + 5)
    principal = acme.registry.authenticate(key)
    assert (principal.tenant, principal.role, principal.bound_adapter) == ("acme", Role.TENANT_ADMIN, None)
    assert principal.expires_at == clock.now + 5
    assert key.split("_")[2] == principal.key_id


def test_revoking_counts_at_once(acme: World) -> None:
    for _ in range(20):
        key = acme.key("acme")
        principal = acme.registry.authenticate(key)
        assert acme.registry.authenticate(key) == principal
        acme.registry.keys.revoke(OPERATOR, "acme", principal.key_id)
        refused(acme, key)


def test_without_the_epoch_a_revoked_key_would_live_on(acme: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the test above: the cache must be told."""
    key = acme.key("acme")
    principal = acme.registry.authenticate(key)
    monkeypatch.setattr(type(acme.registry._store.cache), "note", lambda self, epoch, changed: None)
    monkeypatch.setattr("loraplex.registry.cache.POLL_EVERY_S", math.inf)
    acme.registry.keys.revoke(OPERATOR, "acme", principal.key_id)
    assert acme.registry.authenticate(key) == principal


def test_expiry_counts_to_the_second_also_from_memory(acme: World, clock: Clock) -> None:
    key = acme.key("acme", expires_at=clock.now + 2)
    acme.registry.authenticate(key)
    clock.now += 1.999
    acme.registry.authenticate(key)
    clock.now += 0.001
    refused(acme, key)


# ---------------------------------------------------------------------- what junk costs
@pytest.fixture
def queries(acme: World) -> Iterator[list[str]]:
    """The statements that run."""
    seen: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        seen.append(statement)

    engine = acme.registry._store.database.engine
    event.listen(engine, "before_cursor_execute", note)
    yield seen
    event.remove(engine, "before_cursor_execute", note)


def test_junk_never_reaches_the_database_and_sql_is_only_data(acme: World, queries: list[str]) -> None:
    good = acme.key("acme")
    queries.clear()
    for junk in ("' OR 1=1 --", good.replace("_", "'", 1), good + "'", "x" * 60, good[:-1] + "!"):
        refused(acme, junk)
    assert queries == []
    refused(acme, unknown_id(good))
    assert sum("api_keys" in query for query in queries) == 1
    assert all(good[-20:] not in query for query in queries)


def test_a_wrong_secret_and_an_unknown_id_do_the_same_work(
    acme: World, queries: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = acme.key("acme")
    acme.registry.authenticate(good)
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def compare(a: str, b: str) -> bool:
        compared.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr("loraplex.registry.authentication.hmac.compare_digest", compare)
    work = []
    for bad in (wrong_secret(good, 0), wrong_secret(good, 31), unknown_id(good)):
        queries.clear()
        compared.clear()
        refused(acme, bad)
        work.append((list(queries), list(compared)))
    assert work[0][1] == [(64, 64)]
    assert [statement for statement in work[0][0] if "api_keys" in statement]
    assert work[0] == work[1] == work[2]


# ---------------------------------------------------------------------- T10
def welch_t(first: list[float], second: list[float]) -> float:
    """Welch's t of the lower half of each: what else the machine does makes only the upper half."""
    a, b = (sorted(values)[: len(values) // 2] for values in (first, second))
    spread = math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))
    return (statistics.fmean(a) - statistics.fmean(b)) / spread


def timing(world: World, keys: tuple[str, str], samples: int) -> float:
    """t of the times that two bad keys take, taken in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * samples):
        which = number % 2 if number % 4 < 2 else 1 - number % 2
        start = time.perf_counter()
        try:
            world.registry.authenticate(keys[which])
        except Unauthenticated:
            times[which].append(time.perf_counter() - start)
    assert min(map(len, times)) == samples
    return welch_t(*times)


def can_be_told_apart(world: World, keys: tuple[str, str]) -> bool:
    """True if the times differ in each of a few tries: a real difference always shows, a busy neighbour does not."""
    return all(abs(timing(world, keys, 500)) >= 4.5 for _ in range(8))


def test_the_fault_does_not_show_in_the_time(acme: World) -> None:
    good = acme.key("acme")
    assert not can_be_told_apart(acme, (wrong_secret(good, 0), wrong_secret(good, 31)))
    assert not can_be_told_apart(acme, (wrong_secret(good, 0), unknown_id(good)))


def test_an_early_exit_for_unknown_ids_shows(acme: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: refusing an unknown id without the query is what the measurement finds."""
    good = acme.key("acme")
    known = KeyId(good.split("_")[2])
    real: Callable[..., Principal] = authentication.Authenticator._look_up

    def look_up(self: Any, key: ApiKey, digest: bytes) -> Principal:
        if key.key_id != known:
            raise Unauthenticated
        return real(self, key, digest)

    monkeypatch.setattr(authentication.Authenticator, "_look_up", look_up)
    assert can_be_told_apart(acme, (wrong_secret(good, 0), unknown_id(good)))


# ---------------------------------------------------------------------- scope of new keys
ROLES = (Role.TENANT, Role.TENANT_ADMIN, Role.OPERATOR)


@pytest.mark.parametrize("creator", ROLES)
@pytest.mark.parametrize("child", ROLES)
def test_a_key_never_makes_a_wider_one(acme: World, creator: Role, child: Role) -> None:
    principal = acme.principal("acme", creator)
    if creator is not Role.TENANT and ROLES.index(child) <= ROLES.index(creator):
        made = acme.registry.keys.create(principal, "acme", child)
        assert made.info.created_by == principal.key_id
        assert acme.registry.authenticate(made.key.reveal()).role is child
    else:
        before = acme.registry.keys.list(OPERATOR, "acme")
        with pytest.raises(PermissionDenied):
            acme.registry.keys.create(principal, "acme", child)
        assert acme.registry.keys.list(OPERATOR, "acme") == before


def test_a_key_never_makes_one_that_outlives_it(acme: World, clock: Clock) -> None:
    principal = acme.principal("acme", Role.TENANT_ADMIN, expires_at=clock.now + 100)
    for expires_at in (None, clock.now + 101):
        with pytest.raises(PermissionDenied, match="end no later"):
            acme.registry.keys.create(principal, "acme", Role.TENANT, expires_at=expires_at)
    acme.registry.keys.create(principal, "acme", Role.TENANT, expires_at=clock.now + 100)


def test_bindings_and_expiry_are_checked(acme: World, clock: Clock) -> None:
    acme.tenant("globex")
    acme.publish("acme", "sup")
    keys = acme.registry.keys
    with pytest.raises(InvalidRequest, match="role tenant"):
        keys.create(OPERATOR, "acme", Role.TENANT_ADMIN, bound_adapter="sup")
    with pytest.raises(InvalidRequest, match="not to a version"):
        keys.create(OPERATOR, "acme", Role.TENANT, bound_adapter="sup@1")
    for bound in ("nothing", "globex/sup", "../sup"):
        with pytest.raises(ModelNotFound):
            keys.create(OPERATOR, "acme", Role.TENANT, bound_adapter=bound)
    with pytest.raises(ModelNotFound):
        keys.create(OPERATOR, "globex", Role.TENANT, bound_adapter="acme/sup")
    for expires_at in (clock.now, clock.now - 1, math.nan, math.inf):
        with pytest.raises(InvalidRequest, match="expires_at"):
            keys.create(OPERATOR, "acme", Role.TENANT, expires_at=expires_at)
