"""OpenAI-compatible HTTP over one engine: routes, strict bodies, identity of what ran, metrics, access log."""

from loraplex.server.app import create_app
from loraplex.server.catalog import ModelCatalog, ModelEntry
from loraplex.server.config import ServerConfig
from loraplex.server.run import LoraplexServer, RunConfig, build_server, serve

__all__ = [
    "LoraplexServer",
    "ModelCatalog",
    "ModelEntry",
    "RunConfig",
    "ServerConfig",
    "build_server",
    "create_app",
    "serve",
]
