"""Making, listing and revoking API keys. A key never reaches further than the key that made it."""

import math
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, and_, func, or_, select, update

from loraplex.core import InvalidRequest, ModelNotFound
from loraplex.core.registry_errors import KeyNotFound, PermissionDenied, RegistryLimitReached
from loraplex.registry.access import find_owner, require_role
from loraplex.registry.changes import Store
from loraplex.registry.keys import ApiKey, hash_key, is_key_id, new_key
from loraplex.registry.limits import RegistryLimits, check_page
from loraplex.registry.names import parse_model
from loraplex.registry.repository import Owner
from loraplex.registry.schema import AnyRow, adapters, api_keys, grants, tenants
from loraplex.registry.types import KeyId, KeyInfo, Principal, Role


@dataclass(frozen=True, slots=True)
class CreatedKey:
    """A new key. `key.reveal()` is the only time its text can be had."""

    key: ApiKey
    info: KeyInfo


class Keys:
    """Manages the API keys of a tenant; for its tenant admins and for operators."""

    __slots__ = ("_limits", "_pepper", "_store")

    def __init__(self, store: Store, pepper: bytes, limits: RegistryLimits) -> None:
        self._store = store
        self._pepper = pepper
        self._limits = limits

    def create(
        self,
        principal: Principal,
        tenant: str,
        role: Role,
        *,
        bound_adapter: str | None = None,
        expires_at: float | None = None,
    ) -> CreatedKey:
        """A new key. `bound_adapter` is `name`, or `tenant/name` where it was granted; `expires_at` in unix seconds.

        Raises PermissionDenied where it would reach further than the caller's, TenantNotFound, ModelNotFound,
        InvalidRequest, RegistryLimitReached.
        """
        require_role(principal, Role.TENANT_ADMIN)
        self._check_scope(principal, role, bound_adapter, expires_at)
        with self._store.change(principal) as change:
            owner = find_owner(change.connection, principal, tenant)
            self._check_count(change.connection, owner, change.at)
            bound: dict[str, object] = {}
            if bound_adapter is not None:
                bound, bound_adapter = _adapter_for(change.connection, owner, bound_adapter)
            key = new_key()
            info = KeyInfo(key.key_id, role, bound_adapter, change.at, principal.key_id, expires_at, None)
            change.connection.execute(
                api_keys.insert().values(
                    key_id=key.key_id,
                    tenant_id=owner.tenant_id,
                    secret_hash=hash_key(key, self._pepper).hex(),
                    role=role.value,
                    created_at=change.at,
                    created_by=principal.key_id,
                    expires_at=expires_at,
                    **bound,
                )
            )
            details = {"key": key.key_id, "role": role.value, "bound_adapter": bound_adapter, "expires_at": expires_at}
            change.record(owner.tenant_id, principal.key_id, "key.create", **details)
            return CreatedKey(key, info)

    def revoke(self, principal: Principal, tenant: str, key_id: str) -> KeyInfo:
        """Make a key worthless, for good. Raises TenantNotFound, KeyNotFound, PermissionDenied."""
        require_role(principal, Role.TENANT_ADMIN)
        with self._store.change(principal) as change:
            owner = find_owner(change.connection, principal, tenant, enabled=False)
            found = _find_key(change.connection, owner, key_id)
            if found is None:
                raise KeyNotFound(f"The tenant {tenant!r} has no key {key_id!r:.40}.")
            if not principal.role.covers(found.role):
                raise PermissionDenied(f"A key with the role {found.role.value} can only be revoked by one with it.")
            where = and_(
                api_keys.c.tenant_id == owner.tenant_id,
                api_keys.c.key_id == found.key_id,
                api_keys.c.revoked_at.is_(None),
            )
            change.connection.execute(update(api_keys).where(where).values(revoked_at=change.at))
            change.record(owner.tenant_id, principal.key_id, "key.revoke", key=found.key_id)
            return replace(found, revoked_at=found.revoked_at if found.revoked_at is not None else change.at)

    def list(self, principal: Principal, tenant: str, after: str = "", limit: int = 100) -> tuple[KeyInfo, ...]:
        """A tenant's keys in order of id, from the one behind `after`, revoked ones too.

        Raises PermissionDenied, TenantNotFound, InvalidRequest.
        """
        require_role(principal, Role.TENANT_ADMIN)
        check_page(limit)
        with self._store.read() as connection:
            owner = find_owner(connection, principal, tenant, enabled=False)
            query = _key_query(owner).where(api_keys.c.key_id > after).limit(limit)
            return tuple(_info(row, owner) for row in connection.execute(query))

    def _check_scope(self, principal: Principal, role: Role, bound: str | None, expires_at: float | None) -> None:
        if not principal.role.covers(role):
            message = f"A key with the role {principal.role.value} cannot make one with the role {role.value}."
            raise PermissionDenied(message)
        if bound is not None and role is not Role.TENANT:
            raise InvalidRequest(
                f"Only a key with the role tenant can be bound to an adapter, not {role.value}.", "role"
            )
        if expires_at is not None and (not math.isfinite(expires_at) or expires_at <= self._store.now()):
            raise InvalidRequest(f"expires_at must lie in the future, got {expires_at}.", "expires_at")
        if principal.expires_at is not None and (expires_at is None or expires_at > principal.expires_at):
            message = f"The new key must end no later than the one that makes it, at {principal.expires_at:.0f}."
            raise PermissionDenied(f"{message} Set expires_at.")

    def _check_count(self, connection: Connection, owner: Owner, now: float) -> None:
        columns = api_keys.c
        alive = or_(columns.expires_at.is_(None), columns.expires_at > now)
        query = (
            select(func.count())
            .select_from(api_keys)
            .where(columns.tenant_id == owner.tenant_id, columns.revoked_at.is_(None), alive)
        )
        count, limit = connection.execute(query).scalar_one(), self._limits.max_keys
        if count >= limit:
            message = f"The tenant {owner.name!r} has {count} live keys; the limit is {limit} (max_keys)."
            raise RegistryLimitReached(f"{message} Revoke one first.")


