"""Names that a registry has taken away, or given to other weights, leave what is told of adapters.

Looked for when somebody asks, so that a server whose registry nobody changes does nothing.
"""

import asyncio
import time
from collections.abc import Callable

from loraplex.registry import Registry, RegistryUnavailable
from loraplex.server.known_names import KnownNames
from loraplex.server.threads import WorkerThreads

_PATIENCE_S = 0.5  # of who asks: a database that does not answer holds up no scrape
_SETTLED_S = 10.0  # after which no request is noted any more by what was so before a change: twice the cache's longest


class NameWatch:
    """Keeps `names` true to the registry. Belongs to one event loop."""

    def __init__(
        self,
        registry: Registry,
        threads: WorkerThreads,
        names: KnownNames,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._threads = threads
        self._names = names
        self._clock = clock
        self._looking: asyncio.Task[None] | None = None
        self._settled = 0  # epoch up to which no name needs to be looked at
        self._seen, self._seen_at = 0, clock()  # an epoch that will be settled

    async def refresh(self) -> None:
        """Forget names that do not stand any more, of changes of any process so far; those of now if in half a second
        the registry does not say.
        """
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
            self._looking.add_done_callback(self._looked)
        done, _ = await asyncio.wait({self._looking}, timeout=_PATIENCE_S)
        for task in done:
            task.result()

    async def _look(self) -> None:
        try:
            changed = await self._threads.run(self._registry.changed_since, self._settled)
            asked = self._names.of_tenants(changed.tenants)
            if asked:
                standing = await self._threads.run(self._registry.standing_versions, asked)
                self._names.keep(asked, ((f"{one.path}@{one.number}", one.digest, one.is_active) for one in standing))
        except RegistryUnavailable:
            return  # names stay as they were last known
        if self._clock() - self._seen_at >= _SETTLED_S:
            self._settled, self._seen, self._seen_at = self._seen, changed.epoch, self._clock()

    def _looked(self, task: "asyncio.Task[None]") -> None:
        self._looking = None
