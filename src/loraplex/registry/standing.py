"""Whether names that a server remembers still stand for what they stood for: after changes, of whichever process."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from sqlalchemy import and_, bindparam, select

from loraplex.core import AdapterDigest
from loraplex.registry.changes import Store
from loraplex.registry.schema import adapters, aliases, epoch, tenants, versions
from loraplex.registry.types import VersionState

_USABLE = tuple(state.value for state in VersionState if state.usable)
_MAX_NAMES = 500  # a query


@dataclass(frozen=True, slots=True)
class ChangedTenants:
    """Names of tenants that something was changed of after an epoch, and the epoch now."""

    epoch: int
    tenants: frozenset[str]


@dataclass(frozen=True, slots=True)
class StandingVersion:
    """A version that a request of its tenant could run on: `tenant/name`, number and digest."""

    path: str
    number: int
    digest: AdapterDigest
    is_active: bool


_CHANGED_QUERY = select(tenants.c.name).where(tenants.c.epoch > bindparam("since"))
_STANDING_QUERY = (
    select(
        tenants.c.name.label("tenant"), adapters.c.name, versions.c.number, versions.c.digest, aliases.c.active_number
    )
    .join_from(adapters, tenants, tenants.c.tenant_id == adapters.c.tenant_id)
    .join(aliases, and_(aliases.c.tenant_id == adapters.c.tenant_id, aliases.c.adapter_id == adapters.c.adapter_id))
    .join(versions, and_(versions.c.tenant_id == adapters.c.tenant_id, versions.c.adapter_id == adapters.c.adapter_id))
    .where(tenants.c.name == bindparam("tenant"), adapters.c.name.in_(bindparam("names", expanding=True)))
    .where(tenants.c.disabled_at.is_(None), adapters.c.deleted_at.is_(None), versions.c.state.in_(_USABLE))
)


def changed_since(store: Store, since: int) -> ChangedTenants:
    """The tenants of changes after the epoch `since`. Blocks. Raises RegistryUnavailable."""
    with store.read() as connection:
        now = connection.execute(select(epoch.c.value)).scalar_one()
        changed = connection.execute(_CHANGED_QUERY, {"since": since}).scalars() if now > since else ()
        return ChangedTenants(now, frozenset(changed))


def standing_versions(store: Store, names: Mapping[str, Collection[str]]) -> tuple[StandingVersion, ...]:
    """The usable versions of adapters that are given by tenant and name. Blocks. Raises RegistryUnavailable."""
    found = []
    with store.read() as connection:
        for tenant, part in _parts(names):
            for row in connection.execute(_STANDING_QUERY, {"tenant": tenant, "names": part}):
                is_active, digest = row.number == row.active_number, AdapterDigest(row.digest)
                found.append(StandingVersion(f"{row.tenant}/{row.name}", row.number, digest, is_active))
    return tuple(found)


def _parts(names: Mapping[str, Collection[str]]) -> Iterable[tuple[str, list[str]]]:
    for tenant, all_names in names.items():
        left = iter(all_names)
        while part := list(islice(left, _MAX_NAMES)):
            yield tenant, part
