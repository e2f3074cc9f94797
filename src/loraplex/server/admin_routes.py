"""The admin API: what the command line does, for whoever has a key with the right to do it.

Handlers take the request apart and put the answer together; `AdminOperations` does the work, with the caller's own
rights, in worker threads. No path and no URL ever comes from a client.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from loraplex.core import BaseDescription, InvalidRequest, ModelNotFound
from loraplex.core.limits import MAX_MODEL_NAME_CHARS
from loraplex.core.registry_errors import PermissionDenied
from loraplex.registry import Registry, Role
from loraplex.server.admin_openapi import describe
from loraplex.server.admin_operations import AdminOperations, BaseClaim
from loraplex.server.admin_schema import (
    MAX_VERSION,
    ActivateBody,
    EmptyBody,
    LimitsBody,
    NewKeyBody,
    NewTenantBody,
    RollbackBody,
    VerifyBody,
)
from loraplex.server.admin_uploads import MAX_UPLOAD_BYTES, UploadForm, boundary_of, receive_form
from loraplex.server.admin_views import VersionView, View
from loraplex.server.callers import Access
from loraplex.server.context import context_of
from loraplex.server.pin_routes import PIN_ROUTES
from loraplex.server.routing import RouteSpec
from loraplex.server.service import Service
from loraplex.server.work import WorkKind

_TENANT = "/admin/v1/tenants/{tenant}"
_ADAPTER = f"{_TENANT}/adapters/{{name}}"
_VERSION = f"{_ADAPTER}/versions/{{version}}"


# ---------------------------------------------------------------------- who, and tenants
async def whoami(service: Service, http: Request) -> Response:
    """GET /admin/v1/caller."""
    return _json(_operations(service, http).whoami())


async def list_tenants(service: Service, http: Request) -> Response:
    """GET /admin/v1/tenants."""
    after, limit = _page(http)
    return _json(await service.queries.run(_operations(service, http).list_tenants, after, limit))


async def create_tenant(service: Service, http: Request) -> Response:
    """POST /admin/v1/tenants."""
    body = await service.bodies.read(http, NewTenantBody)
    return _json(await service.queries.run(_operations(service, http).create_tenant, body.tenant), 201)


async def disable_tenant(service: Service, http: Request) -> Response:
    """POST .../disable."""
    await service.bodies.read(http, EmptyBody)
    return _json(await service.queries.run(_operations(service, http).disable_tenant, _tenant(http)))


async def enable_tenant(service: Service, http: Request) -> Response:
    """POST .../enable."""
    await service.bodies.read(http, EmptyBody)
    return _json(await service.queries.run(_operations(service, http).enable_tenant, _tenant(http)))


async def show_tenant(service: Service, http: Request) -> Response:
    """GET /admin/v1/tenants/{tenant}."""
    return _json(await service.queries.run(_operations(service, http).show_tenant, _tenant(http)))


async def change_limits(service: Service, http: Request) -> Response:
    """PATCH .../limits. What the body leaves out stays as it is."""
    body = await service.bodies.read(http, LimitsBody)
    return _json(await service.queries.run(_operations(service, http).change_limits, _tenant(http), body.changes()))


async def openapi(service: Service, http: Request) -> Response:
    """GET /admin/v1/openapi.json."""
    return JSONResponse(describe(ADMIN_ROUTES))


# ---------------------------------------------------------------------- keys
async def list_keys(service: Service, http: Request) -> Response:
    """GET .../keys."""
    after, limit = _page(http)
    return _json(await service.queries.run(_operations(service, http).list_keys, _tenant(http), after, limit))


async def create_key(service: Service, http: Request) -> Response:
    """POST .../keys. The answer holds the key's text, so nothing may keep it."""
    body = await service.bodies.read(http, NewKeyBody)
    create = _operations(service, http).create_key
    view = await service.queries.run(create, _tenant(http), Role(body.role), body.bound_adapter, body.expires_at)
    answer = _json(view, 201)
    answer.headers["Cache-Control"] = "no-store"
    return answer


async def revoke_key(service: Service, http: Request) -> Response:
    """DELETE .../keys/{key_id}."""
    key_id = str(http.path_params["key_id"])
    return _json(await service.queries.run(_operations(service, http).revoke_key, _tenant(http), key_id))


# ---------------------------------------------------------------------- adapters
async def list_adapters(service: Service, http: Request) -> Response:
    """GET .../adapters."""
    after, limit = _page(http)
    return _json(await service.queries.run(_operations(service, http).list_adapters, _tenant(http), after, limit))


async def show_adapter(service: Service, http: Request) -> Response:
    """GET .../adapters/{name}."""
    return _json(await service.queries.run(_operations(service, http).show_adapter, *_adapter(http)))


