"""Crashes while something changes (RELIABILITY.md, T23): what was promised is there, the rest is whole or absent."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.adapters import AdapterLimits
from loraplex.registry import Registry, RegistryConfig, VersionState
from loraplex.registry.changes import Change

from .helpers import BASE, OPERATOR, MakeWorld, World, adapter_dir, check_here

ROOT = Path(__file__).parents[2]
OPERATIONS = ("publish", "verify", "activate", "key", "delete")


def check_whole(registry: Registry, world_dir: Path) -> dict[int, VersionState]:
    """Every invariant of a registry after a crash; gives the versions of acme/sup."""
    versions = {}
    for info in registry.adapters.list(OPERATOR, "acme"):
        detail = registry.adapters.show(OPERATOR, "acme", info.name)
        assert [version.number for version in detail.versions] == list(range(1, len(detail.versions) + 1))
        for version in detail.versions:
            versions[version.number] = version.state
            if version.state is not VersionState.DELETED:
                assert version.facts is not None
                assert registry.load(version, BASE, AdapterLimits()).digest == version.facts.digest
        moves = detail.moves
        assert (
            [move.revision for move in moves]
            == list(range(1, len(moves) + 1))
            == list(range(1, info.alias.revision + 1))
        )
        assert info.alias.active == (moves[-1].to_version if moves else None)
    assert registry.verify_audit(OPERATOR).ok
    registry.sweep(older_than_s=-5)
    assert list((world_dir / "artifacts" / "tmp").iterdir()) == []
    actions = [entry.action for entry in registry.audit_entries(OPERATOR, "acme", limit=1000)]
    assert actions.count("version.publish") == len(versions)  # neither without the other
    return versions


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    """A registry with five verified versions of acme/sup, the first active, and not open."""
    config = RegistryConfig(tmp_path / "data")
    with Registry(config, validate=check_here) as registry:
        world = World(registry, tmp_path, config)
        world.tenant("acme")
        world.active("acme", "sup", seed=1)
        for _ in range(4):
            world.verified("acme", "sup", seed=2)
    yield tmp_path / "data"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_killed_at_every_step(tmp_path: Path, data_dir: Path, operation: str) -> None:
    directory = adapter_dir(tmp_path, seed=3)
    command = [sys.executable, "-m", "tests.registry.crash_child", str(data_dir), str(directory), operation]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    killed = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert killed.pop() == "done"
    # The floor: it died at every step that the operation has.
    assert {"commit.before", "commit.after", "heads.written"} <= set(killed)
    if operation == "publish":
        steps = {"stage.created", "stage.written", "stage.synced", "blob.renamed", "blob.synced"}
        assert steps <= set(killed)
        assert len(killed) == 13
    with Registry(RegistryConfig(data_dir), validate=check_here) as registry:
        versions = check_whole(registry, data_dir)
        promised = done.stdout.splitlines()[-1].split("\t")[1].split()
        if promised[0] == "version":
            assert versions[int(promised[1])] is VersionState.VALIDATED
            # The kills after the commit left their version too: committed is committed.
            assert int(promised[1]) == 5 + killed.count("commit.after") + killed.count("heads.written") + 1
        elif promised[0] == "verified":
            assert versions[int(promised[1])] is VersionState.VERIFIED
        elif promised[0] == "active":
            assert registry.adapters.show(OPERATOR, "acme", "sup").info.alias.active == int(promised[1])
        elif promised[0] == "key":
            assert promised[1] in {info.key_id for info in registry.keys.list(OPERATOR, "acme")}
        else:
            assert versions[int(promised[1])] is VersionState.DELETED


class Crash(BaseException):
    """Stops an operation; nothing catches it."""


def steps_of_a_publication(world: World) -> list[str]:
    """The names of the steps, in order."""
    seen: list[str] = []
    with Registry(world.config, validate=check_here, on_step=seen.append) as registry:
        registry.publish(OPERATOR, "acme", "count", adapter_dir(world.folder, 9), BASE, base_unverified=True)
    return seen


def crash_at(world: World, number: int) -> None:
    """Publish and stop at the n-th step."""
    left = number

    def on_step(name: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Crash

    with Registry(world.config, validate=check_here, on_step=on_step) as registry, pytest.raises(Crash):
        registry.publish(OPERATOR, "acme", "sup", adapter_dir(world.folder, 1), BASE, base_unverified=True)


def test_failing_at_every_step_leaves_nothing_half(make_world: MakeWorld) -> None:
    """The same inside one process and on every backend: an exception at each step."""
    world = make_world()
    world.tenant("acme")
    steps = steps_of_a_publication(world)
    assert len(steps) == 13
    committed = 0
    for number in range(1, len(steps) + 1):
        crash_at(world, number)
        committed += steps.index("commit.after") < number
        with world.reopen() as registry:
            infos = {info.name: info for info in registry.adapters.list(OPERATOR, "acme")}
            versions = registry.adapters.show(OPERATOR, "acme", "sup").versions if "sup" in infos else ()
            assert len(versions) == committed
            for version in versions:
                registry.load(version, BASE, AdapterLimits())
            assert registry.verify_audit(OPERATOR).ok
            assert list((world.config.data_dir / "artifacts" / "tmp").iterdir()) == []
    assert committed == 2


def test_without_the_transaction_a_half_version_is_seen(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: a commit before the audit entry leaves a version without one, and the check says so."""
    world = make_world()
    world.tenant("acme")
    real = Change.record

    def record(self: Change, tenant: object, actor: object, action: str, **details: object) -> None:
        if action == "version.publish":
            self.connection.commit()
            raise Crash
        real(self, tenant, actor, action, **details)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Change, "record", record)
        world.publish("acme", "sup")
    with pytest.raises(AssertionError):
        check_whole(world.registry, world.config.data_dir)
