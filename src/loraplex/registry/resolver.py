"""From a request's `model` to exact weights, inside the caller's namespace and grants; and the list of what it may use.

Usable versions come from memory. Whatever is not usable is looked up in the database each time, so that no failure
outlives its cause.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, Integer, and_, bindparam, select, union_all

from loraplex.core import AdapterDigest, AdapterRef, BaseDescription, BaseFingerprint, InvalidRequest, ModelNotFound
from loraplex.core.registry_errors import AdapterDeleted, AdapterNotActive, AdapterNotVerified, WrongBase
from loraplex.registry.cache import NotInMemory
from loraplex.registry.changes import Store
from loraplex.registry.limits import check_page
from loraplex.registry.names import ModelAddress, parse_model
from loraplex.registry.repository import artifact_ref
from loraplex.registry.schema import AnyRow, adapters, aliases, grants, tenants, versions
from loraplex.registry.types import ModelPage, Principal, ResolvedVersion, TenantId, VersionState

_Find = Callable[[Principal, str, ModelAddress], ResolvedVersion]
_USABLE = tuple(state.value for state in VersionState if state.usable)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the cache holds: a version under the name that its owner calls it by, and the adapter's life."""

    version: ResolvedVersion
    life: int

    def check_binding(self, principal: Principal, model: str) -> None:
        """Raise AdapterDeleted if the key is bound to an earlier adapter of this name."""
        if principal.bound_life not in (None, self.life):
            raise AdapterDeleted(model)


class Resolver:
    """Resolves and lists models for callers. Every method may be called from any thread."""

    __slots__ = ("_store",)

    def __init__(self, store: Store) -> None:
        self._store = store

    def resolve(self, principal: Principal, model: str | None, base: BaseDescription) -> ResolvedVersion | None:
        """See Registry.resolve."""
        return self._resolve(principal, model, base, self._find)

    def recall(self, principal: Principal, model: str | None, base: BaseDescription) -> ResolvedVersion | None:
        """As `resolve`, from memory alone. Raises NotInMemory too."""
        return self._resolve(principal, model, base, self._recall)

    def _resolve(
        self, principal: Principal, model: str | None, base: BaseDescription, find: _Find
    ) -> ResolvedVersion | None:
        bound = principal.bound_adapter
        if model is None:
            if bound is None:
                raise InvalidRequest(
                    "model is missing; only a key that is bound to an adapter can do without.", "model"
                )
            model = bound
        elif model == base.name:
            if bound is not None:
                raise ModelNotFound(model)
            return None
        address = parse_model(model)
        # Before anything is looked up: to a bound key, what is not its own does not exist, in whatever state it is.
        if bound is not None and _place(principal, address) != _place(principal, parse_model(bound)):
            raise ModelNotFound(model)
        found = find(principal, model, address)
        if found.base_fingerprint != base.fingerprint:
            raise WrongBase(
                f"The model {model!r} belongs to the base {found.base_fingerprint[:12]}..., "
                f"but {base.name!r} has the fingerprint {base.fingerprint[:12]}...."
            )
        return found

    def page(self, principal: Principal, base: BaseDescription, after: str, limit: int) -> ModelPage:
        """See Registry.list_models."""
        check_page(limit)
        bound = principal.bound_adapter
        query = _PAGE_QUERY if bound is None else _BOUND_PAGE_QUERY
        values = {"tenant": principal.tenant_id, "base": base.fingerprint, "after": after, "num_rows": limit + 1}
        with self._store.read() as connection:
            rows = connection.execute(query, {**values, "bound": bound, "life": principal.bound_life}).all()
        models = tuple(_resolved(row, row.label) for row in rows[:limit])
        return ModelPage(models, models[-1].ref.name if len(rows) > limit else None)

    def _find(self, principal: Principal, model: str, address: ModelAddress) -> ResolvedVersion:
        """A usable version in the caller's namespace or grants."""
        cache = self._store.cache
        epoch = cache.refresh()
        own = address.tenant is None or address.tenant == principal.tenant
        owner = principal.tenant_id if own else self._granter(principal, model, address, epoch)
        key = (address.name, address.version)
        kept = cache.get(owner, key)
        if not isinstance(kept, _Kept):
            query = _ACTIVE_QUERY if address.version is None else _NUMBER_QUERY
            values = {"owner": owner, "name": address.name, "number": address.version}
            with self._store.read() as connection:
                row = connection.execute(query, values).one_or_none()
            row = _usable(row, principal, model)
            kept = _Kept(_resolved(row, address.name), row.life)
            cache.put(owner, key, kept, epoch)
        kept.check_binding(principal, model)
        return kept.version if own else _as_granted(kept.version, address)

    def _recall(self, principal: Principal, model: str, address: ModelAddress) -> ResolvedVersion:
        """What `_find` has kept. Raises NotInMemory."""
        cache = self._store.cache
        own = address.tenant is None or address.tenant == principal.tenant
        owner = principal.tenant_id if own else cache.get(principal.tenant_id, _grant_key(address))
        fresh = cache.is_fresh and isinstance(owner, str)
        kept = cache.get(TenantId(str(owner)), (address.name, address.version)) if fresh else None
        if not isinstance(kept, _Kept):
            raise NotInMemory
        kept.check_binding(principal, model)
        return kept.version if own else _as_granted(kept.version, address)

    def _granter(self, principal: Principal, model: str, address: ModelAddress, epoch: int) -> TenantId:
        """The owner of an adapter that the caller was granted. Raises ModelNotFound, whether it exists or not."""
        cache = self._store.cache
        key = _grant_key(address)
        owner = cache.get(principal.tenant_id, key)
        if not isinstance(owner, str):
            values = {"grantee": principal.tenant_id, "owner_name": address.tenant, "name": address.name}
            with self._store.read() as connection:
                owner = connection.execute(_GRANT_QUERY, values).scalar_one_or_none()
            if owner is None:
                raise ModelNotFound(model)
            cache.put(principal.tenant_id, key, owner, epoch)
        return TenantId(owner)


