"""Putting the server together."""

import sys
import time
from collections.abc import Awaitable, Callable
from typing import TextIO, cast

import structlog
from fastapi import Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from structlog.typing import FilteringBoundLogger

from loraplex.core import ConfigError, EngineClient, LoraplexError, ModelNotFound
from loraplex.server.auth import key_check
from loraplex.server.body import BodyLimit
from loraplex.server.catalog import ModelCatalog
from loraplex.server.config import ServerConfig
from loraplex.server.context import ContextMiddleware
from loraplex.server.errors import handle_http_error, handle_loraplex_error
from loraplex.server.metrics import Metrics
from loraplex.server.routes import ROUTES, Handler
from loraplex.server.service import Service

_LEVEL_INFO, _LEVEL_ERROR = 20, 40


def create_app(
    engine: EngineClient, catalog: ModelCatalog, config: ServerConfig, log_stream: TextIO | None = None
) -> FastAPI:
    """The OpenAI-compatible app over one engine. Log lines (JSON) go to `log_stream`, standard error by default.

    `app.state.service` is the `Service` that the handlers use. Raises ConfigError if the catalog is of another base.
    """
    _check_same_base(engine, catalog)
    service = Service(
        engine=engine,
        catalog=catalog,
        config=config,
        metrics=Metrics(engine.stats, lambda: len(catalog.list())),
        log=_json_logger(log_stream or sys.stderr, _LEVEL_INFO if config.access_log else _LEVEL_ERROR),
        created=int(time.time()),
    )
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    app.add_exception_handler(LoraplexError, handle_loraplex_error)
    app.add_exception_handler(HTTPException, handle_http_error)
    _add_routes(app, service)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    app.add_middleware(ContextMiddleware, metrics=service.metrics, log=service.log)  # added last, so outermost
    return app


def _check_same_base(engine: EngineClient, catalog: ModelCatalog) -> None:
    """Raise ConfigError unless the engine's base can be called by its own name."""
    name = engine.base.name
    try:
        is_base = catalog.resolve(name) is None
    except ModelNotFound:
        is_base = False
    if not is_base:
        raise ConfigError(f"The catalog does not take {name!r}, the engine's base, for a base (--served-model-name).")


def _add_routes(app: FastAPI, service: Service) -> None:
    guard = [Depends(key_check(service.config.api_key))]
    for spec in ROUTES:
        app.add_api_route(
            spec.path,
            _endpoint(service, spec.handler),
            methods=[spec.method],
            dependencies=None if spec.public else guard,
            name=spec.handler.__name__,
            response_model=None,
        )


def _endpoint(service: Service, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(service, request)

    return endpoint


def _json_logger(stream: TextIO, min_level: int) -> FilteringBoundLogger:
    """A logger of its own, so that importing loraplex configures nothing for anyone else."""
    logger = structlog.wrap_logger(
        structlog.WriteLogger(stream),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(min_level),
        context_class=dict,
    )
    return cast("FilteringBoundLogger", logger)
