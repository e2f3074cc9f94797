"""Authentication, bound to routes as a dependency (never to paths, which a Host header can bend)."""

import hashlib
import hmac
from collections.abc import Awaitable, Callable

from fastapi import Request

from loraplex.core.registry_errors import PermissionDenied, Unauthenticated
from loraplex.registry import NotInMemory, Registry
from loraplex.server.callers import LOCAL_CALLER, Access, Caller
from loraplex.server.context import context_of
from loraplex.server.threads import WorkerThreads

_SCHEME = "bearer"
Authenticate = Callable[[Request], Awaitable[Caller]]
"""Says who sent a request. Raises Unauthenticated, the same for every reason."""


def single_key(api_key: str | None) -> Authenticate:
    """Whoever sends `Authorization: Bearer <api_key>`; with None, everyone.

    Both sides are hashed first, so that the constant-time comparison also hides the length of the key.
    """
    expected = hashlib.sha256(api_key.encode()).digest() if api_key is not None else None

    async def authenticate(request: Request) -> Caller:
        if expected is not None:
            given = hashlib.sha256(bearer_token(request).encode("latin-1")).digest()
            if not hmac.compare_digest(given, expected):
                raise Unauthenticated
        return LOCAL_CALLER

    return authenticate


def registry_keys(registry: Registry, threads: WorkerThreads) -> Authenticate:
    """The holders of the registry's keys. Where memory does not tell, the database is asked in one of `threads`."""

    async def authenticate(request: Request) -> Caller:
        key = bearer_token(request)
        try:
            principal = registry.recall_principal(key)
        except NotInMemory:
            principal = await threads.run(registry.authenticate, key)
        return Caller(principal, principal.role)

    return authenticate


def guard(authenticate: Authenticate, access: Access) -> Callable[[Request], Awaitable[None]]:
    """A route dependency: notes who calls on the request's context. Raises Unauthenticated and PermissionDenied."""

    async def check(request: Request) -> None:
        caller = await authenticate(request)
        context_of(request).caller = caller
        if not caller.role.covers(access.role):
            raise PermissionDenied(f"This needs the role {access.role.value}; the key has {caller.role.value}.")

    return check


def bearer_token(request: Request) -> str:
    """The token of the only Authorization header; empty if it is absent, repeated or of another scheme."""
    values = request.headers.getlist("authorization")
    if len(values) != 1:
        return ""
    scheme, _, token = values[0].partition(" ")
    return token.strip() if scheme.lower() == _SCHEME else ""
