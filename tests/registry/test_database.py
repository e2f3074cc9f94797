"""Opening, migrating, and what errors of the database look like."""

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text

from loraplex.core import ConfigError
from loraplex.registry import Registry, RegistryConfig, RegistryUnavailable, Role
from loraplex.registry.database import Database
from loraplex.registry.schema import TENANT_TABLES, metadata

from .helpers import OPERATOR, MakeWorld, World


def test_migrations_make_the_schema_that_the_code_has(world: World) -> None:
    database = world.registry._store.database
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    database.migrate()  # again: nothing to do


def test_the_newest_revision_is_the_one_that_the_code_names() -> None:
    from alembic.script import ScriptDirectory

    from loraplex.registry.database import _MIGRATIONS, HEAD_REVISION

    assert ScriptDirectory(str(_MIGRATIONS)).get_heads() == [HEAD_REVISION]


def test_every_revision_can_be_taken_back(tmp_path: Path) -> None:
    from alembic import command
    from alembic.config import Config

    from loraplex.registry.database import _MIGRATIONS

    database = Database(None, tmp_path)
    database.migrate()
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    with database.write() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    with database.read() as connection:
        names = connection.execute(text("SELECT name FROM sqlite_master WHERE type = 'table'")).scalars().all()
    assert names == ["alembic_version"]


def test_sqlite_is_durable_and_checks_references(tmp_path: Path) -> None:
    database = Database(None, tmp_path)
    with database.read() as connection:
        for pragma, value in (("journal_mode", "wal"), ("synchronous", 2), ("foreign_keys", 1)):
            assert connection.exec_driver_sql(f"PRAGMA {pragma}").scalar_one() == value


def test_every_table_of_tenants_carries_the_tenant() -> None:
    without = {"alembic_version", "audit_log", "epoch", "meta", "tenants"}  # the audit log has chains
    assert {table.name for table in TENANT_TABLES} == set(metadata.tables) - without
    assert all("tenant_id" in table.c for table in TENANT_TABLES)


def test_a_newer_schema_is_refused(world: World) -> None:
    with world.registry._store.database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ConfigError, match="'9999'"):
        world.reopen()


def test_another_secret_is_refused(world: World) -> None:
    secret = world.config.data_dir / "secret"
    secret.write_text("0" * 64 + "\n")
    with pytest.raises(ConfigError, match="another secret file"):
        world.reopen()


@pytest.mark.parametrize(
    "url",
    ["mysql://user:hunter2@host/db", "sqlite://", "sqlite:///:memory:", "not a url hunter2", "oracle://hunter2@x"],
)
def test_other_databases_are_refused_without_showing_the_url(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Registry(RegistryConfig(tmp_path, database_url=url))
    assert "hunter2" not in f"{caught.value!r} {caught.value.__cause__!r}"


def test_a_file_that_is_no_database_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "registry.db").write_bytes(b"not a database" * 100)
    with pytest.raises(RegistryUnavailable, match="SQLITE_NOTADB"):
        Registry(RegistryConfig(tmp_path))


def test_a_locked_database_is_unavailable_and_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.registry.database._BUSY_TIMEOUT_S", 0.05)
    with Registry(RegistryConfig(tmp_path)) as registry:
        with sqlite3.connect(tmp_path / "registry.db") as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(RegistryUnavailable, match="SQLITE_BUSY"):
                registry.tenants.create(OPERATOR, "acme")
            other.rollback()
        other.close()
        registry.tenants.create(OPERATOR, "acme")


def take_away(path: Path) -> None:
    path.rename(path.with_suffix(".away"))


def replace_by_a_copy(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".copy"))
    take_away(path)
    path.with_suffix(".copy").rename(path)


@pytest.mark.parametrize("lose", [take_away, replace_by_a_copy])
def test_a_database_file_that_is_another_is_noticed(
    tmp_path: Path, lose: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that are open would write to a file without a name, and lose all of it."""
    path = tmp_path / "registry.db"
    with Registry(RegistryConfig(tmp_path)) as registry:
        registry.tenants.create(OPERATOR, "acme")
        key = registry.keys.create(OPERATOR, "acme", Role.TENANT_ADMIN).key.reveal()
        registry.authenticate(key)
        lose(path)
        for call in (
            lambda: registry.tenants.create(OPERATOR, "globex"),
            lambda: registry.tenants.list(OPERATOR),
            lambda: registry.keys.create(OPERATOR, "acme", Role.TENANT),
        ):
            with pytest.raises(RegistryUnavailable, match="database file"):
                call()
        cache = registry._store.cache
        later = cache._now() + 6.0
        monkeypatch.setattr(cache, "_now", lambda: later)  # past what memory may answer for
        with pytest.raises(RegistryUnavailable, match="database file"):
            registry.check_ready()
        with pytest.raises(RegistryUnavailable, match="database file"):
            registry.authenticate(key)
        assert path.exists() == (lose is replace_by_a_copy)  # none was made in its place
        path.with_suffix(".away").rename(path)
        registry.check_ready()  # the same one is back
        registry.tenants.create(OPERATOR, "globex")
        assert registry.verify_audit(OPERATOR).ok
    with Registry(RegistryConfig(tmp_path)) as registry:
        assert [tenant.name for tenant in registry.tenants.list(OPERATOR)] == ["acme", "globex"]


def test_a_change_does_not_commit_to_a_file_that_went_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    with Registry(RegistryConfig(tmp_path)) as registry:
        with (
            pytest.raises(RegistryUnavailable, match="cannot be reached"),
            registry._store.change(OPERATOR) as change,
        ):
            change.record(None, OPERATOR.key_id, "test")
            take_away(path)
        path.with_suffix(".away").rename(path)
        report = registry.verify_audit(OPERATOR)
        assert (report.ok, report.num_entries) == (True, 0)


def test_a_reader_sees_one_state_however_many_statements_it_makes(world: World) -> None:
    """A list takes two: an adapter's pointer must not lead to a version that the second does not know."""
    world.tenant("acme")
    count = text("SELECT count(*) FROM tenants")
    with world.registry._store.database.read() as connection:
        before = connection.execute(count).scalar_one()
        world.tenant("globex")
        assert connection.execute(count).scalar_one() == before
    with world.registry._store.database.read() as connection:
        assert connection.execute(count).scalar_one() == before + 1


def test_sqlite_by_url(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'other.db'}"
    with Registry(RegistryConfig(tmp_path / "data", database_url=url)) as registry:
        registry.tenants.create(OPERATOR, "acme")
    assert (tmp_path / "other.db").exists()
    assert not (tmp_path / "data" / "registry.db").exists()


def test_data_stays_when_it_is_opened_again(make_world: MakeWorld) -> None:
    world = make_world()
    world.tenant("acme")
    with world.reopen() as again:
        assert [tenant.name for tenant in again.tenants.list(OPERATOR)] == ["acme"]


def test_processes_that_start_at_once_make_one_registry(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from loraplex.registry import Registry, RegistryConfig\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
        "with Registry(RegistryConfig(Path(sys.argv[1]))) as registry:\n"
        "    registry.tenants.create(registry.local_operator(), sys.argv[2])\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "data"), f"t{number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for number in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    for process in processes:
        assert process.wait(60) == 0
        assert process.stdout is not None
        process.stdout.close()
    with Registry(RegistryConfig(tmp_path / "data")) as registry:
        assert [tenant.name for tenant in registry.tenants.list(OPERATOR)] == ["t0", "t1", "t2", "t3"]
        assert registry.verify_audit(OPERATOR).ok
