"""What every handler needs, made once for an app and passed to it."""

from dataclasses import dataclass, field

from structlog.typing import FilteringBoundLogger

from loraplex.registry import Registry
from loraplex.server.bodies import BodyReader
from loraplex.server.catalog import ModelCatalog
from loraplex.server.config import ServerConfig
from loraplex.server.engine_port import ServingEngine
from loraplex.server.local_catalog import LocalModels
from loraplex.server.metrics import Metrics
from loraplex.server.preloading import Preloader
from loraplex.server.tenant_limits import TenantGate
from loraplex.server.threads import TextThreads, WorkerThreads
from loraplex.server.waiters import Waiters
from loraplex.server.work import TenantWork

NUM_QUERY_THREADS = 4
NUM_UPLOAD_THREADS = 2


@dataclass(slots=True, eq=False)
class Lifecycle:
    """Whether the server is on its way out: `/ready` then says no, so that balancers send nothing new."""

    draining: bool = False


@dataclass(frozen=True, slots=True)
class Service:
    """One app's parts. `created` is the unix time that model cards carry.

    Either `registry` or `local_models` is set. `queries` are threads for short calls of the registry, `work` for long
    ones such as publishing and comparing, `uploads` write files as they arrive: so these hold up no authentication.
    """

    engine: ServingEngine
    catalog: ModelCatalog
    config: ServerConfig
    metrics: Metrics
    log: FilteringBoundLogger
    created: int
    queries: WorkerThreads
    bodies: BodyReader
    tenants: TenantGate
    preloader: Preloader
    waiters: Waiters
    registry: Registry | None = None
    local_models: LocalModels | None = None
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    texts: TextThreads = field(default_factory=TextThreads)
    work: TenantWork = field(default_factory=TenantWork)
    uploads: WorkerThreads = field(default_factory=lambda: WorkerThreads(NUM_UPLOAD_THREADS, "loraplex-upload"))
