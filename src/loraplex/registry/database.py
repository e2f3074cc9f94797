"""The connection to SQLite or PostgreSQL: how it is opened, brought to the newest schema, read and written.

SQLite: WAL, full synchronisation, foreign keys. Reads take a deferred transaction, writes an immediate one; neither
begins, and no write ends, if the path does not lead to the file that was opened first. The rest is the same for both.
"""

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import (
    URL,
    Column,
    Connection,
    Engine,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    func,
    inspect,
    make_url,
    select,
)
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    IntegrityError,
    InterfaceError,
    NoSuchModuleError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout

from loraplex.core import ConfigError
from loraplex.core.registry_errors import RegistryUnavailable, StoreFull

SQLITE_NAME = "registry.db"
_BUSY_TIMEOUT_S = 10.0
_POOL_SIZE, _POOL_OVERFLOW = 8, 24
_MIGRATION_LOCK = 0x6C6F7261  # any constant; PostgreSQL's advisory lock of this number is ours
_WRITE = "loraplex_write"
_MIGRATIONS = Path(__file__).parent / "migrations"
_VERSION_TABLE = Table("alembic_version", MetaData(), Column("version_num", String(32)))

HEAD_REVISION = "0003"  # that of the newest file in migrations/versions


class _OpenedFile:
    """SQLite's file as the first connection found it. Whoever removes it leaves connections that write to no path."""

    __slots__ = ("_identity", "_path")

    def __init__(self, database: str | None) -> None:
        """`database` as SQLite gets it; None where there is no file. That of a URI is not looked at."""
        is_path = database is not None and not database.startswith("file:")
        self._path = Path(database or "").absolute() if is_path else None
        self._identity: tuple[int, int] | None = None

    def remember(self, connection: sqlite3.Connection, record: object) -> None:
        if self._path is not None and self._identity is None:
            self._identity = self._look(self._path)

    def check(self) -> None:
        """Raise RegistryUnavailable if the file was removed, moved or replaced."""
        if self._path is not None and self._identity is not None and self._look(self._path) != self._identity:
            raise RegistryUnavailable(
                "The registry's database file was replaced while it was in use: put the old one back, or start again."
            )

    def _look(self, path: Path) -> tuple[int, int]:
        try:
            status = path.stat()
        except OSError as error:
            raise RegistryUnavailable(f"The registry's database file cannot be reached: {error.strerror}.") from None
        return status.st_dev, status.st_ino


class Database:
    """A pool of connections. Every method may be called from any thread."""

    __slots__ = ("_engine", "_file", "_lock_path", "is_sqlite")

    def __init__(self, url: str | None, data_dir: Path) -> None:
        """`url` None means SQLite in the data directory. Raises ConfigError for a URL that cannot be used."""
        parsed = _parse_url(url) if url is not None else URL.create("sqlite", database=str(data_dir / SQLITE_NAME))
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        self._engine = _sqlite_engine(parsed) if self.is_sqlite else _postgres_engine(parsed)
        self._file = _OpenedFile(parsed.database if self.is_sqlite else None)
        if self.is_sqlite:
            event.listen(self._engine, "connect", self._file.remember)
        self._lock_path = data_dir / "migrate.lock"

    @property
    def engine(self) -> Engine:
        return self._engine

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection in a transaction that sees one state and is rolled back. Raises RegistryUnavailable."""
        self._file.check()
        with _translated(), self._engine.connect() as connection:
            if not self.is_sqlite:  # where each statement would see a state of its own
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        """A connection in a transaction that commits unless the block raises. Raises RegistryUnavailable, StoreFull."""
        self._file.check()
        with _translated(), self._engine.connect() as connection:
            connection = connection.execution_options(**{_WRITE: True})
            with connection.begin():
                yield connection
                self._file.check()

    def migrate(self) -> None:
        """Bring the schema to this version's. Raises ConfigError if it is newer than what we know."""
        with self.read() as connection:
            if _revision(connection) == HEAD_REVISION:
                return
        with _file_lock(self._lock_path), self.write() as connection:
            if not self.is_sqlite:
                connection.execute(select(func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            _upgrade(connection)

    def close(self) -> None:
        self._engine.dispose()


def _parse_url(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ConfigError(
            "The database URL cannot be read; sqlite:///PATH or postgresql://HOST/NAME is wanted."
        ) from None
    backend = parsed.get_backend_name()
    if backend == "postgresql" or parsed.drivername == "postgres":
        return parsed.set(drivername="postgresql+psycopg")
    if backend == "sqlite" and parsed.database not in (None, "", ":memory:"):
        return parsed.set(drivername="sqlite")
    raise ConfigError(f"Databases of the kind {parsed.drivername!r:.80} are not supported; use sqlite or postgresql.")


def _sqlite_engine(url: URL) -> Engine:
    engine = create_engine(
        url,
        hide_parameters=True,
        pool_size=_POOL_SIZE,
        max_overflow=_POOL_OVERFLOW,
        connect_args={"timeout": _BUSY_TIMEOUT_S, "isolation_level": None, "check_same_thread": False},
    )
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: sqlite3.Connection, record: object) -> None:
    for setting in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", "trusted_schema = OFF"):
        connection.execute(f"PRAGMA {setting}").close()


def _begin_sqlite(connection: Connection) -> None:
    is_write = connection.get_execution_options().get(_WRITE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if is_write else "BEGIN")


def _postgres_engine(url: URL) -> Engine:
    try:
        return create_engine(
            url, hide_parameters=True, pool_pre_ping=True, pool_size=_POOL_SIZE, max_overflow=_POOL_OVERFLOW
        )
    except (ImportError, NoSuchModuleError):
        raise ConfigError("PostgreSQL needs the package psycopg: install loraplex[postgres].") from None


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Errors of the driver as ours. Neither statements nor parameters nor the URL are shown."""
    try:
        yield
    except PoolTimeout:
        raise RegistryUnavailable(f"All {_POOL_SIZE + _POOL_OVERFLOW} database connections are in use.") from None
    except (IntegrityError, ProgrammingError):
        raise  # our own mistakes
    except (InterfaceError, DatabaseError) as error:
        if getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise StoreFull("The registry's database has no room: free space in the data directory.") from None
        state = getattr(error.orig, "sqlite_errorname", None) or getattr(error.orig, "sqlstate", None)
        name = type(error.orig).__name__
        raise RegistryUnavailable(f"The registry's database failed: {name}{f' ({state})' if state else ''}.") from None


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _revision(connection: Connection) -> str | None:
    """The schema's revision; None where there is no schema."""
    if not inspect(connection).has_table(_VERSION_TABLE.name):
        return None
    return connection.execute(select(_VERSION_TABLE.c.version_num)).scalar_one_or_none()


def _upgrade(connection: Connection) -> None:
    """Run what Alembic finds missing, inside the caller's transaction."""
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    known = {revision.revision for revision in ScriptDirectory.from_config(config).walk_revisions()}
    current = _revision(connection)
    if current is not None and current not in known:
        raise ConfigError(f"The registry has schema {current!r:.80}, which this version of loraplex does not know.")
    command.upgrade(config, "head")
