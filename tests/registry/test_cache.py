"""The cache of tenants: when it asks, what it forgets, and what it does without a database."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from loraplex.registry import RegistryUnavailable, TenantId
from loraplex.registry.cache import MAX_STALE_S, POLL_EVERY_S, TenantCache
from loraplex.registry.database import Database

from .helpers import OPERATOR, Clock, World

A, B = TenantId("a"), TenantId("b")


class CountedDatabase:
    """A database that counts reads, and can be out of reach."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.reads = 0
        self.is_down = False

    @contextmanager
    def read(self) -> Iterator[object]:
        self.reads += 1
        if self.is_down:
            raise RegistryUnavailable("down")
        with self.database.read() as connection:
            yield connection


@pytest.fixture
def database(world: World) -> CountedDatabase:
    return CountedDatabase(world.registry._store.database)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(database: CountedDatabase, clock: Clock) -> TenantCache:
    return TenantCache(database, clock)  # type: ignore[arg-type]


def test_it_asks_at_intervals_and_after_a_change(cache: TenantCache, database: CountedDatabase, clock: Clock) -> None:
    for _ in range(5):
        cache.refresh()
    assert database.reads == 1
    clock.now += POLL_EVERY_S
    cache.refresh()
    assert database.reads == 2
    cache.expire()
    cache.refresh()
    cache.refresh()
    assert database.reads == 3


def test_it_forgets_only_the_tenants_that_changed(cache: TenantCache, world: World, clock: Clock) -> None:
    made = [world.registry.tenants.create(OPERATOR, name).tenant_id for name in ("one", "two")]
    epoch = cache.refresh()
    for tenant in made:
        cache.put(tenant, "key", "value", epoch)
    world.registry.tenants.disable(OPERATOR, "one")
    assert cache.get(made[0], "key") == "value"  # not asked yet
    clock.now += POLL_EVERY_S
    assert cache.refresh() > epoch
    assert [cache.get(tenant, "key") for tenant in made] == [None, "value"]


def test_a_value_read_before_a_change_is_not_kept(cache: TenantCache, world: World, clock: Clock) -> None:
    epoch = cache.refresh()
    world.registry.tenants.create(OPERATOR, "one")
    clock.now += POLL_EVERY_S
    cache.refresh()
    cache.put(A, "key", "stale", epoch)
    assert cache.get(A, "key") is None
    epoch = cache.refresh()
    cache.expire()
    cache.put(A, "key", "stale", epoch)
    assert cache.get(A, "key") is None


def test_it_does_without_the_database_for_a_while(cache: TenantCache, database: CountedDatabase, clock: Clock) -> None:
    cache.put(A, "key", "value", cache.refresh())
    database.is_down = True
    clock.now += MAX_STALE_S - 0.1
    cache.refresh()
    assert cache.get(A, "key") == "value"
    clock.now += 0.2
    with pytest.raises(RegistryUnavailable):
        cache.refresh()
    database.is_down = False
    cache.refresh()
    assert cache.get(A, "key") == "value"


def test_after_a_change_of_its_own_it_never_does_without(cache: TenantCache, database: CountedDatabase) -> None:
    cache.refresh()
    database.is_down = True
    cache.expire()
    with pytest.raises(RegistryUnavailable):
        cache.refresh()


def test_it_is_bounded(database: CountedDatabase, clock: Clock) -> None:
    cache = TenantCache(database, clock, max_entries=10)  # type: ignore[arg-type]
    epoch = cache.refresh()
    for tenant in range(5):
        for key in range(4):
            cache.put(TenantId(str(tenant)), key, "value", epoch)
    kept = [tenant for tenant in range(5) if cache.get(TenantId(str(tenant)), 3) is not None]
    assert kept == [3, 4]
    assert cache.get(B, 0) is None


def test_a_change_of_its_own_is_noted_without_asking(cache: TenantCache, database: CountedDatabase) -> None:
    epoch = cache.refresh()
    for tenant in (A, B):
        cache.put(tenant, "key", "value", epoch)
    cache.note(epoch + 1, [A])
    assert cache.refresh() == epoch + 1
    assert [cache.get(tenant, "key") for tenant in (A, B)] == [None, "value"]
    assert database.reads == 1
    cache.put(A, "key", "stale", epoch)  # read before the change
    assert cache.get(A, "key") is None


def test_a_change_with_others_between_makes_it_ask(cache: TenantCache, database: CountedDatabase) -> None:
    epoch = cache.refresh()
    cache.note(epoch + 2, [A])
    cache.refresh()
    assert database.reads == 2
    cache.note(epoch - 1, [A])  # long since seen
    cache.refresh()
    assert database.reads == 2


def test_an_answer_from_before_a_change_does_not_turn_it_back(
    cache: TenantCache, database: CountedDatabase, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache asks; before the answer is in, a change is noted."""
    epoch = cache.refresh()
    real = CountedDatabase.read

    @contextmanager
    def slow(self: CountedDatabase) -> Iterator[object]:
        with real(self) as connection:
            yield connection
        cache.note(epoch + 1, [A])

    monkeypatch.setattr(CountedDatabase, "read", slow)
    clock.now += POLL_EVERY_S
    assert cache.refresh() == epoch + 1
    cache.put(A, "key", "stale", epoch)
    assert cache.get(A, "key") is None
