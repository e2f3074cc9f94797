"""The names a server answers to: validated adapters, registered with the engine and listed in the catalog."""

import threading
from collections import Counter
from pathlib import Path

from loraplex.adapters import Adapter, AdapterCatalog, AdapterLimits, CatalogEntry, load_adapter
from loraplex.core import AdapterDigest, AdapterRef, ModelNotFound
from loraplex.engine.engine import Engine


class ServedModels:
    """Loads and unloads adapters by name. Every method may be called from any thread, also while the engine steps.

    Weights leave the engine when no name stands for them and nobody holds them by `acquire`. The lock is held for
    changes of names and counts alone, never while an adapter is read or packed: `acquire` and `release` return at once.
    """

    def __init__(self, engine: Engine, limits: AdapterLimits) -> None:
        self.catalog = AdapterCatalog(engine.base.name)
        self._engine = engine
        self._limits = limits
        self._lock = threading.Lock()
        self._uses: Counter[AdapterDigest] = Counter()  # names, leases and loads under way

    def list(self) -> tuple[CatalogEntry, ...]:
        """All names, sorted."""
        return self.catalog.list()

    def resolve(self, model: str) -> AdapterRef | None:
        """What a request's `model` stands for now; None for the base's name. Raises ModelNotFound."""
        return self.catalog.resolve(model)

    def acquire(self, model: str) -> AdapterRef | None:
        """As `resolve`; the weights stay in the engine until `release`, also if the name is taken away."""
        with self._lock:
            ref = self.catalog.resolve(model)
            if ref is not None:
                self._uses[ref.digest] += 1
            return ref

    def release(self, ref: AdapterRef) -> None:
        """Give back what `acquire` gave."""
        with self._lock:
            self._let_go(ref.digest)

    def load(self, name: str, directory: Path, *, created: float, replace: bool = False) -> AdapterRef:
        """Validate, register and name an adapter; `replace` makes a new version. Raises AdapterRefused.

        A refusal changes nothing: what the name stood for goes on.
        """
        self.catalog.check_name(name, replace=replace)
        adapter = load_adapter(directory, self._engine.base, self._limits)
        return self._register(name, adapter, created, replace)

    def _register(self, name: str, adapter: Adapter, created: float, replace: bool) -> AdapterRef:
        """Pack without the lock, then change the name. The load's own use of the weights becomes the name's."""
        with self._lock:
            self._uses[adapter.digest] += 1
        try:
            self._engine.add_adapter(adapter)
            with self._lock:
                before = self._digest_of(name)
                ref = self.catalog.add(name, adapter, created=created, replace=replace)
                if before is not None:
                    self._let_go(before)
                return ref
        except BaseException:
            with self._lock:
                self._let_go(adapter.digest)
            raise

    def unload(self, name: str) -> AdapterRef:
        """Take a name away; requests that run finish on what they started with. Raises AdapterRefused."""
        with self._lock:
            ref = self.catalog.remove(name)
            self._let_go(ref.digest)
            return ref

    def _digest_of(self, name: str) -> AdapterDigest | None:
        """What a name stands for now, if anything."""
        try:
            ref = self.catalog.resolve(name)
        except ModelNotFound:
            return None
        return ref.digest if ref is not None else None

    def _let_go(self, digest: AdapterDigest) -> None:
        """Undo one use; with the last one the weights may leave. Under the lock."""
        self._uses[digest] -= 1
        if not self._uses[digest]:
            del self._uses[digest]
            self._engine.retire_adapter(digest)
