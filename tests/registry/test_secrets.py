"""Secrets stay secret (RELIABILITY.md, T11): canaries in keys, URLs and the secret file never come out."""

import io
import logging
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loraplex.core import LoraplexError
from loraplex.registry import ApiKey, Registry, RegistryConfig, Role
from loraplex.registry.database import Database
from loraplex.registry.schema import api_keys, metadata

from .helpers import BASE, OPERATOR, World, adapter_dir

PASSWORD = "canary-password-7f3a"


def shown(call: Callable[[], Any]) -> tuple[str, bool]:
    """All that a call prints, logs, returns in `repr` or raises, traceback with values included; and if it failed."""
    out, failed = io.StringIO(), False
    handler = logging.StreamHandler(out)
    logging.getLogger().addHandler(handler)
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.DEBUG)
    try:
        with redirect_stdout(out), redirect_stderr(out):
            out.write(repr(call()))
    except Exception as error:
        failed = True
        lines = traceback.TracebackException.from_exception(error, capture_locals=False).format()
        out.write("".join(lines) + repr(error))
        if isinstance(error, LoraplexError):
            out.write(repr(vars(error)))
    finally:
        logging.getLogger().removeHandler(handler)
        logging.getLogger().setLevel(level)
    return out.getvalue(), failed


def calls(world: World, key: str, folder: Path) -> list[Callable[[], Any]]:
    """Successes and failures of every part, each with the canary key at hand."""
    registry = world.registry
    caller = registry.authenticate(key)
    directory = adapter_dir(folder)
    found: list[Callable[[], Any]] = [
        lambda: registry.authenticate(key),
        lambda: caller,
        lambda: registry,
        lambda: registry.keys.list(caller, "acme"),
        lambda: registry.keys.create(caller, "acme", Role.TENANT),
        lambda: registry.audit_entries(caller, "acme", limit=1000),
        lambda: registry.verify_audit(OPERATOR),
        lambda: world.config,
        lambda: registry._store.database.engine,
        lambda: registry.publish(caller, "acme", "sup", directory, BASE, base_unverified=True),
        lambda: registry.adapters.show(caller, "acme", "sup"),
    ]
    spoilt = (key[:-1], key + "x", key[:-1] + "!", f"Bearer {key}", key[:-7] + key[-6:] + "A", key.upper())
    found += [partial(registry.authenticate, text) for text in spoilt]
    found += [
        partial(operation, caller, "acme")
        for operation in (registry.tenants.create, registry.tenants.disable, registry.tenants.enable)
    ]
    models = (None, "nothing", "acme/nothing", "x" * 300, "sup", "sup@9")
    found += [partial(registry.resolve, caller, model, BASE) for model in models]
    for tenant in ("acme", "other"):
        found += [partial(registry.keys.create, caller, tenant, role, expires_at=1.0) for role in Role]
        found += [
            partial(registry.keys.revoke, caller, tenant, "nothing"),
            partial(registry.adapters.delete, caller, tenant, "nothing"),
            partial(registry.adapters.activate, caller, tenant, "sup", 1, expected=7),
            partial(registry.publish, caller, tenant, "x", folder / "no", BASE),
        ]
    return found


def count_hits(world: World, folder: Path) -> tuple[int, int, int]:
    """(calls, failures, calls that showed a secret)."""
    key = world.key("acme", Role.TENANT_ADMIN)
    secrets = [key.rpartition("_")[2], (world.config.data_dir / "secret").read_text().strip(), PASSWORD]
    with world.registry._store.database.read() as connection:
        secrets += connection.execute(api_keys.select()).mappings().one()["secret_hash"].split()
    made = calls(world, key, folder)
    results = [shown(call) for call in made]
    hits = sum(any(secret in text for secret in secrets) for text, _ in results)
    return len(made), sum(failed for _, failed in results), hits


@pytest.fixture
def acme(world: World) -> World:
    world.registry.tenants.create(OPERATOR, "acme")
    return world


def test_no_secret_is_ever_shown(acme: World) -> None:
    num_calls, num_failures, hits = count_hits(acme, acme.folder)
    assert num_calls >= 40
    assert 20 <= num_failures < num_calls  # the floor: both ways were taken
    assert hits == 0


def test_a_key_that_shows_itself_would_be_found(acme: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: hiding the text in `repr` is what keeps the test above quiet."""
    monkeypatch.setattr(ApiKey, "__repr__", lambda self: self.reveal())
    real = acme.registry.keys.create
    created = real(OPERATOR, "acme", Role.TENANT)
    assert created.key.reveal() in shown(lambda: created)[0]


def test_the_database_holds_no_key(acme: World) -> None:
    keys = [acme.key("acme") for _ in range(5)]
    with acme.registry._store.database.read() as connection:
        rows = repr([connection.execute(table.select()).all() for table in metadata.tables.values()])
    assert len(rows) > 1_000
    assert not any(key.rpartition("_")[2][:20] in rows for key in keys)


def test_files_of_the_data_directory_are_for_their_owner(acme: World) -> None:
    assert acme.config.data_dir.stat().st_mode & 0o077 == 0
    assert (acme.config.data_dir / "secret").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://user:{PASSWORD}@127.0.0.1:1/db",
        f"postgresql://user:{PASSWORD}@/nowhere?host=/nonexistent",
        f"postgresql://user:{PASSWORD}@127.0.0.1:notaport/db",
    ],
)
def test_a_password_in_the_url_is_never_shown(tmp_path: Path, url: str) -> None:
    config = RegistryConfig(tmp_path, database_url=url)
    assert PASSWORD not in repr(config)
    text, failed = shown(lambda: Registry(config))
    assert failed
    assert PASSWORD not in text


def test_values_of_statements_are_not_in_errors(tmp_path: Path) -> None:
    database = Database(None, tmp_path)
    database.migrate()

    def insert_twice() -> None:
        with database.write() as connection:
            for _ in range(2):
                connection.execute(metadata.tables["meta"].insert().values(name="x", value=PASSWORD))

    text, failed = shown(insert_twice)
    assert failed
    assert "IntegrityError" in text
    assert PASSWORD not in text
