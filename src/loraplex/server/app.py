"""Putting the server together."""

import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TextIO, cast

import structlog
from fastapi import Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from structlog.typing import FilteringBoundLogger

from loraplex.core import ConfigError, LoraplexError, ModelNotFound
from loraplex.registry import Registry
from loraplex.server.adapter_names import LocalNames, RegistryNames
from loraplex.server.admin_routes import ADMIN_ROUTES
from loraplex.server.auth import Authenticate, guard, registry_keys, single_key
from loraplex.server.bodies import BodyBudget, BodyReader
from loraplex.server.body import limited
from loraplex.server.body_limits import body_limits
from loraplex.server.callers import Access
from loraplex.server.config import ServerConfig
from loraplex.server.context import ContextMiddleware
from loraplex.server.engine_metrics import EngineCollector
from loraplex.server.engine_port import ServingEngine
from loraplex.server.error_handlers import handle_http_error, handle_loraplex_error
from loraplex.server.host_adapters import HostAdapters
from loraplex.server.host_room import HostRoom
from loraplex.server.local_catalog import LocalCatalog, LocalModels
from loraplex.server.metrics import Metrics
from loraplex.server.preloading import Preloader
from loraplex.server.redaction import Redactor
from loraplex.server.registry_catalog import RegistryCatalog
from loraplex.server.residency_routes import RESIDENCY_ROUTES
from loraplex.server.routes import ROUTES, metrics
from loraplex.server.routing import RouteSpec
from loraplex.server.runtime_routes import RUNTIME_ROUTES
from loraplex.server.service import NUM_QUERY_THREADS, Service
from loraplex.server.tenant_limits import TenantGate
from loraplex.server.threads import WorkerThreads
from loraplex.server.waiters import Waiters

_LEVEL_INFO, _LEVEL_ERROR = 20, 40


def create_app(
    engine: ServingEngine, models: LocalModels | Registry, config: ServerConfig, log_stream: TextIO | None = None
) -> FastAPI:
    """The OpenAI-compatible app over one engine. Log lines (JSON) go to `log_stream`, standard error by default.

    With a registry each caller has a key of its own and sees its own models; without one there is at most one key, and
    the names are the same for all. `app.state.service` is the `Service` that the handlers use. Raises ConfigError.
    """
    service = _service(engine, models, config, log_stream or sys.stderr)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    app.add_exception_handler(LoraplexError, handle_loraplex_error)
    app.add_exception_handler(HTTPException, handle_http_error)
    _add_routes(app, service)
    app.add_middleware(ContextMiddleware, metrics=service.metrics, log=service.log, redactor=Redactor(config.api_key))
    return app


def _service(engine: ServingEngine, models: LocalModels | Registry, config: ServerConfig, stream: TextIO) -> Service:
    queries = WorkerThreads(NUM_QUERY_THREADS, "loraplex-registry")
    registry = models if isinstance(models, Registry) else None
    local_models = None if isinstance(models, Registry) else models
    catalog: LocalCatalog | RegistryCatalog
    names: LocalNames | RegistryNames
    if isinstance(models, Registry):
        room = HostRoom(config.max_host_adapters, config.host_adapter_bytes)
        host = HostAdapters(engine, room, config.host_patience_s, config.adapter_read_timeout_s)
        catalog = RegistryCatalog(models, engine, queries, host)
        names = RegistryNames(models, engine, queries, host, catalog.note)
    else:
        _check_same_base(engine, models)
        catalog = LocalCatalog(models)
        names = LocalNames(models)
    waiters = Waiters(engine)
    log = _json_logger(stream, _LEVEL_INFO if config.access_log else _LEVEL_ERROR, Redactor(config.api_key))
    return Service(
        engine=engine,
        catalog=catalog,
        config=config,
        metrics=Metrics(EngineCollector(engine.stats, catalog.host_figures, waiters.figures, catalog.model_names)),
        waiters=waiters,
        log=log,
        created=int(time.time()),
        queries=queries,
        bodies=_body_reader(engine, config),
        tenants=TenantGate(engine),
        preloader=Preloader(engine, names, catalog.names_of, config.preloads, log),
        registry=registry,
        local_models=local_models,
    )


def _body_reader(engine: ServingEngine, config: ServerConfig) -> BodyReader:
    allowed = body_limits(engine.max_model_len, config.max_body_bytes)
    budget = BodyBudget(config.body_budget_bytes, max(config.body_budget_bytes // 4, allowed.num_bytes))
    return BodyReader(allowed, budget, config.body_timeout_s)


def _check_same_base(engine: ServingEngine, models: LocalModels) -> None:
    """Raise ConfigError unless the engine's base can be called by its own name."""
    name = engine.base.name
    try:
        is_base = models.resolve(name) is None
    except ModelNotFound:
        is_base = False
    if not is_base:
        raise ConfigError(f"The catalog does not take {name!r}, the engine's base, for a base (--served-model-name).")


def route_table(service: Service) -> tuple[RouteSpec, ...]:
    """All routes of a server, with who may use them."""
    table = ROUTES + RESIDENCY_ROUTES
    if service.registry is not None:
        table += ADMIN_ROUTES
        if not service.config.public_metrics:
            table = tuple(replace(spec, access=Access.OPERATOR) if spec.handler is metrics else spec for spec in table)
    return table + RUNTIME_ROUTES if service.config.adapter_roots is not None else table


def _add_routes(app: FastAPI, service: Service) -> None:
    authenticate = _authenticator(service)
    for spec in route_table(service):
        app.add_api_route(
            spec.path,
            _endpoint(service, spec),
            methods=[spec.method],
            dependencies=[] if spec.public else [Depends(guard(authenticate, spec.access))],
            name=spec.handler.__name__,
            response_model=None,
        )


def _authenticator(service: Service) -> Authenticate:
    if service.registry is not None:
        return registry_keys(service.registry, service.queries)
    return single_key(service.config.api_key)


def _endpoint(service: Service, spec: RouteSpec) -> Callable[[Request], Awaitable[Response]]:
    max_body_bytes = spec.max_body_bytes or service.bodies.max_bytes

    async def endpoint(request: Request) -> Response:
        return await spec.handler(service, limited(request, max_body_bytes))

    return endpoint


def _json_logger(stream: TextIO, min_level: int, redactor: Redactor) -> FilteringBoundLogger:
    """A logger of its own, so that importing loraplex configures nothing for anyone else."""
    logger = structlog.wrap_logger(
        structlog.WriteLogger(stream),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            redactor,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(min_level),
        context_class=dict,
    )
    return cast("FilteringBoundLogger", logger)
