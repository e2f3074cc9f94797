"""How the server sees the adapter catalog. Implemented by `adapters.AdapterCatalog`."""

from collections.abc import Sequence
from typing import Protocol

from loraplex.core import AdapterRef


class ModelEntry(Protocol):
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


class ModelCatalog(Protocol):
    """Names that the `model` field may hold."""

    def resolve(self, model: str) -> AdapterRef | None:
        """The adapter a name stands for now; None only for the base's own name. Raises ModelNotFound."""
        ...

    def list(self) -> Sequence[ModelEntry]:
        """All adapters that can be called."""
        ...
