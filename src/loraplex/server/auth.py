"""The API key check, bound to routes as a dependency (never to paths, which a Host header can bend)."""

import hashlib
import hmac
from collections.abc import Awaitable, Callable

from fastapi import Request
from starlette.exceptions import HTTPException

_SCHEME = "bearer"


def key_check(api_key: str | None) -> Callable[[Request], Awaitable[None]]:
    """A route dependency that raises 401 unless the caller sent `Authorization: Bearer <api_key>`.

    Both sides are hashed first, so that the constant-time comparison also hides the length of the key.
    """
    expected = hashlib.sha256(api_key.encode()).digest() if api_key is not None else None

    async def check(request: Request) -> None:
        if expected is None:
            return
        given = hashlib.sha256(_bearer_token(request)).digest()
        if not hmac.compare_digest(given, expected):
            raise HTTPException(401, "A valid API key is required.", {"WWW-Authenticate": "Bearer"})

    return check


def _bearer_token(request: Request) -> bytes:
    """The token of the only Authorization header; empty if it is absent, repeated or of another scheme."""
    values = request.headers.getlist("authorization")
    if len(values) != 1:
        return b""
    scheme, _, token = values[0].partition(" ")
    return token.strip().encode("latin-1") if scheme.lower() == _SCHEME else b""
