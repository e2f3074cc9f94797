"""Statements on adapters, versions, pointers and grants. Each takes the tenant whose rows it may touch.

`tests/registry/test_tenant_predicate.py` looks at every statement that runs and refuses one on a tenant's table that
does not compare the tenant with a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, func, insert, or_, select, union, update

from loraplex.core import AdapterDigest, BaseFingerprint
from loraplex.registry.names import MAX_VERSION_DIGITS, is_adapter_name
from loraplex.registry.schema import (
    AnyRow,
    adapters,
    alias_moves,
    aliases,
    grants,
    tenants,
    tombstones,
    verifications,
    versions,
)
from loraplex.registry.types import (
    AdapterFacts,
    AliasInfo,
    AliasMove,
    ArtifactRef,
    BlobKey,
    BlobRef,
    KeyId,
    TenantId,
    VerificationInfo,
    VerificationResult,
    VersionInfo,
    VersionState,
)


@dataclass(frozen=True, slots=True)
class Owner:
    """The tenant whose rows a statement is about; the name is for what is shown."""

    tenant_id: TenantId
    name: str


@dataclass(frozen=True, slots=True)
class AdapterRow:
    """An adapter name and where its pointer stands."""

    adapter_id: str
    name: str
    next_number: int
    deleted: bool
    alias: AliasInfo


@dataclass(frozen=True, slots=True)
class NewVersion:
    """What is to be stored as a version."""

    state: VersionState
    base_fingerprint: BaseFingerprint
    base_verified: bool
    base_override_by: KeyId | None
    facts: AdapterFacts | None
    artifact: ArtifactRef | None
    refusal: str | None


# ---------------------------------------------------------------------- adapters
def find_adapter(connection: Connection, owner: Owner, name: str) -> AdapterRow | None:
    """An adapter by name, deleted ones too."""
    if not is_adapter_name(name):  # PostgreSQL cannot even be asked for some
        return None
    row = connection.execute(_adapters(owner).where(adapters.c.name == name)).one_or_none()
    return _adapter_row(row) if row is not None else None


def list_adapters(connection: Connection, owner: Owner, after: str, limit: int) -> list[AdapterRow]:
    """Adapters in order of name, from the one behind `after`, deleted ones too."""
    query = _adapters(owner).where(adapters.c.name > after).order_by(adapters.c.name).limit(limit)
    return [_adapter_row(row) for row in connection.execute(query)]


def count_adapters(connection: Connection, owner: Owner) -> int:
    """Number of adapter names, deleted ones too."""
    query = select(func.count()).select_from(adapters).where(adapters.c.tenant_id == owner.tenant_id)
    return int(connection.execute(query).scalar_one())


def insert_adapter(connection: Connection, owner: Owner, adapter_id: str, name: str, at: float) -> AdapterRow:
    """A new name without versions, its pointer at nothing."""
    ids = {"adapter_id": adapter_id, "tenant_id": owner.tenant_id}
    connection.execute(insert(adapters).values(**ids, name=name, next_number=1, created_at=at))
    connection.execute(insert(aliases).values(**ids, revision=0))
    return AdapterRow(adapter_id, name, 1, False, AliasInfo(None, 0))


def set_deleted(connection: Connection, owner: Owner, adapter: AdapterRow, at: float) -> None:
    """Mark a name as deleted."""
    connection.execute(update(adapters).where(_same(owner, adapter)).values(deleted_at=at))


def revive(connection: Connection, owner: Owner, adapter: AdapterRow) -> None:
    """A deleted name is there again, in a new life: keys that were bound before are not bound to it."""
    values = {"deleted_at": None, "life": adapters.c.life + 1}
    connection.execute(update(adapters).where(_same(owner, adapter)).values(**values))


def _same(owner: Owner, adapter: AdapterRow) -> ColumnElement[bool]:
    return and_(adapters.c.tenant_id == owner.tenant_id, adapters.c.adapter_id == adapter.adapter_id)


def _adapters(owner: Owner) -> Any:
    columns = adapters.c
    alias = and_(aliases.c.adapter_id == columns.adapter_id, aliases.c.tenant_id == columns.tenant_id)
    return (
        select(
            columns.adapter_id,
            columns.name,
            columns.next_number,
            columns.deleted_at,
            aliases.c.active_number,
            aliases.c.revision,
        )
        .join_from(adapters, aliases, alias)
        .where(columns.tenant_id == owner.tenant_id)
    )


def _adapter_row(row: AnyRow) -> AdapterRow:
    alias = AliasInfo(row.active_number, row.revision)
    return AdapterRow(row.adapter_id, row.name, row.next_number, row.deleted_at is not None, alias)


# ---------------------------------------------------------------------- versions
def insert_version(
    connection: Connection, owner: Owner, adapter: AdapterRow, new: NewVersion, at: float, by: KeyId
) -> VersionInfo:
    """The next version of an adapter. Nothing but its state ever changes afterwards."""
    connection.execute(update(adapters).where(_same(owner, adapter)).values(next_number=adapter.next_number + 1))
    values: dict[str, object] = {
        "adapter_id": adapter.adapter_id,
        "number": adapter.next_number,
        "tenant_id": owner.tenant_id,
        "state": new.state.value,
        "refusal": new.refusal,
        "base_fingerprint": new.base_fingerprint,
        "base_verified": new.base_verified,
        "base_override_by": new.base_override_by,
        "created_at": at,
        "created_by": by,
    }
    if new.facts is not None:
        values |= {
            "digest": new.facts.digest,
            "max_rank": new.facts.max_rank,
            "num_bytes": new.facts.num_bytes,
            "targets": ",".join(new.facts.targets),
            "declared_base": new.facts.declared_base,
            "names_base": new.facts.names_base,
        }
    if new.artifact is not None:
        values |= {
            "config_key": new.artifact.config.key,
            "config_bytes": new.artifact.config.num_bytes,
            "weights_key": new.artifact.weights.key,
            "weights_bytes": new.artifact.weights.num_bytes,
        }
    connection.execute(insert(versions).values(**values))
    found = find_version(connection, owner, adapter, adapter.next_number)
    if found is None:
        raise RuntimeError("a version that was just inserted is not there")
    return found


def find_version(connection: Connection, owner: Owner, adapter: AdapterRow, number: int) -> VersionInfo | None:
    """One version of an adapter."""
    if not 1 <= number < 10**MAX_VERSION_DIGITS:
        return None
    row = connection.execute(_versions(owner, adapter).where(versions.c.number == number)).one_or_none()
    return version_info(row, owner.name, adapter.name) if row is not None else None


def list_versions(connection: Connection, owner: Owner, adapter: AdapterRow) -> list[VersionInfo]:
    """All versions of an adapter, oldest first."""
    query = _versions(owner, adapter).order_by(versions.c.number)
    return [version_info(row, owner.name, adapter.name) for row in connection.execute(query)]


def set_state(
    connection: Connection, owner: Owner, adapter: AdapterRow, number: int, before: VersionState, after: VersionState
) -> bool:
    """Move a version from one state to another; False if it is in a third one by now."""
    where = and_(
        versions.c.tenant_id == owner.tenant_id,
        versions.c.adapter_id == adapter.adapter_id,
        versions.c.number == number,
        versions.c.state == before.value,
    )
    return connection.execute(update(versions).where(where).values(state=after.value)).rowcount == 1


def add_tombstone(
    connection: Connection, owner: Owner, adapter: AdapterRow, version: VersionInfo, at: float, by: KeyId
) -> None:
    """What is left of a deleted version."""
    digest = version.facts.digest if version.facts is not None else None
    ids = {"adapter_id": adapter.adapter_id, "number": version.number, "tenant_id": owner.tenant_id}
    connection.execute(insert(tombstones).values(**ids, digest=digest, at=at, by=by))


def current_versions(
    connection: Connection, owner: Owner, rows: Sequence[AdapterRow]
) -> dict[tuple[str, int], VersionInfo]:
    """The active and the latest versions of some adapters, by adapter id and number."""
    names = {row.adapter_id: row.name for row in rows}
    same = and_(aliases.c.tenant_id == versions.c.tenant_id, aliases.c.adapter_id == versions.c.adapter_id)
    latest = versions.c.number == adapters.c.next_number - 1
    query = (
        select(versions)
        .join_from(versions, adapters, adapters.c.adapter_id == versions.c.adapter_id)
        .join(aliases, same)
        .where(versions.c.tenant_id == owner.tenant_id, versions.c.adapter_id.in_(names))
        .where(or_(versions.c.number == aliases.c.active_number, latest))
    )
    return {
        (row.adapter_id, row.number): version_info(row, owner.name, names[row.adapter_id])
        for row in connection.execute(query)
    }


def _versions(owner: Owner, adapter: AdapterRow) -> Any:
    return select(versions).where(versions.c.tenant_id == owner.tenant_id, versions.c.adapter_id == adapter.adapter_id)


def version_info(row: AnyRow, tenant: str, name: str) -> VersionInfo:
    """A version from a row with all columns of `versions`."""
    facts = artifact = None
    if row.digest is not None:
        targets = tuple(row.targets.split(",")) if row.targets else ()
        facts = AdapterFacts(
            AdapterDigest(row.digest), row.max_rank, row.num_bytes, targets, row.declared_base, bool(row.names_base)
        )
    if row.config_key is not None:
        artifact = artifact_ref(row)
    return VersionInfo(
        tenant=tenant,
        name=name,
        number=row.number,
        state=VersionState(row.state),
        base_fingerprint=BaseFingerprint(row.base_fingerprint),
        base_verified=row.base_verified,
        base_override_by=KeyId(row.base_override_by) if row.base_override_by is not None else None,
        created_at=row.created_at,
        created_by=KeyId(row.created_by),
        facts=facts,
        artifact=artifact,
        refusal=row.refusal,
    )


def artifact_ref(row: AnyRow) -> ArtifactRef:
    """The stored files from a row with their columns of `versions`."""
    return ArtifactRef(
        BlobRef(BlobKey(row.config_key), row.config_bytes), BlobRef(BlobKey(row.weights_key), row.weights_bytes)
    )


def count_bytes(connection: Connection, owner: Owner, new: ArtifactRef) -> int:
    """Bytes of the files that the tenant's versions need, deleted ones aside, and of `new`. A file counts once."""
    keys = (new.config.key, new.weights.key)
    columns = versions.c
    files = [
        select(key.label("key"), num_bytes.label("num_bytes")).where(
            columns.tenant_id == owner.tenant_id,
            columns.state != VersionState.DELETED.value,
            key.not_in(keys),  # not true of a refused version, which has no files
        )
        for key, num_bytes in ((columns.config_key, columns.config_bytes), (columns.weights_key, columns.weights_bytes))
    ]
    stored = union(*files).subquery()
    total = connection.execute(select(func.coalesce(func.sum(stored.c.num_bytes), 0))).scalar_one()
    return int(total) + new.config.num_bytes + new.weights.num_bytes


