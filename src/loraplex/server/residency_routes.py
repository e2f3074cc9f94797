"""Where adapters are, for operators: in host memory, in the pool, on the way, or given up for a while."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from loraplex.core import AdapterDigest, AdapterResidence, InvalidRequest
from loraplex.server.callers import Access
from loraplex.server.load_backoff import LoadFailure
from loraplex.server.routing import RouteSpec
from loraplex.server.service import Service

MAX_PAGE = 1000
DEFAULT_PAGE = 100
_ABSENT, _FAILED = "absent", "failed"  # states


async def residency(service: Service, http: Request) -> Response:
    """GET /admin/v1/residency."""
    after, limit = _page(http)
    await service.catalog.refresh_names()
    held = await service.queries.run(service.engine.residency)
    adapters = _with_failures(held, service.catalog.load_failures())
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


def _with_failures(
    held: Iterable[AdapterResidence], failures: Mapping[AdapterDigest, LoadFailure]
) -> list[AdapterResidence]:
    """What the engine holds, and what could not be read into it, one row for each adapter, by digest."""
    rows = {digest: AdapterResidence(digest, _ABSENT, False, 0, 0, 0, 0.0, None) for digest in failures}
    rows |= {one.digest: one for one in held}
    for digest, failure in failures.items():
        is_absent = rows[digest].state == _ABSENT
        rows[digest] = replace(
            rows[digest],
            state=_FAILED if is_absent else rows[digest].state,
            error_code=failure.code,
            retry_after_s=round(failure.retry_after_s, 3),
        )
    return [rows[digest] for digest in sorted(rows)]


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
