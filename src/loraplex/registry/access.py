"""Who may do what: roles, and which tenants a caller can see."""

from sqlalchemy import Connection, bindparam, select

from loraplex.core import InvalidRequest
from loraplex.core.registry_errors import PermissionDenied, TenantNotFound, Unauthenticated
from loraplex.registry.limits import TenantLimits
from loraplex.registry.names import is_tenant_name
from loraplex.registry.repository import Owner
from loraplex.registry.schema import AnyRow, api_keys, tenants
from loraplex.registry.types import KeyId, Principal, Role, TenantId, TenantInfo

LOCAL_KEY_ID = KeyId("local")
LOCAL_OPERATOR = Principal(TenantId(""), "", Role.OPERATOR, LOCAL_KEY_ID)
"""Whoever runs a command on the data directory. It has no tenant and can call no model.

With another key's id in it, it is this process itself, which acts because that key asked.
"""
_CALLER_QUERY = (
    select(api_keys.c.tenant_id, api_keys.c.role, api_keys.c.expires_at, api_keys.c.revoked_at, tenants.c.disabled_at)
    .join_from(api_keys, tenants, tenants.c.tenant_id == api_keys.c.tenant_id)
    .where(api_keys.c.key_id == bindparam("key_id"))
    .execution_options(cross_tenant="authentication")
)


def require_role(principal: Principal, role: Role) -> None:
    """Raise PermissionDenied unless the caller's role covers another. Looks at nothing but the role."""
    if not principal.role.covers(role):
        raise PermissionDenied(f"This needs the role {role.value}; the key has the role {principal.role.value}.")


def check_caller(connection: Connection, principal: Principal, now: float) -> None:
    """Raise unless the caller's key is still what it was when it came in: Unauthenticated, PermissionDenied (role).

    Between that moment and a change lie an upload, a validation or a comparison: minutes.
    """
    if principal.key_id == LOCAL_KEY_ID:
        return
    row = connection.execute(_CALLER_QUERY, {"key_id": principal.key_id}).one_or_none()
    if row is None or row.revoked_at is not None or row.disabled_at is not None:
        raise Unauthenticated
    if row.expires_at is not None and now >= row.expires_at:
        raise Unauthenticated
    for_itself = principal.tenant_id != LOCAL_OPERATOR.tenant_id
    if for_itself and row.tenant_id != principal.tenant_id:
        raise Unauthenticated
    needed, role = principal.role if for_itself else Role.TENANT_ADMIN, Role(row.role)
    if not role.covers(needed):
        raise PermissionDenied(f"This needs the role {needed.value}; the key has the role {role.value} by now.")


def find_tenant(connection: Connection, principal: Principal, name: str) -> TenantInfo:
    """A tenant that the caller may manage: any for an operator, its own for others. Raises TenantNotFound.

    A tenant that exists and one that does not give the same answer to those who may not see it.
    """
    if principal.role is not Role.OPERATOR and name != principal.tenant:
        raise TenantNotFound(name)
    found = tenant_by_name(connection, name)
    if found is None or (principal.role is not Role.OPERATOR and found.tenant_id != principal.tenant_id):
        raise TenantNotFound(name)
    return found


def find_owner(connection: Connection, principal: Principal, name: str, *, enabled: bool = True) -> Owner:
    """`find_tenant` for statements about the tenant's adapters; with `enabled` it must not be switched off."""
    tenant = find_tenant(connection, principal, name)
    if enabled and tenant.disabled_at is not None:
        raise InvalidRequest(f"The tenant {name!r} is disabled.", "tenant")
    return Owner(tenant.tenant_id, tenant.name)


def tenant_by_name(connection: Connection, name: str) -> TenantInfo | None:
    """A tenant, whoever asks."""
    if not is_tenant_name(name):  # PostgreSQL cannot even be asked for some
        return None
    row = connection.execute(select(tenants).where(tenants.c.name == name)).one_or_none()
    return tenant_info(row) if row is not None else None


def tenant_info(row: AnyRow) -> TenantInfo:
    """A tenant from a row with all columns of `tenants`."""
    return TenantInfo(TenantId(row.tenant_id), row.name, row.created_at, row.disabled_at, tenant_limits(row))


def tenant_limits(row: AnyRow) -> TenantLimits:
    """A tenant's limits from a row with their columns of `tenants`."""
    return TenantLimits(row.weight, row.priority, row.max_requests, row.tokens_per_minute)