# ---------------------------------------------------------------------- pointers
def move_alias(connection: Connection, owner: Owner, adapter: AdapterRow, move: AliasMove) -> bool:
    """Compare-and-set: set the pointer if its revision is still the one before the move's. False if it is not."""
    where = and_(
        aliases.c.tenant_id == owner.tenant_id,
        aliases.c.adapter_id == adapter.adapter_id,
        aliases.c.revision == move.revision - 1,
    )
    values = {"active_number": move.to_version, "revision": move.revision}
    if connection.execute(update(aliases).where(where).values(**values)).rowcount != 1:
        return False
    connection.execute(
        insert(alias_moves).values(
            adapter_id=adapter.adapter_id,
            tenant_id=owner.tenant_id,
            revision=move.revision,
            action=move.action,
            from_number=move.from_version,
            to_number=move.to_version,
            at=move.at,
            by=move.by,
        )
    )
    return True


def list_moves(connection: Connection, owner: Owner, adapter: AdapterRow) -> list[AliasMove]:
    """All moves of an adapter's pointer, oldest first."""
    columns = alias_moves.c
    query = (
        select(alias_moves)
        .where(columns.tenant_id == owner.tenant_id, columns.adapter_id == adapter.adapter_id)
        .order_by(columns.revision)
    )
    return [
        AliasMove(row.revision, row.action, row.from_number, row.to_number, row.at, KeyId(row.by))
        for row in connection.execute(query)
    ]


