"""OpenAI-compatible HTTP over one engine: routes, callers, strict bodies, identity of what ran, metrics, access log."""

from loraplex.server.adapter_roots import check_roots
from loraplex.server.app import create_app
from loraplex.server.callers import Access, Caller
from loraplex.server.catalog import ModelCatalog, ModelEntry, ModelLease
from loraplex.server.config import ServerConfig
from loraplex.server.engine_port import ServingEngine
from loraplex.server.local_catalog import LocalModels
from loraplex.server.routing import RouteSpec
from loraplex.server.run import LoraplexServer, RunConfig, build_server, serve

__all__ = [
    "Access",
    "Caller",
    "LocalModels",
    "LoraplexServer",
    "ModelCatalog",
    "ModelEntry",
    "ModelLease",
    "RouteSpec",
    "RunConfig",
    "ServerConfig",
    "ServingEngine",
    "build_server",
    "check_roots",
    "create_app",
    "serve",
]
