"""What a route is: one line of the app's table."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from loraplex.server.callers import Access
from loraplex.server.service import Service

Handler = Callable[[Service, Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """One route of the app. `max_body_bytes` None stands for the server's general limit."""

    method: str
    path: str
    handler: Handler
    access: Access = Access.CALLER
    max_body_bytes: int | None = None

    @property
    def public(self) -> bool:
        """Whether it answers without a key."""
        return self.access is Access.PUBLIC