# ---------------------------------------------------------------------- verifications
def add_verification(
    connection: Connection,
    owner: Owner,
    adapter: AdapterRow,
    number: int,
    result: VerificationResult | None,
    at: float,
    by: KeyId,
) -> VerificationInfo:
    """The next attempt; `result` None where the comparison was skipped."""
    attempt = count_verifications(connection, owner, adapter, number) + 1
    values: dict[str, object] = {
        "adapter_id": adapter.adapter_id,
        "number": number,
        "attempt": attempt,
        "tenant_id": owner.tenant_id,
        "skipped": result is None,
        "at": at,
        "by": by,
    }
    if result is not None:
        values |= {
            "passed": result.passed,
            "max_logit_difference": result.max_logit_difference,
            "kl": result.kl,
            "effect": result.effect,
            "tolerance": result.tolerance,
            "failure": result.failure,
        }
    connection.execute(insert(verifications).values(**values))
    return VerificationInfo(attempt, at, by, result)


def count_verifications(connection: Connection, owner: Owner, adapter: AdapterRow, number: int) -> int:
    """Number of attempts to verify a version."""
    columns = verifications.c
    query = (
        select(func.count())
        .select_from(verifications)
        .where(columns.tenant_id == owner.tenant_id, columns.adapter_id == adapter.adapter_id)
        .where(columns.number == number)
    )
    return int(connection.execute(query).scalar_one())


