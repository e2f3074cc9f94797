"""One change of the registry: a write transaction with its place in the order of changes and its audit entries."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sqlalchemy import Connection, select, update

from loraplex.core import ConfigError
from loraplex.core.registry_errors import AuditUnavailable
from loraplex.registry import schema
from loraplex.registry.access import check_caller
from loraplex.registry.audit import SYSTEM_CHAIN, AuditLog, Detail
from loraplex.registry.audit_heads import FILE_NAME as HEADS_FILE
from loraplex.registry.audit_heads import AuditHeads, Head
from loraplex.registry.cache import TenantCache
from loraplex.registry.database import Database
from loraplex.registry.master_secret import MasterSecret
from loraplex.registry.types import KeyId, Principal, TenantId

OnStep = Callable[[str], None]
"""Called with the name of each step of a change; tests stop the process there."""


def no_step(name: str) -> None:
    """What `OnStep` is outside tests."""


class Change:
    """A change while it is made. Everything in it commits together or not at all."""

    __slots__ = ("_audit", "at", "connection", "epoch", "heads", "touched")

    def __init__(self, connection: Connection, audit: AuditLog, epoch: int, at: float) -> None:
        self.connection = connection
        self.epoch = epoch
        self.at = at
        self._audit = audit
        self.touched: set[TenantId] = set()
        self.heads: dict[str, Head] = {}

    def record(self, tenant: TenantId | None, actor: KeyId, action: str, **details: Detail) -> None:
        """Append to the tenant's audit chain (the system's for None) and have caches forget the tenant."""
        chain = tenant if tenant is not None else SYSTEM_CHAIN
        self.heads[chain] = self._audit.append(self.connection, chain, actor, action, details, self.at)
        if tenant is not None:
            self.touch(tenant)

    def touch(self, tenant: TenantId) -> None:
        """Have caches forget a tenant's rows after the commit."""
        self.touched.add(tenant)

    def finish(self) -> None:
        """Write the epoch to what was touched. Raises RuntimeError if nothing was recorded: that is our bug."""
        if not self.heads:
            raise RuntimeError("a change of the registry must be recorded in the audit log")
        table = schema.tenants
        if self.touched:
            statement = update(table).where(table.c.tenant_id.in_(sorted(self.touched))).values(epoch=self.epoch)
            self.connection.execute(statement)


class Store:
    """Database, audit log and cache together. Every method may be called from any thread."""

    __slots__ = ("_clock", "_on_step", "_write_lock", "audit", "cache", "database")

    def __init__(
        self,
        database: Database,
        data_dir: Path,
        secret: MasterSecret,
        clock: Callable[[], float] = time.time,
        on_step: OnStep = no_step,
    ) -> None:
        self.database = database
        heads = AuditHeads(data_dir / HEADS_FILE, secret.derive("audit heads 1"))
        self.audit = AuditLog(secret.derive("audit entries 1"), heads)
        self.cache = TenantCache(database)
        self._clock = clock
        self._on_step = on_step
        self._write_lock = threading.Lock()

    def prepare(self, secret: MasterSecret) -> None:
        """Bring the schema up to date, check that the secret is this database's, sign what is unsigned."""
        self.database.migrate()
        with self.database.write() as connection:
            _check_secret(connection, secret)
        with self.database.read() as connection:
            self.audit.catch_up(connection)

    def now(self) -> float:
        """Unix seconds."""
        return self._clock()

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection for reading. Raises RegistryUnavailable."""
        with self.database.read() as connection:
            yield connection

    @contextlib.contextmanager
    def change(self, principal: Principal) -> Iterator[Change]:
        """A change by a caller: alone in all processes, recorded, and known to the cache when the block has ended.

        Raises before anything is done: AuditUnavailable if earlier heads cannot be signed, Unauthenticated and
        PermissionDenied if the caller's key, looked at in the same transaction, does not allow it any more.
        """
        self.audit.heads.append(())
        with self._write_lock:
            try:
                with self.database.write() as connection:
                    change = Change(connection, self.audit, _next_epoch(connection), self.now())
                    check_caller(connection, principal, change.at)
                    yield change
                    change.finish()
                    self._on_step("commit.before")
            except BaseException:
                self.cache.expire()  # a commit that failed may have come through
                raise
            self.cache.note(change.epoch, change.touched)
        self._on_step("commit.after")
        with contextlib.suppress(AuditUnavailable):  # the change stands; the next one will meet the error
            self.audit.heads.append(tuple(change.heads.values()))
        self._on_step("heads.written")


def _next_epoch(connection: Connection) -> int:
    """Raise the epoch. Its row stays locked until the commit, so changes commit in the order of their epochs."""
    table = schema.epoch
    statement = update(table).where(table.c.id == 1).values(value=table.c.value + 1).returning(table.c.value)
    return int(connection.execute(statement).scalar_one())


def _check_secret(connection: Connection, secret: MasterSecret) -> None:
    """Raise ConfigError if the database was made with another secret file."""
    table = schema.meta
    query = select(table.c.value).where(table.c.name == "secret_check")
    stored = connection.execute(query).scalar_one_or_none()
    if stored is None:
        _next_epoch(connection)  # alone from here on
        stored = connection.execute(query).scalar_one_or_none()
    if stored is None:
        connection.execute(table.insert().values(name="secret_check", value=secret.check_value))
    elif stored != secret.check_value:
        raise ConfigError("The database was made with another secret file; put back the file 'secret' of its data_dir.")