async def upload_version(service: Service, http: Request) -> Response:
    """POST .../versions: a form with `config`, `weights` and what is known of the base."""
    boundary = boundary_of(http)
    with service.work.place(WorkKind.UPLOAD, _account(http)):
        view = await _receive_version(service, http, boundary)
    target = context_of(http).target
    target.version, target.digest = view.version, view.digest
    return _json(view, 201)


async def _receive_version(service: Service, http: Request, boundary: bytes) -> VersionView:
    tenant, name = _adapter(http)
    operations, registry = _operations(service, http), _registry(service)
    await service.queries.run(operations.list_adapters, tenant, "", 1)  # refuses strangers before their bytes
    with ExitStack() as stack:
        upload = registry.upload_directory(_declared_len(http))
        directory = await service.queries.run(stack.enter_context, upload)
        form = UploadForm(boundary, directory, registry.adapter_limits)
        claim = await receive_form(http, form, service.uploads, service.config.body_timeout_s)
        publish = _publisher(stack.pop_all(), operations, directory, service.engine.base)
        return await service.work.run(_account(http), publish, tenant, name, claim)


async def verify_version(service: Service, http: Request) -> Response:
    """POST .../verify: the engine that serves compares, beside its requests."""
    body = await service.bodies.read(http, VerifyBody)
    operations, (tenant, name), version = _operations(service, http), _adapter(http), _version(http)
    await _note_version(service, http, version)
    if body.skip:
        return _json(await service.queries.run(operations.skip_verification, tenant, name, version))
    engine = service.engine
    account = _account(http)
    with service.work.place(WorkKind.VERIFICATION, account):
        call = operations.compare
        return _json(await service.work.run(account, call, tenant, name, version, engine.base, engine.compare))


async def activate(service: Service, http: Request) -> Response:
    """POST .../activate."""
    body = await service.bodies.read(http, ActivateBody)
    call = _operations(service, http).activate
    await _note_version(service, http, body.version)
    return _json(await service.queries.run(call, *_adapter(http), body.version, body.expected))


async def rollback(service: Service, http: Request) -> Response:
    """POST .../rollback."""
    body = await service.bodies.read(http, RollbackBody)
    view = await service.queries.run(_operations(service, http).rollback, *_adapter(http), body.expected)
    if view.active is not None:
        await _note_version(service, http, view.active)
    return _json(view)


async def delete_adapter(service: Service, http: Request) -> Response:
    """DELETE .../adapters/{name}."""
    return _json(await service.queries.run(_operations(service, http).delete_adapter, *_adapter(http)))


async def delete_version(service: Service, http: Request) -> Response:
    """DELETE .../versions/{version}."""
    call = _operations(service, http).delete_version
    await _note_version(service, http, _version(http))
    return _json(await service.queries.run(call, *_adapter(http), _version(http)))


async def grant(service: Service, http: Request) -> Response:
    """PUT .../grants/{grantee}."""
    grantee = str(http.path_params["grantee"])
    return _json(await service.queries.run(_operations(service, http).grant, *_adapter(http), grantee))


async def revoke_grant(service: Service, http: Request) -> Response:
    """DELETE .../grants/{grantee}."""
    grantee = str(http.path_params["grantee"])
    return _json(await service.queries.run(_operations(service, http).revoke_grant, *_adapter(http), grantee))


# ---------------------------------------------------------------------- audit
async def list_audit(service: Service, http: Request) -> Response:
    """GET .../audit."""
    after, limit = _page(http)
    seq = _number(after or "0", "after", 2**53)
    return _json(await service.queries.run(_operations(service, http).audit_entries, _tenant(http), seq, limit))


async def verify_tenant_audit(service: Service, http: Request) -> Response:
    """GET .../audit/verify."""
    return await _check_audit(service, http, _tenant(http))


async def verify_audit(service: Service, http: Request) -> Response:
    """GET /admin/v1/audit/verify."""
    return await _check_audit(service, http, None)


async def _check_audit(service: Service, http: Request, tenant: str | None) -> Response:
    account = _account(http)
    with service.work.place(WorkKind.AUDIT, account):
        return _json(await service.work.run(account, _operations(service, http).verify_audit, tenant))


# ---------------------------------------------------------------------- inside
def _operations(service: Service, http: Request) -> AdminOperations:
    """The operations with the caller's rights. Raises PermissionDenied for a caller who is nobody's."""
    caller = context_of(http).caller
    if caller is None or caller.principal is None:
        raise PermissionDenied("The admin API needs a key of the registry.")
    return AdminOperations(_registry(service), caller.principal)


def _account(http: Request) -> str:
    return context_of(http).known_caller.account


def _registry(service: Service) -> Registry:
    assert service.registry is not None, "the admin API is there with a registry only"
    return service.registry


