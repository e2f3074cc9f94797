"""Managing tenants: operators only, but for a look at one's own."""

import secrets
from dataclasses import replace

from sqlalchemy import func, select, update

from loraplex.core import InvalidRequest
from loraplex.core.registry_errors import TenantExists
from loraplex.registry import schema
from loraplex.registry.access import find_tenant, require_role, tenant_by_name, tenant_info
from loraplex.registry.changes import Store
from loraplex.registry.limits import LimitChanges, check_page, check_tenant_limits
from loraplex.registry.names import check_tenant_name
from loraplex.registry.types import Principal, RegistryCounts, Role, TenantId, TenantInfo


class Tenants:
    """Manages tenants. All methods but `find` raise PermissionDenied for other roles than operator."""

    __slots__ = ("_store",)

    def __init__(self, store: Store) -> None:
        self._store = store

    def create(self, principal: Principal, name: str) -> TenantInfo:
        """A new tenant. Raises InvalidRequest (name), TenantExists."""
        require_role(principal, Role.OPERATOR)
        check_tenant_name(name)
        with self._store.change(principal) as change:
            if tenant_by_name(change.connection, name) is not None:
                raise TenantExists(f"The tenant {name!r} exists already; choose another name.")
            tenant = TenantInfo(TenantId(new_id()), name, change.at, None)
            change.connection.execute(
                schema.tenants.insert().values(
                    tenant_id=tenant.tenant_id, name=name, created_at=change.at, epoch=change.epoch
                )
            )
            change.record(tenant.tenant_id, principal.key_id, "tenant.create", name=name)
            return tenant

    def disable(self, principal: Principal, name: str) -> TenantInfo:
        """Switch a tenant off: its keys are refused and its adapters are gone for all. Raises TenantNotFound."""
        return self._set_disabled(principal, name, disabled=True)

    def enable(self, principal: Principal, name: str) -> TenantInfo:
        """Switch a tenant on again. Raises TenantNotFound."""
        return self._set_disabled(principal, name, disabled=False)

    def list(self, principal: Principal, after: str = "", limit: int = 100) -> tuple[TenantInfo, ...]:
        """Tenants in order of name, from the one behind `after`."""
        require_role(principal, Role.OPERATOR)
        check_page(limit)
        table = schema.tenants
        query = select(table).where(table.c.name > after).order_by(table.c.name).limit(limit)
        with self._store.read() as connection:
            return tuple(tenant_info(row) for row in connection.execute(query))

    def find(self, principal: Principal, name: str) -> TenantInfo:
        """One tenant: any for operators, its own for a tenant's admin. Raises PermissionDenied, TenantNotFound."""
        require_role(principal, Role.TENANT_ADMIN)
        with self._store.read() as connection:
            return find_tenant(connection, principal, name)

    def change_limits(self, principal: Principal, name: str, changes: LimitChanges) -> TenantInfo:
        """Set some of a tenant's limits. Raises InvalidRequest (the first bad value, or no change), TenantNotFound."""
        require_role(principal, Role.OPERATOR)
        if not changes:
            raise InvalidRequest("Give at least one of weight, priority, max_requests and tokens_per_minute.")
        with self._store.change(principal) as change:
            tenant = find_tenant(change.connection, principal, name)
            limits = replace(tenant.limits, **changes)
            check_tenant_limits(limits)
            table = schema.tenants
            statement = update(table).where(table.c.tenant_id == tenant.tenant_id).values(**changes)
            change.connection.execute(statement)
            before = {f"{field}_from": getattr(tenant.limits, field) for field in changes}
            after = {f"{field}_to": getattr(limits, field) for field in changes}
            change.record(tenant.tenant_id, principal.key_id, "tenant.limits", name=name, **before, **after)
            return replace(tenant, limits=limits)

    def count(self, principal: Principal) -> RegistryCounts:
        """How many tenants are enabled, and how many names of theirs stand for a version."""
        require_role(principal, Role.OPERATOR)
        with self._store.read() as connection:
            return RegistryCounts(*connection.execute(_COUNT_QUERY).one())

    def _set_disabled(self, principal: Principal, name: str, *, disabled: bool) -> TenantInfo:
        require_role(principal, Role.OPERATOR)
        with self._store.change(principal) as change:
            tenant = find_tenant(change.connection, principal, name)
            at = change.at if disabled else None
            table = schema.tenants
            statement = update(table).where(table.c.tenant_id == tenant.tenant_id).values(disabled_at=at)
            change.connection.execute(statement)
            action = "tenant.disable" if disabled else "tenant.enable"
            change.record(tenant.tenant_id, principal.key_id, action, name=name)
            return replace(tenant, disabled_at=at)


_COUNT_QUERY = (
    select(func.count(schema.tenants.c.tenant_id.distinct()), func.count(schema.aliases.c.active_number))
    .outerjoin_from(schema.tenants, schema.aliases, schema.aliases.c.tenant_id == schema.tenants.c.tenant_id)
    .where(schema.tenants.c.disabled_at.is_(None))
    .execution_options(cross_tenant="a count of all tenants")
)


def new_id() -> str:
    """A random id of 26 characters; unguessable, and no client text."""
    alphabet = "abcdefghijklmnopqrstuvwxyz234567"
    return "".join(secrets.choice(alphabet) for _ in range(26))