def _adapter_for(connection: Connection, owner: Owner, model: str) -> tuple[dict[str, object], str]:
    """The columns that bind a key to an adapter which its tenant may use, and the label. Raises ModelNotFound."""
    address = parse_model(model)
    if address.version is not None:
        raise InvalidRequest(f"A key is bound to an adapter, not to a version of it: {model!r}.", "bound_adapter")
    live = and_(adapters.c.name == address.name, adapters.c.deleted_at.is_(None))
    if address.tenant in (None, owner.name):
        query = select(adapters.c.adapter_id, adapters.c.life).where(adapters.c.tenant_id == owner.tenant_id, live)
        label = address.name
    else:
        query = (
            select(adapters.c.adapter_id, adapters.c.life)
            .join_from(grants, adapters, grants.c.adapter_id == adapters.c.adapter_id)
            .join(tenants, tenants.c.tenant_id == adapters.c.tenant_id)
            .where(grants.c.grantee_id == owner.tenant_id, tenants.c.name == address.tenant, live)
        )
        label = f"{address.tenant}/{address.name}"
    row = connection.execute(query).one_or_none()
    if row is None:
        raise ModelNotFound(model)
    return {"bound_adapter_id": row.adapter_id, "bound_life": row.life}, label


def _find_key(connection: Connection, owner: Owner, key_id: str) -> KeyInfo | None:
    if not is_key_id(key_id):  # PostgreSQL cannot even be asked for some
        return None
    row = connection.execute(_key_query(owner).where(api_keys.c.key_id == key_id)).one_or_none()
    return _info(row, owner) if row is not None else None


def _key_query(owner: Owner) -> Any:
    """The tenant's keys in order of id."""
    holder = tenants.alias("holder")
    return (
        select(api_keys, adapters.c.name, adapters.c.tenant_id.label("holder_id"), holder.c.name.label("holder_name"))
        .outerjoin_from(api_keys, adapters, api_keys.c.bound_adapter_id == adapters.c.adapter_id)
        .outerjoin(holder, holder.c.tenant_id == adapters.c.tenant_id)
        .where(api_keys.c.tenant_id == owner.tenant_id)
        .order_by(api_keys.c.key_id)
    )


def bound_label(row: AnyRow, tenant_id: str) -> str | None:
    """What a key's bound adapter is called by the key's tenant; from `name`, `holder_id` and `holder_name` of a row."""
    if row.name is None:
        return None
    return str(row.name) if row.holder_id == tenant_id else f"{row.holder_name}/{row.name}"


def _info(row: AnyRow, owner: Owner) -> KeyInfo:
    return KeyInfo(
        KeyId(row.key_id),
        Role(row.role),
        bound_label(row, owner.tenant_id),
        row.created_at,
        KeyId(row.created_by),
        row.expires_at,
        row.revoked_at,
    )
