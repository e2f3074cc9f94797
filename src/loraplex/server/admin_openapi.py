"""The admin API as an OpenAPI 3.1 document, made from the routes, bodies and answers themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from loraplex.server import admin_schema as bodies
from loraplex.server import admin_views as views
from loraplex.server.admin_uploads import FIELDS
from loraplex.server.callers import Access
from loraplex.server.routing import RouteSpec
from loraplex.server.schema import Body

_REFS = "#/components/schemas/{model}"
_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Operation:
    """What a handler takes and answers with."""

    answer: type[views.View] | None  # None: this document
    body: type[Body] | None = None
    status: int = 200
    is_list: bool = False
    is_upload: bool = False


OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        "openapi": Operation(None),
        "whoami": Operation(views.CallerView),
        "list_tenants": Operation(views.TenantPage, is_list=True),
        "create_tenant": Operation(views.TenantView, bodies.NewTenantBody, 201),
        "disable_tenant": Operation(views.TenantView, bodies.EmptyBody),
        "enable_tenant": Operation(views.TenantView, bodies.EmptyBody),
        "show_tenant": Operation(views.TenantView),
        "change_limits": Operation(views.TenantView, bodies.LimitsBody),
        "list_keys": Operation(views.KeyPage, is_list=True),
        "create_key": Operation(views.CreatedKeyView, bodies.NewKeyBody, 201),
        "revoke_key": Operation(views.KeyView),
        "list_adapters": Operation(views.AdapterPage, is_list=True),
        "show_adapter": Operation(views.AdapterDetailView),
        "delete_adapter": Operation(views.DeletedView),
        "upload_version": Operation(views.VersionView, status=201, is_upload=True),
        "delete_version": Operation(views.DeletedView),
        "verify_version": Operation(views.VerifiedView, bodies.VerifyBody),
        "activate": Operation(views.AliasView, bodies.ActivateBody),
        "rollback": Operation(views.AliasView, bodies.RollbackBody),
        "grant": Operation(views.GrantView),
        "revoke_grant": Operation(views.GrantView),
        "pin_adapter": Operation(views.PinView),
        "unpin_adapter": Operation(views.PinView),
        "list_audit": Operation(views.AuditPage, is_list=True),
        "verify_tenant_audit": Operation(views.AuditReportView),
        "verify_audit": Operation(views.AuditReportView),
    }
)
"""By the name of the handler."""


def describe(routes: Sequence[RouteSpec]) -> dict[str, Any]:
    """The document."""
    models: list[type[BaseModel]] = []
    paths: dict[str, dict[str, Any]] = {}
    for spec in routes:
        operation = OPERATIONS[spec.handler.__name__]
        models += [model for model in (operation.answer, operation.body) if model is not None]
        paths.setdefault(spec.path, {})[spec.method.lower()] = _operation(spec, operation)
    _, definitions = models_json_schema([(model, "validation") for model in dict.fromkeys(models)], ref_template=_REFS)
    return {
        "openapi": "3.1.0",
        "info": {"title": "loraplex admin API", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": {**definitions["$defs"], "Error": _error()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(spec: RouteSpec, operation: Operation) -> dict[str, Any]:
    answer = _ref(operation.answer) if operation.answer is not None else {"type": "object"}
    described: dict[str, Any] = {
        "operationId": spec.handler.__name__,
        "summary": (spec.handler.__doc__ or "").partition("\n")[0],
        "description": f"Needs a key with the role {Access(spec.access).role.value} or above.",
        "parameters": _parameters(spec.path, operation.is_list),
        "responses": {
            str(operation.status): {"description": "done", "content": {_JSON: {"schema": answer}}},
            "default": {"description": "an error", "content": {_JSON: {"schema": _ref_of("Error")}}},
        },
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(operation.body)}}}
    if operation.is_upload:
        described["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _form()}}}
    return described


def _parameters(path: str, is_list: bool) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    found = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    if is_list:
        limit = {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}
        found.append({"name": "after", "in": "query", "required": False, "schema": {"type": "string"}})
        found.append({"name": "limit", "in": "query", "required": False, "schema": limit})
    return found


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return _ref_of(model.__name__)


def _ref_of(name: str) -> dict[str, str]:
    return {"$ref": _REFS.format(model=name)}


def _form() -> dict[str, Any]:
    """The form of an upload."""
    return {
        "type": "object",
        "required": ["config", "weights"],
        "additionalProperties": False,
        "properties": {
            "config": {"type": "string", "format": "binary"},
            "weights": {"type": "string", "format": "binary"},
            **{name: {"type": "string"} for name in FIELDS},
        },
    }


def _error() -> dict[str, Any]:
    """The one shape of errors."""
    return {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": "string"},
                    "reason": {"type": "string"},
                },
            }
        },
    }
