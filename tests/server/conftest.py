"""A fake engine, two adapters and an app over them."""

import io
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from fastapi import FastAPI

from loraplex.server import ServerConfig, create_app
from loraplex.testing import FakeEngine

from .helpers import FakeCatalog, LiveServer


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def log_stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def app(engine: FakeEngine, log_stream: io.StringIO) -> FastAPI:
    return create_app(engine, FakeCatalog(), ServerConfig(), log_stream)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


@pytest.fixture
def live(app: FastAPI) -> Iterator[LiveServer]:
    server = LiveServer(app)
    try:
        yield server
    finally:
        server.stop()
