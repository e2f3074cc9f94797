"""Running an app on uvicorn: header limits, a ready callback, and a shutdown that lets answers finish."""

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from socket import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.server.connections import limited_protocol
from loraplex.server.context import MAX_HEADER_BYTES
from loraplex.server.service import Service
from loraplex.server.stdlib_logs import logs_as_json

OnReady = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Where to listen, how patient to be and how to stop, in seconds.

    A request's headers must arrive within `header_timeout_s`. There are at most `max_connections` at a time.

    On SIGTERM `/ready` says no at once; after `lame_duck_s` the port closes; running answers get `drain_s` to finish,
    and an error event after that. SIGINT skips the lame duck. A second signal ends the process without waiting.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    lame_duck_s: float = 5.0
    drain_s: int = 45
    keep_alive_s: int = 75
    header_timeout_s: float = 10.0
    max_connections: int = 4096
    backlog: int = 2048


class _QuietCancel:
    """ASGI layer right below uvicorn, which logs the whole stack of a request that the shutdown cancels.

    By the time the cancellation comes here the client has been told and the request is logged.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):
            await self._app(scope, receive, send)


class LoraplexServer(uvicorn.Server):
    """uvicorn's server with our life cycle. `should_exit = True` from any thread stops it as SIGINT does."""

    def __init__(self, config: uvicorn.Config, service: Service, lame_duck_s: float, on_ready: OnReady | None) -> None:
        super().__init__(config)
        self._service = service
        self._lame_duck_s = lame_duck_s
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket] | None = None) -> None:
        """Serve until told to stop. Whatever logs meanwhile does so in lines of our log."""
        with logs_as_json(self._service.log):
            await super().serve(sockets)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Listen, begin preloading, then tell `on_ready` the address, whose port is real even if 0 was asked for."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._service.preloader.start()
        if self._on_ready is not None and self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_ready(str(host), int(port))

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Stop listening and wait for what runs; after a second signal only say how many requests it cuts off."""
        await super().shutdown(sockets)
        await self._service.preloader.close()
        if self.force_exit and self.server_state.tasks:
            self._service.log.error("requests_cut_off", num_requests=len(self.server_state.tasks))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signal handler. Unlike uvicorn's it does not raise the signal again at the end: a clean stop exits with 0."""
        if self._service.lifecycle.draining:
            self.should_exit = self.force_exit = True
            return
        self._service.lifecycle.draining = True
        if sig == signal.SIGINT or self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._loop.call_later, self._lame_duck_s, self._stop)

    def _stop(self) -> None:
        self.should_exit = True


def build_server(app: FastAPI, config: RunConfig, on_ready: OnReady | None = None) -> LoraplexServer:
    """A server ready to `run()`. `on_ready(host, port)` is called in its event loop once it listens."""
    uvicorn_config = uvicorn.Config(
        _QuietCancel(app),
        host=config.host,
        port=config.port,
        loop="auto",  # uvloop where it is installed
        http=limited_protocol(config.header_timeout_s, config.max_connections),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=config.backlog,
        timeout_keep_alive=config.keep_alive_s,
        timeout_graceful_shutdown=config.drain_s,
    )
    return LoraplexServer(uvicorn_config, app.state.service, config.lame_duck_s, on_ready)


def serve(
    app: FastAPI,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    on_ready: OnReady | None = None,
    lame_duck_s: float = 5.0,
    drain_s: int = 45,
) -> None:
    """Serve until a signal stops it. `app` is made by `create_app`; times as in RunConfig."""
    build_server(app, RunConfig(host, port, lame_duck_s, drain_s), on_ready).run()