def _publisher(
    upload: ExitStack, operations: AdminOperations, directory: Path, base: BaseDescription
) -> Callable[[str, str, BaseClaim], VersionView]:
    """Publishes, then removes the upload: in one thread, so that a request that is cancelled takes nothing away."""

    def publish(tenant: str, name: str, claim: BaseClaim) -> VersionView:
        with upload:
            return operations.publish(tenant, name, directory, base, claim)

    return publish


def _json(view: View, status: int = 200) -> JSONResponse:
    return JSONResponse(view.model_dump(mode="json"), status)


def _tenant(http: Request) -> str:
    return str(http.path_params["tenant"])


def _adapter(http: Request) -> tuple[str, str]:
    return _tenant(http), str(http.path_params["name"])


def _version(http: Request) -> int:
    text = str(http.path_params["version"])
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_VERSION))):
        raise ModelNotFound("/".join(_adapter(http)) + f"@{text:.20}")
    return int(text)


async def _note_version(service: Service, http: Request, version: int) -> None:
    """Put the version that a request is about on its log line, with its digest."""
    target, operations = context_of(http).target, _operations(service, http)
    target.version = version
    target.digest = await service.queries.run(operations.digest_of, *_adapter(http), version)


def _page(http: Request) -> tuple[str, int]:
    """`after` and `limit` of the query. Raises InvalidRequest for others and for what they cannot be."""
    for name in http.query_params:
        if name not in ("after", "limit"):
            raise InvalidRequest(f"Unknown query parameter {name!r:.80}; known are after and limit.", name[:80])
    after = http.query_params.get("after", "")
    if len(after) > MAX_MODEL_NAME_CHARS or not after.isprintable():
        raise InvalidRequest(f"after must be at most {MAX_MODEL_NAME_CHARS} printable characters.", "after")
    return after, _number(http.query_params.get("limit", "100"), "limit", 2**31)


def _number(text: str, name: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 18 and int(text) <= most):
        raise InvalidRequest(f"{name} must be a number from 0 to {most}, got {text!r:.40}.", name)
    return int(text)


def _declared_len(http: Request) -> int:
    """Content-Length as far as an upload may have it; 0 where there is none that can be read."""
    text = http.headers.get("content-length", "")
    return min(int(text), MAX_UPLOAD_BYTES) if text.isascii() and text.isdigit() and len(text) < 20 else 0


ADMIN_ROUTES: tuple[RouteSpec, ...] = (
    RouteSpec("GET", "/admin/v1/caller", whoami, Access.ADMIN),
    RouteSpec("GET", "/admin/v1/openapi.json", openapi, Access.ADMIN),
    RouteSpec("GET", "/admin/v1/tenants", list_tenants, Access.OPERATOR),
    RouteSpec("POST", "/admin/v1/tenants", create_tenant, Access.OPERATOR),
    RouteSpec("POST", f"{_TENANT}/disable", disable_tenant, Access.OPERATOR),
    RouteSpec("POST", f"{_TENANT}/enable", enable_tenant, Access.OPERATOR),
    RouteSpec("GET", _TENANT, show_tenant, Access.ADMIN),
    RouteSpec("PATCH", f"{_TENANT}/limits", change_limits, Access.OPERATOR),
    RouteSpec("GET", f"{_TENANT}/keys", list_keys, Access.ADMIN),
    RouteSpec("POST", f"{_TENANT}/keys", create_key, Access.ADMIN),
    RouteSpec("DELETE", f"{_TENANT}/keys/{{key_id}}", revoke_key, Access.ADMIN),
    RouteSpec("GET", f"{_TENANT}/adapters", list_adapters, Access.ADMIN),
    RouteSpec("GET", _ADAPTER, show_adapter, Access.ADMIN),
    RouteSpec("DELETE", _ADAPTER, delete_adapter, Access.ADMIN),
    RouteSpec("POST", f"{_ADAPTER}/versions", upload_version, Access.ADMIN, MAX_UPLOAD_BYTES),
    RouteSpec("DELETE", _VERSION, delete_version, Access.ADMIN),
    RouteSpec("POST", f"{_VERSION}/verify", verify_version, Access.ADMIN),
    RouteSpec("POST", f"{_ADAPTER}/activate", activate, Access.ADMIN),
    RouteSpec("POST", f"{_ADAPTER}/rollback", rollback, Access.ADMIN),
    RouteSpec("PUT", f"{_ADAPTER}/grants/{{grantee}}", grant, Access.OPERATOR),
    RouteSpec("DELETE", f"{_ADAPTER}/grants/{{grantee}}", revoke_grant, Access.OPERATOR),
    *PIN_ROUTES,
    RouteSpec("GET", f"{_TENANT}/audit", list_audit, Access.ADMIN),
    RouteSpec("GET", f"{_TENANT}/audit/verify", verify_tenant_audit, Access.ADMIN),
    RouteSpec("GET", "/admin/v1/audit/verify", verify_audit, Access.OPERATOR),
)
