"""The catalog of a registry: names inside the caller's namespace and grants, weights read from the artifact store."""

from collections.abc import Collection, Mapping
from functools import partial

from loraplex.core import AdapterDigest
from loraplex.core.registry_errors import Unauthenticated
from loraplex.registry import ModelPage, NotInMemory, Principal, Registry, ResolvedVersion
from loraplex.server.adapter_reads import AdapterSource, CheckAdapter
from loraplex.server.callers import Caller
from loraplex.server.catalog import CatalogPage, ModelEntry, ModelLease, OnResolved, ToldLoad
from loraplex.server.engine_port import ServingEngine
from loraplex.server.host_adapters import HostAdapters
from loraplex.server.host_figures import HostFigures
from loraplex.server.known_names import KnownNames
from loraplex.server.load_backoff import LoadFailure
from loraplex.server.name_watch import NameWatch
from loraplex.server.threads import WorkerThreads
from loraplex.server.waiters import Waiter


class RegistryCatalog:
    """A ModelCatalog over a registry. Queries run in `threads`, reading of weights in threads of its own."""

    def __init__(
        self,
        registry: Registry,
        engine: ServingEngine,
        threads: WorkerThreads,
        host: HostAdapters,
    ) -> None:
        self._registry = registry
        self._engine = engine
        self._threads = threads
        self._host = host
        self._names = KnownNames()
        self._watch = NameWatch(registry, threads, self._names)

    async def acquire(self, caller: Caller, model: str | None, on_resolved: OnResolved, waiter: Waiter) -> ModelLease:
        found = await self._resolve(caller, model)
        on_resolved(None if found is None else found.ref)
        if found is None:
            return ModelLease(None)
        digest, tenant = found.ref.digest, caller.account
        self.note(found, model)
        source = AdapterSource(digest, found.num_bytes, found.artifact, partial(self._read, found))
        loaded = await self._host.acquire(tenant, source, waiter)
        told = ToldLoad(loaded.told_s is not None, loaded.told_s or 0.0)
        return ModelLease(
            found.ref, loaded.was_read, loaded.waited_s, told, partial(self._host.release, tenant, digest)
        )

    async def find(self, caller: Caller, model: str | None) -> ModelEntry | None:
        found = await self._resolve(caller, model)
        return None if found is None else _entry(found)

    async def page(self, caller: Caller, after: str, limit: int) -> CatalogPage:
        page = await self._page(caller, after, limit)
        while not (entries := self._callable(page)) and page.next_after is not None:
            page = await self._page(caller, page.next_after, limit)
        return CatalogPage(entries, page.next_after is not None)

    def may_use_base(self, caller: Caller) -> bool:
        return _principal(caller).bound_adapter is None

    def names_of(self, digests: Collection[AdapterDigest]) -> Mapping[AdapterDigest, tuple[str, ...]]:
        return self._names.of(digests)

    def model_names(self, digests: Collection[AdapterDigest]) -> Mapping[AdapterDigest, tuple[str, ...]]:
        return self._names.current(digests)

    async def refresh_names(self) -> None:
        await self._watch.refresh()

    def load_failures(self) -> Mapping[AdapterDigest, LoadFailure]:
        return self._host.failures()

    def host_figures(self) -> HostFigures:
        return self._host.figures()

    def note(self, found: ResolvedVersion, model: str | None) -> None:
        """Remember what was asked for, under its owner; `model` None is what the key is bound to, without a version.

        Call it in the event loop.
        """
        label = f"{found.tenant}/{found.ref.label.rpartition('/')[2]}"
        note = self._names.note if model is not None and "@" in model else self._names.note_current
        note(found.ref.digest, label)

    def _read(self, found: ResolvedVersion) -> CheckAdapter:
        return partial(self._registry.read(found), self._engine.base, self._registry.adapter_limits)

    async def _resolve(self, caller: Caller, model: str | None) -> ResolvedVersion | None:
        principal, base = _principal(caller), self._engine.base
        try:
            return self._registry.recall_version(principal, model, base)
        except NotInMemory:
            return await self._threads.run(self._registry.resolve, principal, model, base)

    async def _page(self, caller: Caller, after: str, limit: int) -> ModelPage:
        call = self._registry.list_models
        return await self._threads.run(call, _principal(caller), self._engine.base, after, limit)

    def _callable(self, page: ModelPage) -> tuple[ModelEntry, ...]:
        """Without an adapter that has the base's name, as that name means the base."""
        return tuple(_entry(found) for found in page.models if found.ref.name != self._engine.base.name)


def _principal(caller: Caller) -> Principal:
    if caller.principal is None:
        raise Unauthenticated
    return caller.principal


def _entry(found: ResolvedVersion) -> ModelEntry:
    return ModelEntry(found.ref, found.created, found.declared_base, found.base_verified)
