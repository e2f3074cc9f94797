"""What resolving and authenticating keep in memory, by tenant, and how it learns that it is out of date.

Every change raises the database's epoch and writes it to the tenants that it touched. The cache reads the epoch every
`POLL_EVERY_S`; changes of its own process are noted at once.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable

from sqlalchemy import select

from loraplex.core.registry_errors import RegistryUnavailable
from loraplex.registry import schema
from loraplex.registry.database import Database
from loraplex.registry.types import TenantId

POLL_EVERY_S = 0.25
MAX_STALE_S = 5.0  # how long a database that cannot be reached is done without
MAX_ENTRIES = 200_000  # some 100 MB


class NotInMemory(Exception):
    """The database must be asked."""


class TenantCache:
    """Values by tenant and key. Every method may be called from any thread.

    `epoch = refresh()`, then `get`; where that gives None, read the database and `put` with that epoch.
    """

    __slots__ = (
        "_database",
        "_epoch",
        "_expired",
        "_lock",
        "_max_entries",
        "_now",
        "_num_entries",
        "_partitions",
        "_poll_lock",
        "_polled",
        "_polled_at",
    )

    def __init__(
        self, database: Database, now: Callable[[], float] = time.monotonic, max_entries: int = MAX_ENTRIES
    ) -> None:
        self._database = database
        self._now = now
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._poll_lock = threading.Lock()
        self._partitions: OrderedDict[TenantId, dict[Hashable, object]] = OrderedDict()
        self._num_entries = 0
        self._epoch = 0
        self._expired = 0  # changes of this process so far
        self._polled = -1  # how many of them the last poll has seen
        self._polled_at = float("-inf")

    def expire(self) -> None:
        """Something may have been committed: the next `refresh` asks the database."""
        with self._lock:
            self._expired += 1

    def note(self, epoch: int, changed: Iterable[TenantId]) -> None:
        """This process committed a change of this epoch. Forgets its tenants, or asks, if others' came between."""
        with self._lock:
            if epoch == self._epoch + 1:
                self._forget(changed)
                self._epoch = epoch
            elif epoch > self._epoch:
                self._expired += 1

    @property
    def is_fresh(self) -> bool:
        """Whether `refresh` would go without the database."""
        return self._polled == self._expired and self._now() - self._polled_at < POLL_EVERY_S

    def refresh(self) -> int:
        """Forget what changed, if it is time to ask. Raises RegistryUnavailable where the last answer is too old."""
        if self.is_fresh:
            return self._epoch
        age = self._now() - self._polled_at
        may_go_on = age < MAX_STALE_S and self._polled == self._expired
        if not self._poll_lock.acquire(blocking=not may_go_on):
            return self._epoch  # another thread is asking
        try:
            self._poll()
        except RegistryUnavailable:
            if not may_go_on:
                raise
        finally:
            self._poll_lock.release()
        return self._epoch

    def get(self, tenant: TenantId, key: Hashable) -> object | None:
        """The value, or None."""
        partition = self._partitions.get(tenant)
        return partition.get(key) if partition is not None else None

    def put(self, tenant: TenantId, key: Hashable, value: object, epoch: int) -> None:
        """Keep a value that was read after `refresh` gave `epoch`; dropped if anything changed since."""
        with self._lock:
            if epoch != self._epoch or self._polled != self._expired:
                return
            partition = self._partitions.setdefault(tenant, {})
            self._num_entries += key not in partition
            partition[key] = value
            while self._num_entries > self._max_entries:
                _, oldest = self._partitions.popitem(last=False)
                self._num_entries -= len(oldest)

    def _poll(self) -> None:
        started, expired, known = self._now(), self._expired, self._epoch
        if started - self._polled_at < POLL_EVERY_S and self._polled == expired:
            return  # another thread has just asked
        with self._database.read() as connection:
            epoch = connection.execute(select(schema.epoch.c.value)).scalar_one()
            changed: list[TenantId] = []
            if epoch != known:
                query = select(schema.tenants.c.tenant_id).where(schema.tenants.c.epoch > known)
                changed = [TenantId(tenant) for tenant in connection.execute(query).scalars()]
        with self._lock:
            self._forget(changed)
            self._epoch = max(epoch, self._epoch)  # `note` may have come between
            self._polled, self._polled_at = expired, started

    def _forget(self, changed: Iterable[TenantId]) -> None:
        for tenant in changed:
            self._num_entries -= len(self._partitions.pop(tenant, ()))
