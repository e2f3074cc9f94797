"""Pins at run time, for operators: an adapter stays in the pool whether or not it is used, until the server ends."""

from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from loraplex.core import InvalidRequest
from loraplex.registry import Principal
from loraplex.server.admin_views import PinView
from loraplex.server.callers import Access
from loraplex.server.context import context_of
from loraplex.server.routing import RouteSpec
from loraplex.server.service import Service


async def pin_adapter(service: Service, http: Request) -> Response:
    """PUT .../pin: pin what the name stands for, now and after it moves. Pinning again changes nothing.

    Where the name was unpinned meanwhile the answer says so.
    """
    tenant, name = _adapter(http)
    digest = await service.preloader.pin(f"{tenant}/{name}")
    if digest is not None:
        await _record(service, http, tenant, name, is_pinned=True)
    return _answer(tenant, name, digest)


async def unpin_adapter(service: Service, http: Request) -> Response:
    """DELETE .../pin. Unpinning what is not pinned changes nothing. What cannot be put on record stays pinned."""
    tenant, name = _adapter(http)
    if service.preloader.is_pinned(f"{tenant}/{name}"):
        await _record(service, http, tenant, name, is_pinned=False)
        await service.preloader.unpin(f"{tenant}/{name}")
    return _answer(tenant, name, None)


def _answer(tenant: str, name: str, digest: str | None) -> Response:
    view = PinView(tenant=tenant, name=name, pinned=digest is not None, digest=digest)
    return JSONResponse(view.model_dump(mode="json"))


def _adapter(http: Request) -> tuple[str, str]:
    tenant, name = str(http.path_params["tenant"]), str(http.path_params["name"])
    if "@" in name:
        raise InvalidRequest(f"A pin follows the name: {name!r:.200} has a version.", "name")
    return tenant, name


async def _record(service: Service, http: Request, tenant: str, name: str, *, is_pinned: bool) -> None:
    """In the registry's audit log."""
    assert service.registry is not None, "these routes belong to a registry"
    record = service.registry.adapters.record_pin
    await service.queries.run(partial(record, _principal(http), tenant, name, is_pinned=is_pinned))


def _principal(http: Request) -> Principal:
    caller = context_of(http).caller
    assert caller is not None, "a guarded route has a caller"
    assert caller.principal is not None, "a registry's callers have principals"
    return caller.principal


_PIN = "/admin/v1/tenants/{tenant}/adapters/{name}/pin"
PIN_ROUTES: tuple[RouteSpec, ...] = (
    RouteSpec("PUT", _PIN, pin_adapter, Access.OPERATOR),
    RouteSpec("DELETE", _PIN, unpin_adapter, Access.OPERATOR),
)
