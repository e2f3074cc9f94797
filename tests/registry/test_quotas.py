"""How much one tenant may keep: every limit is named, and refused before anything is kept."""

import pytest

from loraplex.core import ConfigError
from loraplex.registry import RegistryLimitReached, RegistryLimits, VersionState, publishing

from .helpers import FAILED, OPERATOR, PASSED, MakeWorld, World, adapter_dir


def num_bytes(world: World, *seeds: int) -> int:
    """Bytes of the distinct files of these adapters; all have one config."""
    weights = [adapter_dir(world.folder, seed) / "adapter_model.safetensors" for seed in seeds]
    config = adapter_dir(world.folder, seeds[0]) / "adapter_config.json"
    return sum(path.stat().st_size for path in (config, *weights))


def stored(world: World) -> int:
    return sum(1 for _ in world.registry._blobs.list())


def test_counts_are_limited(make_world: MakeWorld) -> None:
    world = make_world({"limits": RegistryLimits(max_keys=2, max_adapters=1, max_versions=2)})
    world.tenant("acme")
    world.key("acme")
    with pytest.raises(RegistryLimitReached, match=r"2 live keys; the limit is 2 \(max_keys\)"):
        world.key("acme")
    world.registry.keys.revoke(OPERATOR, "acme", world.registry.keys.list(OPERATOR, "acme")[0].key_id)
    world.key("acme")
    world.publish("acme", "sup")
    with pytest.raises(RegistryLimitReached, match="max_adapters"):
        world.publish("acme", "other", seed=1)
    world.publish("acme", "sup")
    with pytest.raises(RegistryLimitReached, match="max_versions"):
        world.publish("acme", "sup", seed=2)
    assert stored(world) == 2  # what was refused for its number left no file


@pytest.mark.parametrize("name", ["max_keys", "max_adapters", "max_versions", "max_bytes", "max_verifications"])
def test_a_limit_below_one_cannot_work(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        RegistryLimits(**{name: 0})


@pytest.fixture
def narrow(make_world: MakeWorld) -> World:
    """acme may keep exactly two adapters; globex too."""
    world = make_world()
    limit = num_bytes(world, 1, 2)
    world = make_world({"limits": RegistryLimits(max_bytes=limit)})
    for tenant in ("acme", "globex"):
        world.tenant(tenant)
    return world


def test_bytes_are_limited_before_they_are_kept(narrow: World) -> None:
    narrow.publish("acme", "one", seed=1)
    narrow.publish("acme", "two", seed=2)  # exactly at the limit
    files = stored(narrow)
    limit = num_bytes(narrow, 1, 2)
    with pytest.raises(RegistryLimitReached, match=rf"the limit is {limit} \(max_bytes\)"):
        narrow.publish("acme", "three", seed=3)
    assert stored(narrow) == files
    assert [info.name for info in narrow.registry.adapters.list(OPERATOR, "acme")] == ["one", "two"]
    assert list((narrow.config.data_dir / "artifacts" / "tmp").iterdir()) == []
    narrow.publish("globex", "three", seed=3)  # each tenant has its own


def test_a_file_counts_once_and_a_deleted_version_not_at_all(narrow: World) -> None:
    narrow.publish("acme", "one", seed=1)
    narrow.publish("acme", "two", seed=2)
    narrow.publish("acme", "again", seed=1)  # the same files
    narrow.registry.adapters.delete(OPERATOR, "acme", "again")
    with pytest.raises(RegistryLimitReached):
        narrow.publish("acme", "three", seed=3)  # `one` needs them still
    narrow.registry.adapters.delete(OPERATOR, "acme", "one")
    narrow.publish("acme", "three", seed=3)


def test_uploads_at_once_cannot_pass_the_limit_together(narrow: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look sees room for both; the one in the change does not."""
    narrow.publish("acme", "one", seed=1)
    real, done = publishing.Publisher._insert, []

    def insert(self: publishing.Publisher, *args: object) -> object:
        if not done:
            done.append(True)
            narrow.publish("acme", "two", seed=2)
        return real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(publishing.Publisher, "_insert", insert)
    with pytest.raises(RegistryLimitReached, match="max_bytes"):
        narrow.publish("acme", "three", seed=3)
    assert [info.name for info in narrow.registry.adapters.list(OPERATOR, "acme")] == ["one", "two"]


def test_attempts_to_verify_are_limited_but_a_failure_still_counts(make_world: MakeWorld) -> None:
    world = make_world({"limits": RegistryLimits(max_verifications=3)})
    world.tenant("acme")
    world.publish("acme", "sup")
    adapters = world.registry.adapters
    for result in (FAILED, FAILED, PASSED):
        adapters.record_verification(OPERATOR, "acme", "sup", 1, result)
    entries = len(world.registry.audit_entries(OPERATOR, "acme"))
    with pytest.raises(RegistryLimitReached, match=r"3 verifications; the limit is 3 \(max_verifications\)"):
        adapters.record_verification(OPERATOR, "acme", "sup", 1, PASSED)
    assert len(world.registry.audit_entries(OPERATOR, "acme")) == entries
    assert adapters.record_verification(OPERATOR, "acme", "sup", 1, FAILED).state is VersionState.VALIDATED
    for call in (
        lambda: adapters.record_verification(OPERATOR, "acme", "sup", 1, FAILED),  # changes nothing any more
        lambda: adapters.record_verification(OPERATOR, "acme", "sup", 1, PASSED),
        lambda: adapters.skip_verification(OPERATOR, "acme", "sup", 1),
    ):
        with pytest.raises(RegistryLimitReached):
            call()
    assert [one.attempt for one in adapters.show(OPERATOR, "acme", "sup").verifications[1]] == [1, 2, 3, 4]
    world.publish("acme", "sup")
    adapters.skip_verification(OPERATOR, "acme", "sup", 2)  # the next version has its own


def test_without_the_sum_nothing_is_refused(narrow: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant."""
    monkeypatch.setattr(publishing, "count_bytes", lambda connection, owner, new: 0)
    for seed in (1, 2, 3):
        narrow.publish("acme", "sup", seed=seed)
    assert len(narrow.registry.adapters.show(OPERATOR, "acme", "sup").versions) == 3
