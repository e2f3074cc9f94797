"""Adapters by the names that operators write, leased by the server itself: no caller's rights and nobody's share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from loraplex.core import AdapterDigest, AdapterRef, InvalidRequest, ModelNotFound
from loraplex.registry import NotInMemory, Principal, Registry, ResolvedVersion, Role
from loraplex.server.adapter_reads import AdapterSource, CheckAdapter
from loraplex.server.engine_port import ServingEngine
from loraplex.server.host_adapters import HostAdapters
from loraplex.server.local_catalog import LocalModels
from loraplex.server.threads import WorkerThreads

SERVER_ACCOUNT = ":server"  # no tenant's name


@dataclass(frozen=True, slots=True)
class NamedLease:
    """Weights that stay in host memory until `release`, once."""

    digest: AdapterDigest
    release: Callable[[], None]


class AdapterNames(Protocol):
    """What adapters are called. A name may carry a version; without one it stands for the active version."""

    def check(self, name: str) -> AdapterDigest:
        """What a name stands for now. Blocks. Raises ModelNotFound, and what resolving for its owner raises."""
        ...

    async def find(self, name: str) -> AdapterDigest:
        """As `check`, without blocking the event loop."""
        ...

    async def lease(self, name: str) -> NamedLease:
        """The weights that a name stands for, ready in the engine. Raises as `check`, and what reading raises."""
        ...


NoteName = Callable[[ResolvedVersion, str], None]
"""Is told, in the event loop, what was found and the name that it was looked for by."""


class RegistryNames:
    """`tenant/name` in a registry. Its leases share one account, bounded as a tenant's."""

    def __init__(
        self, registry: Registry, engine: ServingEngine, threads: WorkerThreads, host: HostAdapters, note: NoteName
    ) -> None:
        self._registry = registry
        self._engine = engine
        self._threads = threads
        self._host = host
        self._note = note
        self._owners: dict[str, Principal] = {}

    def check(self, name: str) -> AdapterDigest:
        return self._resolve(name).ref.digest

    async def find(self, name: str) -> AdapterDigest:
        return (await self._find(name)).ref.digest

    async def lease(self, name: str) -> NamedLease:
        found = await self._find(name)
        digest = found.ref.digest
        source = AdapterSource(digest, found.num_bytes, found.artifact, partial(self._read, found))
        await self._host.acquire(SERVER_ACCOUNT, source)
        return NamedLease(digest, partial(self._host.release, SERVER_ACCOUNT, digest))

    def _read(self, found: ResolvedVersion) -> CheckAdapter:
        return partial(self._registry.read(found), self._engine.base, self._registry.adapter_limits)

    async def _find(self, name: str) -> ResolvedVersion:
        found = await self._look_up(name)
        self._note(found, name)
        return found

    async def _look_up(self, name: str) -> ResolvedVersion:
        tenant, model = _parts(name)
        owner = self._owners.get(tenant)
        if owner is not None:
            try:
                found = self._registry.recall_version(owner, model, self._engine.base)
            except NotInMemory:
                pass
            else:
                return _adapter(found, name)
        return await self._threads.run(self._resolve, name)

    def _resolve(self, name: str) -> ResolvedVersion:
        """Resolved as its owner would: a tenant that was switched off has none."""
        tenant, model = _parts(name)
        operator = self._registry.local_operator()
        info = self._registry.tenants.find(operator, tenant)
        owner = self._owners[tenant] = Principal(info.tenant_id, info.name, Role.TENANT, operator.key_id)
        return _adapter(self._registry.resolve(owner, model, self._engine.base), name)


def _parts(name: str) -> tuple[str, str]:
    tenant, separator, model = name.partition("/")
    if not separator or not tenant or not model or "/" in model:
        raise InvalidRequest(f"{name!r:.200} is not tenant/name.", "name")
    return tenant, model


def _adapter(found: ResolvedVersion | None, name: str) -> ResolvedVersion:
    if found is None:  # the base
        raise ModelNotFound(name)
    return found


class LocalNames:
    """Names of a server without a registry, whose adapters are all in host memory."""

    def __init__(self, models: LocalModels) -> None:
        self._models = models

    def check(self, name: str) -> AdapterDigest:
        return _named(self._models.resolve(name), name).digest

    async def find(self, name: str) -> AdapterDigest:
        return self.check(name)

    async def lease(self, name: str) -> NamedLease:
        ref = _named(self._models.acquire(name), name)
        return NamedLease(ref.digest, partial(self._models.release, ref))


def _named(ref: AdapterRef | None, name: str) -> AdapterRef:
    if ref is None:  # the base
        raise ModelNotFound(name)
    return ref
