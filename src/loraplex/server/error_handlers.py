"""Handlers of what routes raise before an answer has begun: the answer, and its code on the request's log line."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from loraplex.server.answers import identity_headers
from loraplex.server.context import context_of
from loraplex.server.errors import http_error_reply


async def handle_loraplex_error(request: Request, error: Exception) -> Response:
    """Starlette handler of every LoraplexError. If weights had run by then, the headers say which."""
    context = context_of(request)
    reply, served = context.note_error(error), context.tally.served_by
    return reply.response(identity_headers(served) if served is not None else None)


async def handle_http_error(request: Request, error: Exception) -> Response:
    """Starlette handler of HTTPException: routing and body limits."""
    if not isinstance(error, HTTPException):
        return await handle_loraplex_error(request, error)
    reply = http_error_reply(request, error)
    context_of(request).error_code = reply.code
    return reply.response(error.headers)