def _place(principal: Principal, address: ModelAddress) -> tuple[str, str]:
    """Owner and name of an address without its version: the same for all spellings of one adapter."""
    return (address.tenant if address.tenant is not None else principal.tenant), address.name


def _grant_key(address: ModelAddress) -> tuple[str, str | None, str]:
    """Where the cache keeps the owner of an adapter that was granted."""
    return "grant", address.tenant, address.name


def _as_granted(found: ResolvedVersion, address: ModelAddress) -> ResolvedVersion:
    """An adapter as its grantee calls it."""
    return replace(found, ref=replace(found.ref, name=f"{address.tenant}/{address.name}"))


def _usable(row: AnyRow | None, principal: Principal, model: str) -> AnyRow:
    """The row of a version that may serve, or the reason why it may not."""
    if row is None or row.disabled_at is not None:
        raise ModelNotFound(model)
    if principal.bound_life not in (None, row.life):  # what is there now is not what the key was bound to
        raise AdapterDeleted(model)
    if row.number is None:  # no such version, or none is active
        if row.deleted_at is not None:
            raise AdapterDeleted(model)
        if row.wanted is not None:
            raise ModelNotFound(model)
        raise AdapterNotActive(f"The model {model!r} has no active version; activate one, or ask for name@version.")
    state = VersionState(row.state)
    if state is VersionState.DELETED:
        raise AdapterDeleted(model)
    if not state.usable:
        why = f"was refused ({row.refusal})" if state is VersionState.REFUSED else "is not verified"
        raise AdapterNotVerified(f"Version {row.number} of the model {model!r} {why}; it cannot be used.")
    return row


