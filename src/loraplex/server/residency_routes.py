"""Where adapters are, for operators: in host memory, in the pool, on the way, or given up for a while."""

import re
from bisect import bisect_right
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from loraplex.core import InvalidRequest
from loraplex.server.callers import Access
from loraplex.server.routing import RouteSpec
from loraplex.server.service import Service

MAX_PAGE = 1000
DEFAULT_PAGE = 100


async def residency(service: Service, http: Request) -> Response:
    """GET /admin/v1/residency."""
    after, limit = _page(http)
    adapters = await service.queries.run(service.engine.residency)
    start = bisect_right(adapters, after, key=lambda adapter: adapter.digest)
    shown = adapters[start : start + limit]
    names = service.catalog.names_of({one.digest for one in shown})
    is_more = start + limit < len(adapters)
    return JSONResponse(
        {
            "adapters": [{**asdict(one), "names": list(names.get(one.digest, ()))} for one in shown],
            "next_after": shown[-1].digest if is_more else None,
        }
    )


def _page(http: Request) -> tuple[str, int]:
    """`after` and `limit` of the query. Raises InvalidRequest."""
    for name in http.query_params:
        if name not in ("after", "limit"):
            raise InvalidRequest(f"Unknown query parameter {name!r:.80}; known are after and limit.", name[:80])
    after = http.query_params.get("after", "")
    if not re.fullmatch("[0-9a-f]{0,64}", after):
        raise InvalidRequest(f"after must be a digest, got {after!r:.80}.", "after")
    text = http.query_params.get("limit", str(DEFAULT_PAGE))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= MAX_PAGE):
        raise InvalidRequest(f"limit must be a number from 1 to {MAX_PAGE}, got {text!r:.40}.", "limit")
    return after, int(text)


RESIDENCY_ROUTES: tuple[RouteSpec, ...] = (RouteSpec("GET", "/admin/v1/residency", residency, Access.OPERATOR),)
