"""The names a server answers to: validated adapters, registered with the engine and listed in the catalog."""

import threading
from pathlib import Path

from loraplex.adapters import Adapter, AdapterCatalog, AdapterLimits, load_adapter
from loraplex.core import AdapterDigest, AdapterRef
from loraplex.engine.engine import Engine


class ServedModels:
    """Loads and unloads adapters by name. Every method may be called from any thread, also while the engine steps."""

    def __init__(self, engine: Engine, limits: AdapterLimits) -> None:
        self.catalog = AdapterCatalog(engine.base.name)
        self._engine = engine
        self._limits = limits
        self._lock = threading.Lock()

    def load(self, name: str, directory: Path, *, created: float, replace: bool = False) -> AdapterRef:
        """Validate, register and name an adapter; `replace` makes a new version. Raises AdapterRefused.

        A refusal changes nothing: what the name stood for goes on.
        """
        self.catalog.check_name(name, replace=replace)
        adapter = load_adapter(directory, self._engine.base, self._limits)
        return self._register(name, adapter, created, replace)

    def _register(self, name: str, adapter: Adapter, created: float, replace: bool) -> AdapterRef:
        with self._lock:
            before = {entry.ref.digest for entry in self.catalog.list()}
            self._engine.add_adapter(adapter)
            try:
                return self.catalog.add(name, adapter, created=created, replace=replace)
            finally:
                self._retire(before | {adapter.digest})

    def unload(self, name: str) -> AdapterRef:
        """Take a name away; requests that run finish on what they started with. Raises AdapterRefused."""
        with self._lock:
            ref = self.catalog.remove(name)
            self._retire({ref.digest})
            return ref

    def _retire(self, digests: set[AdapterDigest]) -> None:
        """Retire those that no name stands for."""
        for digest in digests - {entry.ref.digest for entry in self.catalog.list()}:
            self._engine.retire_adapter(digest)