_VERSION_COLUMNS = (
    versions.c.number,
    versions.c.digest,
    versions.c.base_fingerprint,
    versions.c.base_verified,
    versions.c.declared_base,
    versions.c.max_rank,
    versions.c.num_bytes,
    versions.c.config_key,
    versions.c.config_bytes,
    versions.c.weights_key,
    versions.c.weights_bytes,
    versions.c.created_at,
)


def _version_query(number: ColumnElement[int]) -> Any:
    """The adapter `name` of `owner` with a version of it; no row if there is no such name."""
    same = and_(aliases.c.tenant_id == adapters.c.tenant_id, aliases.c.adapter_id == adapters.c.adapter_id)
    version = and_(
        versions.c.tenant_id == adapters.c.tenant_id,
        versions.c.adapter_id == adapters.c.adapter_id,
        versions.c.number == number,
    )
    return (
        select(
            *_VERSION_COLUMNS,
            number.label("wanted"),
            versions.c.state,
            versions.c.refusal,
            adapters.c.deleted_at,
            adapters.c.life,
            tenants.c.disabled_at,
            tenants.c.name.label("owner"),
        )
        .join_from(adapters, tenants, tenants.c.tenant_id == adapters.c.tenant_id)
        .join(aliases, same)
        .outerjoin(versions, version)
        .where(adapters.c.tenant_id == bindparam("owner"), adapters.c.name == bindparam("name"))
    )


# Building these takes longer than running them.
_ACTIVE_QUERY = _version_query(aliases.c.active_number)
_NUMBER_QUERY = _version_query(bindparam("number", type_=Integer))
_GRANT_QUERY = (
    select(adapters.c.tenant_id)
    .join_from(grants, adapters, grants.c.adapter_id == adapters.c.adapter_id)
    .join(tenants, tenants.c.tenant_id == adapters.c.tenant_id)
    .where(grants.c.grantee_id == bindparam("grantee"))
    .where(tenants.c.name == bindparam("owner_name"), adapters.c.name == bindparam("name"))
)


def _page_query(*, bound: bool) -> Any:
    """Active, usable versions of `base` that `tenant` may use, own and granted, by label; or the `bound` one alone."""
    active = and_(versions.c.adapter_id == aliases.c.adapter_id, versions.c.number == aliases.c.active_number)
    granted = grants.join(adapters, grants.c.adapter_id == adapters.c.adapter_id)
    arms = []
    for source, tenant, label in (
        (adapters, adapters.c.tenant_id, adapters.c.name),
        (granted, grants.c.grantee_id, tenants.c.name + "/" + adapters.c.name),
    ):
        arm = (
            select(label.label("label"), tenants.c.name.label("owner"), *_VERSION_COLUMNS)
            .select_from(source)
            .join(tenants, tenants.c.tenant_id == adapters.c.tenant_id)
            .join(aliases, aliases.c.adapter_id == adapters.c.adapter_id)
            .join(versions, active)
            .where(tenant == bindparam("tenant"), label > bindparam("after"), tenants.c.disabled_at.is_(None))
            .where(versions.c.state.in_(_USABLE), versions.c.base_fingerprint == bindparam("base"))
        )
        own = and_(label == bindparam("bound"), adapters.c.life == bindparam("life"))
        arms.append(arm.where(own) if bound else arm)
    both = union_all(*arms).subquery()
    return select(both).order_by(both.c.label).limit(bindparam("num_rows", type_=Integer))


_PAGE_QUERY = _page_query(bound=False)
_BOUND_PAGE_QUERY = _page_query(bound=True)


def _resolved(row: AnyRow, name: str) -> ResolvedVersion:
    return ResolvedVersion(
        ref=AdapterRef(name, row.number, AdapterDigest(row.digest)),
        tenant=row.owner,
        artifact=artifact_ref(row),
        base_fingerprint=BaseFingerprint(row.base_fingerprint),
        base_verified=row.base_verified,
        declared_base=row.declared_base,
        rank=row.max_rank,
        num_bytes=row.num_bytes,
        created=row.created_at,
    )
