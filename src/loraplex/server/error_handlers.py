"""Handlers of what routes raise before an answer has begun: the answer, and its code on the request's log line."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from loraplex.server.context import context_of
from loraplex.server.errors import http_error_reply


async def handle_loraplex_error(request: Request, error: Exception) -> Response:
    """Starlette handler of every LoraplexError. The headers say which weights the request had, if it had any."""
    context = context_of(request)
    return context.note_error(error).response(context.identity_headers())


async def handle_http_error(request: Request, error: Exception) -> Response:
    """Starlette handler of HTTPException: routing and body limits."""
    if not isinstance(error, HTTPException):
        return await handle_loraplex_error(request, error)
    return context_of(request).note_reply(http_error_reply(request, error)).response(error.headers)