def list_verifications(
    connection: Connection, owner: Owner, adapter: AdapterRow
) -> dict[int, tuple[VerificationInfo, ...]]:
    """All attempts to verify versions of an adapter, by number, oldest first."""
    columns = verifications.c
    query = (
        select(verifications)
        .where(columns.tenant_id == owner.tenant_id, columns.adapter_id == adapter.adapter_id)
        .order_by(columns.number, columns.attempt)
    )
    found: dict[int, tuple[VerificationInfo, ...]] = {}
    for row in connection.execute(query):
        found[row.number] = (*found.get(row.number, ()), _verification(row))
    return found


def _verification(row: AnyRow) -> VerificationInfo:
    result = None
    if not row.skipped:
        figures = row.max_logit_difference, row.kl, row.effect, row.tolerance
        result = VerificationResult(row.passed, *figures, row.failure)
    return VerificationInfo(row.attempt, row.at, KeyId(row.by), result)


# ---------------------------------------------------------------------- grants
def add_grant(
    connection: Connection, owner: Owner, adapter: AdapterRow, grantee: TenantId, at: float, by: KeyId
) -> None:
    """Let another tenant use an adapter."""
    ids = {"adapter_id": adapter.adapter_id, "tenant_id": owner.tenant_id, "grantee_id": grantee}
    connection.execute(insert(grants).values(**ids, created_at=at, created_by=by))


def remove_grant(connection: Connection, owner: Owner, adapter: AdapterRow, grantee: TenantId) -> bool:
    """Take it back; False if there was none."""
    columns = grants.c
    statement = grants.delete().where(
        columns.tenant_id == owner.tenant_id,
        columns.adapter_id == adapter.adapter_id,
        columns.grantee_id == grantee,
    )
    return connection.execute(statement).rowcount == 1


def list_grantees(connection: Connection, owner: Owner, adapter: AdapterRow) -> list[Owner]:
    """The tenants that may use an adapter beside its owner, by name."""
    query = (
        select(tenants.c.tenant_id, tenants.c.name)
        .join_from(grants, tenants, grants.c.grantee_id == tenants.c.tenant_id)
        .where(grants.c.tenant_id == owner.tenant_id, grants.c.adapter_id == adapter.adapter_id)
        .order_by(tenants.c.name)
    )
    return [Owner(TenantId(row.tenant_id), row.name) for row in connection.execute(query)]
