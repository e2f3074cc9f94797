"""Names of tenants and adapters, and the four forms of a request's `model`. Names are never parts of a path."""

import re
from dataclasses import dataclass

from loraplex.core import AdapterRefused, InvalidRequest, ModelNotFound, RefusalReason
from loraplex.core.limits import MAX_ADAPTER_NAME_CHARS, MAX_MODEL_NAME_CHARS

MAX_TENANT_NAME_CHARS = 64
MAX_VERSION_DIGITS = 9
_ADAPTER = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_ADAPTER_NAME_CHARS - 1}}}")
_TENANT = re.compile(rf"[a-z0-9][a-z0-9._-]{{0,{MAX_TENANT_NAME_CHARS - 1}}}")
_VERSION = re.compile(rf"[1-9][0-9]{{0,{MAX_VERSION_DIGITS - 1}}}")


@dataclass(frozen=True, slots=True)
class ModelAddress:
    """`model` taken apart: `name`, `name@3`, `tenant/name` or `tenant/name@3`."""

    tenant: str | None
    name: str
    version: int | None


def is_tenant_name(name: str) -> bool:
    return _TENANT.fullmatch(name) is not None and ".." not in name


def is_adapter_name(name: str) -> bool:
    return _ADAPTER.fullmatch(name) is not None and ".." not in name


def check_tenant_name(name: str) -> None:
    """Raise InvalidRequest unless the name may be a tenant's."""
    if not is_tenant_name(name):
        message = (
            f"Tenant name {name!r:.120} is not allowed: 1 to {MAX_TENANT_NAME_CHARS} of a-z 0-9 . _ -, "
            "starting with a letter or digit and without '..'."
        )
        raise InvalidRequest(message, "tenant")


def check_adapter_name(name: str, tenant: str, base_name: str) -> None:
    """Raise AdapterRefused (NAME_INVALID, NAME_CONFLICT) unless a tenant may have an adapter of this name."""
    if not is_adapter_name(name):
        message = (
            f"Adapter name {name!r:.120} is not allowed: 1 to {MAX_ADAPTER_NAME_CHARS} of A-Z a-z 0-9 . _ -, "
            "starting with a letter or digit and without '..'."
        )
        raise AdapterRefused(RefusalReason.NAME_INVALID, message, "name")
    if base_name in (name, f"{tenant}/{name}"):
        message = f"Adapter name {name!r} would stand for the base model {base_name!r}; choose another name."
        raise AdapterRefused(RefusalReason.NAME_CONFLICT, message, "name")


def parse_model(model: str) -> ModelAddress:
    """Take a `model` apart. Raises ModelNotFound for what no adapter can be called."""
    if len(model) > MAX_MODEL_NAME_CHARS:
        raise ModelNotFound(model[:MAX_MODEL_NAME_CHARS])
    path, at, version = model.partition("@")
    tenant, slash, name = path.rpartition("/")
    if (slash and not is_tenant_name(tenant)) or not is_adapter_name(name):
        raise ModelNotFound(model)
    if at and _VERSION.fullmatch(version) is None:
        raise ModelNotFound(model)
    return ModelAddress(tenant if slash else None, name, int(version) if at else None)
