"""What every handler needs, made once for an app and passed to it."""

from dataclasses import dataclass, field

from structlog.typing import FilteringBoundLogger

from loraplex.core import EngineClient
from loraplex.server.catalog import ModelCatalog
from loraplex.server.config import ServerConfig
from loraplex.server.metrics import Metrics
from loraplex.server.threads import TextThreads


@dataclass(slots=True, eq=False)
class Lifecycle:
    """Whether the server is on its way out: `/ready` then says no, so that balancers send nothing new."""

    draining: bool = False


@dataclass(frozen=True, slots=True)
class Service:
    """One app's parts. `created` is the unix time that model cards carry."""

    engine: EngineClient
    catalog: ModelCatalog
    config: ServerConfig
    metrics: Metrics
    log: FilteringBoundLogger
    created: int
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    texts: TextThreads = field(default_factory=TextThreads)
