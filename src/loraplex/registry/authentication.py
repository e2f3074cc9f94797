"""From the text of a key to a Principal. Every failure is one error, after the same work.

What does not look like a key is refused without the database. A key that is right is remembered by its whole HMAC,
never by a part of it; failures are not remembered. An unknown id and a wrong secret both take one query that always
gives one hash, and one comparison in constant time.
"""

import hmac
import secrets
from typing import Any

from sqlalchemy import String, bindparam, func, select

from loraplex.core.registry_errors import Unauthenticated
from loraplex.registry.access import tenant_limits
from loraplex.registry.cache import NotInMemory
from loraplex.registry.changes import Store
from loraplex.registry.key_admin import bound_label
from loraplex.registry.keys import ApiKey, hash_key, parse_key
from loraplex.registry.schema import adapters, api_keys, tenants
from loraplex.registry.types import Principal, Role, TenantId

_MAX_KNOWN = 100_000


class Authenticator:
    """Checks keys. Every method may be called from any thread."""

    __slots__ = ("_dummy", "_known", "_pepper", "_store")

    def __init__(self, store: Store, pepper: bytes) -> None:
        self._store = store
        self._pepper = pepper
        self._dummy = secrets.token_hex(32)
        self._known: dict[bytes, TenantId] = {}  # whose cache partition holds the principal of a key's HMAC

    def authenticate(self, text: str) -> Principal:
        """Whose key this is. Raises Unauthenticated for everything that is not a valid key."""
        key = parse_key(text)
        if key is None:
            raise Unauthenticated
        digest = hash_key(key, self._pepper)
        epoch = self._store.cache.refresh()
        principal = self._cached(digest)
        if principal is None:
            principal = self._look_up(key, digest)
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[digest] = principal.tenant_id
            self._store.cache.put(principal.tenant_id, digest, principal, epoch)
        return self._unexpired(principal)

    def recall(self, text: str) -> Principal:
        """As `authenticate`, from memory alone. Raises NotInMemory too."""
        key = parse_key(text)
        if key is None:
            raise Unauthenticated
        principal = self._cached(hash_key(key, self._pepper)) if self._store.cache.is_fresh else None
        if principal is None:
            raise NotInMemory
        return self._unexpired(principal)

    def _unexpired(self, principal: Principal) -> Principal:
        if principal.expires_at is not None and self._store.now() >= principal.expires_at:
            raise Unauthenticated
        return principal

    def _cached(self, digest: bytes) -> Principal | None:
        tenant = self._known.get(digest)
        found = self._store.cache.get(tenant, digest) if tenant is not None else None
        return found if isinstance(found, Principal) else None

    def _look_up(self, key: ApiKey, digest: bytes) -> Principal:
        with self._store.read() as connection:
            values = {"key_id": key.key_id, "dummy": self._dummy}
            stored = connection.execute(_HASH_QUERY, values).scalar_one()
            if not hmac.compare_digest(stored, digest.hex()):
                raise Unauthenticated
            row = connection.execute(_KEY_QUERY, {"key_id": key.key_id}).one()
        if row.revoked_at is not None or row.disabled_at is not None:
            raise Unauthenticated
        return Principal(
            TenantId(row.tenant_id),
            row.tenant_name,
            Role(row.role),
            key.key_id,
            bound_label(row, row.tenant_id),
            row.expires_at,
            row.bound_life,
            tenant_limits(row),
        )


def _hash_query() -> Any:
    """One hash in every case: the key's, or the dummy where there is no such key."""
    found = select(api_keys.c.secret_hash).where(api_keys.c.key_id == bindparam("key_id")).scalar_subquery()
    return select(func.coalesce(found, bindparam("dummy", type_=String)))


def _key_query() -> Any:
    """What else is known of a key, its tenant, and the adapter that it is bound to."""
    holder = tenants.alias("holder")
    return (
        select(
            api_keys.c.tenant_id,
            api_keys.c.role,
            api_keys.c.expires_at,
            api_keys.c.revoked_at,
            api_keys.c.bound_life,
            tenants.c.name.label("tenant_name"),
            tenants.c.disabled_at,
            tenants.c.weight,
            tenants.c.priority,
            tenants.c.max_requests,
            tenants.c.tokens_per_minute,
            adapters.c.name,
            adapters.c.tenant_id.label("holder_id"),
            holder.c.name.label("holder_name"),
        )
        .join_from(api_keys, tenants, tenants.c.tenant_id == api_keys.c.tenant_id)
        .outerjoin(adapters, adapters.c.adapter_id == api_keys.c.bound_adapter_id)
        .outerjoin(holder, holder.c.tenant_id == adapters.c.tenant_id)
        .where(api_keys.c.key_id == bindparam("key_id"))
    )


# Building these takes longer than running them. They span tenants: whose key it is, is what is asked.
_HASH_QUERY = _hash_query().execution_options(cross_tenant="authentication")
_KEY_QUERY = _key_query().execution_options(cross_tenant="authentication")
