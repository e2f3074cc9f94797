"""vLLM's endpoints for loading and unloading adapters while the server runs, with its answers; for operators.

Without a registry an adapter gets a name of the server. With one it becomes a version of the operator's own tenant and
goes through the same checks as any other, the comparison with its merged reference included, before it is activated.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from loraplex.core import AdapterRefused, ModelNotFound, RefusalReason, ServerError
from loraplex.core.registry_errors import AdapterNotVerified
from loraplex.registry import Principal, Registry
from loraplex.server.adapter_roots import find_directory
from loraplex.server.admin_operations import AdminOperations
from loraplex.server.callers import Access, Caller
from loraplex.server.context import context_of
from loraplex.server.errors import ErrorKind, ErrorReply
from loraplex.server.identity import Target
from loraplex.server.routing import RouteSpec
from loraplex.server.schema import LoadAdapterBody, UnloadAdapterBody
from loraplex.server.service import Service
from loraplex.server.work import WorkKind

_USER_INPUT = ErrorKind(400, "InvalidUserInput")
_NOT_FOUND = ErrorKind(404, "NotFoundError")
_BAD_REQUEST = ErrorKind(400, "BadRequestError")


class _Refused(Exception):
    """An answer of vLLM's own to a request that it does not carry out."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(reply.message)
        self.reply = reply


async def load_adapter(service: Service, http: Request) -> Response:
    """POST /v1/load_lora_adapter."""
    body = await service.bodies.read(http, LoadAdapterBody)
    target = context_of(http).target
    return await _answer(service, http, body.lora_name, lambda caller: _load(service, caller, body, target), "added")


async def unload_adapter(service: Service, http: Request) -> Response:
    """POST /v1/unload_lora_adapter. With a registry the name is deleted with all its versions."""
    body = await service.bodies.read(http, UnloadAdapterBody)
    target = context_of(http).target
    return await _answer(
        service, http, body.lora_name, lambda caller: _unload(service, caller, body, target), "removed"
    )


async def _answer(service: Service, http: Request, name: str, work: Callable[[Caller], None], done: str) -> Response:
    context = context_of(http)
    context.requested_model, caller = name, context.known_caller
    context.target.tenant, context.target.adapter = caller.tenant, name or None
    try:
        with service.work.place(WorkKind.LOAD, caller.account):
            await service.work.run(caller.account, work, caller)
    except _Refused as refused:
        return context.note_reply(refused.reply).response()
    return PlainTextResponse(f"Success: LoRA adapter '{name}' {done} successfully.")


def _load(service: Service, caller: Caller, body: LoadAdapterBody, target: Target) -> None:
    """Blocks for as long as reading, checking and comparing take. `target` learns what was made."""
    name = body.lora_name
    if not name or not body.lora_path:
        raise _user_input("Both 'lora_name' and 'lora_path' must be provided.")
    if not body.load_inplace and name in _taken_names(service, caller, name):
        raise _user_input(
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
            "'load_inplace' to True.",
            RefusalReason.NAME_CONFLICT,
        )
    directory = find_directory(body.lora_path, service.config.adapter_roots or ())
    if directory is None:
        raise _not_found(f"Loading lora {name} failed: No adapter found for {body.lora_path}")
    _check_base(service, body.base_fingerprint)
    if service.local_models is not None:
        ref = service.local_models.load(name, directory, created=time.time(), replace=body.load_inplace)
        target.version, target.digest = ref.version, ref.digest
    else:
        _publish(service, *_registry_of(service, caller), body, directory, target)


def _check_base(service: Service, fingerprint: str | None) -> None:
    base = service.engine.base
    if fingerprint is not None and fingerprint != base.fingerprint:
        message = f"The adapter is for the base {fingerprint:.12}..., but {base.fingerprint[:12]}... is served."
        raise AdapterRefused(RefusalReason.BASE_MISMATCH, message, "base_fingerprint")


def _publish(
    service: Service,
    registry: Registry,
    principal: Principal,
    body: LoadAdapterBody,
    directory: Path,
    target: Target,
) -> None:
    """Publish, compare, activate. What fails leaves the name standing for what it stood for."""
    name, tenant, base = body.lora_name, principal.tenant, service.engine.base
    active = _active_version(registry, principal, name)
    fingerprint = body.base_fingerprint
    version = registry.publish(
        principal,
        tenant,
        name,
        directory,
        base,
        base_fingerprint=fingerprint,
        base_unverified=fingerprint is None,
    )
    target.version, target.digest = version.number, version.facts.digest if version.facts is not None else None
    operations = AdminOperations(registry, principal)
    operations.compare(tenant, name, version.number, base, service.engine.compare)
    try:
        registry.adapters.activate(principal, tenant, name, version.number, expected=active)
    except AdapterNotVerified:
        message = f"{tenant}/{version.label} does not answer as its merged reference does; it was not activated."
        raise _Refused(ErrorReply(_BAD_REQUEST, AdapterNotVerified.code, message, "lora_path")) from None


def _unload(service: Service, caller: Caller, body: UnloadAdapterBody, target: Target) -> None:
    name = body.lora_name
    if not name and body.lora_int_id is None:
        raise _user_input("either 'lora_name' and 'lora_int_id' needs to be provided.")
    if name not in _taken_names(service, caller, name):
        raise _not_found(f"The lora adapter '{name}' cannot be found.")
    if service.local_models is not None:
        ref = service.local_models.unload(name)
        target.version, target.digest = ref.version, ref.digest
    else:
        registry, principal = _registry_of(service, caller)
        active = _active_version(registry, principal, name)
        if active is not None:
            target.version = active
            target.digest = AdminOperations(registry, principal).digest_of(principal.tenant, name, active)
        registry.adapters.delete(principal, principal.tenant, name)


def _taken_names(service: Service, caller: Caller, name: str) -> Sequence[str]:
    """The name, if it stands for an adapter now."""
    if service.local_models is not None:
        return [entry.ref.name for entry in service.local_models.list() if entry.ref.name == name]
    return [name] if _active_version(*_registry_of(service, caller), name) is not None else []


def _active_version(registry: Registry, principal: Principal, name: str) -> int | None:
    try:
        return registry.adapters.show(principal, principal.tenant, name).info.alias.active
    except ModelNotFound:
        return None


def _registry_of(service: Service, caller: Caller) -> tuple[Registry, Principal]:
    if service.registry is None or caller.principal is None:
        raise ServerError("There is no registry, or the route does not authenticate its callers.")
    return service.registry, caller.principal


def _user_input(message: str, reason: RefusalReason | None = None) -> _Refused:
    code = AdapterRefused.code if reason is not None else "invalid_request"
    return _Refused(ErrorReply(_USER_INPUT, code, message, "lora_name", reason.value if reason else None))


def _not_found(message: str) -> _Refused:
    return _Refused(ErrorReply(_NOT_FOUND, ModelNotFound.code, message, "lora_name", RefusalReason.NOT_FOUND.value))


RUNTIME_ROUTES: tuple[RouteSpec, ...] = (
    RouteSpec("POST", "/v1/load_lora_adapter", load_adapter, Access.OPERATOR),
    RouteSpec("POST", "/v1/unload_lora_adapter", unload_adapter, Access.OPERATOR),
)
