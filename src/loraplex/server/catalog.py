"""Names that the `model` field may hold, for whoever calls."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from loraplex.core import AdapterDigest, AdapterRef
from loraplex.server.callers import Caller
from loraplex.server.host_figures import HostFigures
from loraplex.server.load_backoff import LoadFailure
from loraplex.server.waiters import Waiter

NamesOf = Callable[[Collection[AdapterDigest]], Mapping[AdapterDigest, tuple[str, ...]]]
"""What adapters are called, as far as is known: `ModelCatalog.names_of`, or `model_names`."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One adapter that the caller can name. `created` is in unix seconds.

    `declared_base` is what the adapter's config says. `base_verified` says that whoever published it named the
    fingerprint of the base that is served.
    """

    ref: AdapterRef
    created: float
    declared_base: str | None = None
    base_verified: bool = False


@dataclass(frozen=True, slots=True)
class CatalogPage:
    """Adapters in order of name; `has_more` if others come behind the last one."""

    entries: tuple[ModelEntry, ...]
    has_more: bool


OnResolved = Callable[[AdapterRef | None], None]


def _nothing() -> None:
    """What a lease of the base gives back."""


@dataclass(frozen=True, slots=True)
class ToldLoad:
    """What an answer says of loading, where it is not simply what happened."""

    cold: bool
    load_s: float


@dataclass(slots=True, eq=False)
class ModelLease:
    """What a request runs on: these weights stay in the engine until `release`, whatever the name stands for then.

    `adapter` None is the base. `is_cold` says that the weights had to be read for this request, which took `load_s`.
    `told` is what the caller may know of that, where it may not know all: whether others have the same weights.
    """

    adapter: AdapterRef | None
    is_cold: bool = False
    load_s: float = 0.0
    told: ToldLoad | None = None
    on_release: Callable[[], None] = field(default=_nothing, repr=False)

    def release(self) -> None:
        """Let go of the weights; once, however often it is called."""
        on_release, self.on_release = self.on_release, _nothing
        on_release()


class ModelCatalog(Protocol):
    """Resolves names for callers. All methods are called on the event loop and none blocks it."""

    async def acquire(self, caller: Caller, model: str | None, on_resolved: OnResolved, waiter: Waiter) -> ModelLease:
        """The weights that `model` stands for now, ready in the engine; None is the adapter that the key is bound to.

        `on_resolved` is called with what it stands for (None: the base) before the weights are looked for; `waiter`
        is kept told what is waited for.
        Raises ModelNotFound, also for what others own, InvalidRequest, Overloaded, and what loading raises.
        """
        ...

    async def find(self, caller: Caller, model: str | None) -> ModelEntry | None:
        """What `model` stands for, without its weights; None for the base. Raises as `acquire` does."""
        ...

    async def page(self, caller: Caller, after: str, limit: int) -> CatalogPage:
        """The adapters that the caller may use, from the one behind the name `after`; not the base."""
        ...

    def may_use_base(self, caller: Caller) -> bool:
        """Whether the caller may name the base."""
        ...

    def names_of(self, digests: Collection[AdapterDigest]) -> Mapping[AdapterDigest, tuple[str, ...]]:
        """What adapters are called, for operators, as far as is known without asking anyone."""
        ...

    def model_names(self, digests: Collection[AdapterDigest]) -> Mapping[AdapterDigest, tuple[str, ...]]:
        """What callers write as `model` for them, as far as is known: without versions, and without tenants.

        Each name is one adapter's: the one that it stood for last. A name that is several tenants' is left out, unless
        it is the same weights for all of them.
        """
        ...

    async def refresh_names(self) -> None:
        """Forget what `names_of` and `model_names` know that is not so any more; within a second."""
        ...

    def load_failures(self) -> Mapping[AdapterDigest, LoadFailure]:
        """Adapters that could not be read into host memory and are not tried again now."""
        ...

    def host_figures(self) -> HostFigures:
        """What host memory holds, and what came into it for requests."""
        ...
