"""The catalog of a server without a registry: names that are the same for every caller."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from loraplex.core import AdapterDigest, AdapterRef, InvalidRequest, ModelNotFound
from loraplex.server.callers import Caller
from loraplex.server.catalog import CatalogPage, ModelEntry, ModelLease, OnResolved
from loraplex.server.host_figures import HostFigures
from loraplex.server.load_backoff import LoadFailure
from loraplex.server.waiters import Waiter


class NamedAdapter(Protocol):
    """One adapter that can be called by name."""

    @property
    def ref(self) -> AdapterRef:
        """Name, version and digest."""
        ...

    @property
    def created(self) -> float:
        """When it became callable, in unix seconds."""
        ...

    @property
    def declared_base(self) -> str | None:
        """The base that the adapter's config names, if it names one."""
        ...


class LocalModels(Protocol):
    """Adapters by name. Implemented by `engine.ServedModels`. Any thread may call these."""

    def resolve(self, model: str) -> AdapterRef | None:
        """The adapter a name stands for now; None only for the base's own name. Raises ModelNotFound."""
        ...

    def acquire(self, model: str) -> AdapterRef | None:
        """As `resolve`; the weights stay until `release`. Raises ModelNotFound."""
        ...

    def release(self, ref: AdapterRef) -> None:
        """Give back what `acquire` gave."""
        ...

    def list(self) -> Sequence[NamedAdapter]:
        """All adapters that can be called, by name."""
        ...

    def load(self, name: str, directory: Path, *, created: float, replace: bool = False) -> AdapterRef:
        """Validate and name an adapter; `replace` makes a new version. Blocks. Raises AdapterRefused."""
        ...

    def unload(self, name: str) -> AdapterRef:
        """Take a name away. Raises AdapterRefused (NOT_FOUND)."""
        ...


class LocalCatalog:
    """A ModelCatalog over names that any caller may use."""

    def __init__(self, models: LocalModels) -> None:
        self._models = models

    async def acquire(self, caller: Caller, model: str | None, on_resolved: OnResolved, waiter: Waiter) -> ModelLease:
        ref = self._models.acquire(_given(model))
        on_resolved(ref)
        if ref is None:
            return ModelLease(None)
        return ModelLease(ref, on_release=partial(self._models.release, ref))

    async def find(self, caller: Caller, model: str | None) -> ModelEntry | None:
        ref = self._models.resolve(_given(model))
        if ref is None:
            return None
        entry = next((entry for entry in self._models.list() if entry.ref == ref), None)
        if entry is None:  # unloaded since it was resolved
            raise ModelNotFound(ref.name)
        return ModelEntry(ref, entry.created, entry.declared_base)

    async def page(self, caller: Caller, after: str, limit: int) -> CatalogPage:
        entries = [entry for entry in self._models.list() if entry.ref.name > after]
        shown = (ModelEntry(entry.ref, entry.created, entry.declared_base) for entry in entries[:limit])
        return CatalogPage(tuple(shown), len(entries) > limit)

    def may_use_base(self, caller: Caller) -> bool:
        return True

    def names_of(self, digests: Collection[AdapterDigest]) -> Mapping[AdapterDigest, tuple[str, ...]]:
        names: dict[AdapterDigest, tuple[str, ...]] = {}
        for entry in self._models.list():
            if entry.ref.digest in digests:
                names[entry.ref.digest] = (*names.get(entry.ref.digest, ()), entry.ref.label)
        return names

    def model_names(self, digests: Collection[AdapterDigest]) -> Mapping[AdapterDigest, tuple[str, ...]]:
        found = self.names_of(digests)
        return {digest: tuple(label.rpartition("@")[0] for label in labels) for digest, labels in found.items()}

    async def refresh_names(self) -> None:
        """Nothing: the names are always those of now."""

    def load_failures(self) -> Mapping[AdapterDigest, LoadFailure]:
        return {}

    def host_figures(self) -> HostFigures:
        return HostFigures(len(self._models.list()))


def _given(model: str | None) -> str:
    if model is None:
        raise InvalidRequest("The field 'model' is required.", "model")
    return model
