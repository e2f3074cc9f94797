"""How the server sees an engine that it may give adapters to."""

from typing import Protocol

from loraplex.adapters import Adapter
from loraplex.core import AdapterDigest, EngineClient
from loraplex.core.comparison import AdapterComparison


class ServingEngine(EngineClient, Protocol):
    """An EngineClient with adapters. These methods block; any thread may call them while the engine steps."""

    def add_adapter(self, adapter: Adapter) -> None:
        """Keep an adapter in host memory, ready for requests; also one that was retired.

        Raises AdapterRefused, and HostMemoryFull where others must go first.
        """
        ...

    def restore_adapter(self, digest: AdapterDigest) -> bool:
        """As `add_adapter`, from what `store_adapter` has kept; False if there is nothing that can be used."""
        ...

    def store_adapter(self, digest: AdapterDigest) -> None:
        """Keep an adapter that was added where `restore_adapter` finds it, if there is such a place."""
        ...

    def set_tenant_weight(self, tenant: str, weight: float) -> None:
        """A tenant of weight 2 is served twice as much as one of weight 1, which is every tenant's at first.

        Does not block.
        """
        ...

    def compare(self, adapter: Adapter) -> AdapterComparison:
        """Hold the adapter, unmerged, against its merged reference. Raises EngineDead."""
        ...
