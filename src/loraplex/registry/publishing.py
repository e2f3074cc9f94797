"""Publishing: from a directory to an immutable version, or to a recorded refusal.

Order: read, stage durably, check in a child process, move both files to their hashes, then one transaction that inserts
the version and its audit entry. A crash before the commit leaves files that the sweep removes, and nothing else.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, or_, select

from loraplex.adapters import AdapterLimits, Artifact, read_artifact
from loraplex.core import (
    AdapterDigest,
    AdapterRefused,
    BaseDescription,
    BaseFingerprint,
    InvalidRequest,
    RefusalReason,
)
from loraplex.core.registry_errors import RegistryLimitReached, StoreUnavailable
from loraplex.registry.access import LOCAL_OPERATOR, check_caller, find_owner, require_role
from loraplex.registry.blobs import BlobStore, StagedBlob, is_blob_key
from loraplex.registry.changes import Change, Store
from loraplex.registry.lifecycle import VersionEvent, advance
from loraplex.registry.limits import RegistryLimits
from loraplex.registry.names import check_adapter_name
from loraplex.registry.repository import (
    AdapterRow,
    NewVersion,
    Owner,
    count_adapters,
    count_bytes,
    find_adapter,
    insert_adapter,
    insert_version,
    revive,
)
from loraplex.registry.schema import versions
from loraplex.registry.tenants import new_id
from loraplex.registry.types import AdapterFacts, ArtifactRef, BlobKey, Principal, Role, VersionInfo, VersionState

Validator = Callable[[StagedBlob, StagedBlob, BaseDescription], AdapterFacts]
"""Checks staged config and weights against a base. Raises AdapterRefused."""

SWEEP_AFTER_S = 3600.0
MAX_SOURCE_CHARS = 300
_SWEEP_BATCH = 100
_MAX_TRIES = 3


class _BlobSwept(Exception):
    """A sweep took a file between its publication and the commit."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """What the caller says of the base that the adapter was trained on."""

    fingerprint: str | None
    unverified: bool

    def names_base(self, facts: AdapterFacts | None) -> bool:
        """Whether the caller or the file names the base that is served. Another one has been refused by then."""
        return self.fingerprint is not None or (facts is not None and facts.names_base)


class Publisher:
    """Makes versions. Every method may be called from any thread."""

    __slots__ = ("_adapter_limits", "_blobs", "_limits", "_store", "_validate")

    def __init__(
        self,
        store: Store,
        blobs: BlobStore,
        limits: RegistryLimits,
        adapter_limits: AdapterLimits,
        validate: Validator,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._limits = limits
        self._adapter_limits = adapter_limits
        self._validate = validate

    def publish(
        self,
        principal: Principal,
        tenant: str,
        name: str,
        directory: Path,
        base: BaseDescription,
        *,
        base_fingerprint: str | None = None,
        base_unverified: bool = False,
        source: str | None = None,
    ) -> VersionInfo:
        """See Registry.publish."""
        require_role(principal, Role.TENANT_ADMIN)
        _check_form(base_fingerprint, source)
        with self._store.read() as connection:
            check_caller(connection, principal, self._store.now())  # again in the change; here, before the work
            owner = find_owner(connection, principal, tenant)
            check_adapter_name(name, owner.name, base.name)
            self._check_counts(connection, owner, name)
        claim = _Claim(base_fingerprint, base_unverified)
        try:
            _check_base(base_fingerprint, base)
            artifact = read_artifact(directory, self._adapter_limits)
            facts, stored = self._store_checked(owner, artifact, base, claim)
            new = _new_version(principal, base, claim, facts, stored)
            return self._insert(principal, tenant, name, new, artifact, source)
        except AdapterRefused as refused:
            new = _new_version(principal, base, claim, refusal=refused)
            self._insert(principal, tenant, name, new, None, source)
            raise

    def sweep(self, older_than_s: float = SWEEP_AFTER_S) -> int:
        """Remove stored and temporary files that no version needs and that are older; returns how many."""
        before = self._store.now() - older_than_s
        count = self._blobs.sweep_staging(before)
        old = [blob.key for blob in self._blobs.list() if blob.modified_at < before]
        for start in range(0, len(old), _SWEEP_BATCH):
            batch = old[start : start + _SWEEP_BATCH]
            with self._store.read() as connection:
                candidates = _unreferenced(connection, batch)
            if candidates:
                count += self._delete(candidates, before)
        return count

    def digests(self) -> frozenset[AdapterDigest]:
        """Digests of all versions that were not deleted, of all tenants."""
        query = (
            select(versions.c.digest)
            .where(versions.c.state != VersionState.DELETED.value)
            .where(versions.c.digest.is_not(None))
            .distinct()
            .execution_options(cross_tenant="weights may belong to versions of several tenants")
        )
        with self._store.read() as connection:
            return frozenset(AdapterDigest(digest) for digest in connection.execute(query).scalars())

    def _delete(self, candidates: list[BlobKey], before: float) -> int:
        """Delete what is still old and unreferenced while no version can be inserted."""
        with self._store.change(LOCAL_OPERATOR) as change:
            gone = [key for key in _unreferenced(change.connection, candidates) if self._is_older(key, before)]
            for key in gone:
                self._blobs.delete(key)
            change.record(None, LOCAL_OPERATOR.key_id, "artifacts.sweep", files=[*gone])
            return len(gone)

    def _is_older(self, key: BlobKey, before: float) -> bool:
        modified_at = self._blobs.modified_at(key)
        return modified_at is not None and modified_at < before

    def _store_checked(
        self, owner: Owner, artifact: Artifact, base: BaseDescription, claim: _Claim
    ) -> tuple[AdapterFacts, ArtifactRef]:
        """Stage both files, have them checked, publish them."""
        with self._staged(artifact) as (config, weights):
            stored = ArtifactRef(config.ref, weights.ref)
            with self._store.read() as connection:
                self._check_bytes(connection, owner, stored)
            facts = self._validate(config, weights, base)
            _check_claim(claim, facts)
            self._blobs.publish(config)
            self._blobs.publish(weights)
            return facts, stored

    @contextlib.contextmanager
    def _staged(self, artifact: Artifact) -> Iterator[tuple[StagedBlob, StagedBlob]]:
        with contextlib.ExitStack() as stack:
            config = self._blobs.stage(artifact.config)
            stack.callback(self._blobs.discard, config)
            weights = self._blobs.stage(artifact.weights)
            stack.callback(self._blobs.discard, weights)
            yield config, weights

    def _insert(
        self,
        principal: Principal,
        tenant: str,
        name: str,
        new: NewVersion,
        artifact: Artifact | None,
        source: str | None,
    ) -> VersionInfo:
        for _ in range(_MAX_TRIES):
            try:
                with self._store.change(principal) as change:
                    return self._insert_in(change, principal, tenant, name, new, source)
            except _BlobSwept:
                if artifact is not None:
                    with self._staged(artifact) as staged:
                        for blob in staged:
                            self._blobs.publish(blob)
        raise StoreUnavailable(f"The artifact of {tenant}/{name} vanished from the store {_MAX_TRIES} times.")

    def _insert_in(
        self, change: Change, principal: Principal, tenant: str, name: str, new: NewVersion, source: str | None
    ) -> VersionInfo:
        owner = find_owner(change.connection, principal, tenant)
        if new.artifact is not None and None in map(self._blobs.modified_at, _keys(new.artifact)):
            raise _BlobSwept
        if new.artifact is not None:
            self._check_bytes(change.connection, owner, new.artifact)
        adapter = self._adapter(change, owner, name, wake=new.refusal is None)
        version = insert_version(change.connection, owner, adapter, new, change.at, principal.key_id)
        change.record(
            owner.tenant_id,
            principal.key_id,
            "version.refuse" if new.refusal is not None else "version.publish",
            adapter=name,
            version=version.number,
            digest=new.facts.digest if new.facts is not None else None,
            files=[*_keys(new.artifact)] if new.artifact is not None else None,
            base=new.base_fingerprint,
            base_verified=new.base_verified,
            base_named_by_file=new.facts is not None and new.facts.names_base,
            refusal=new.refusal,
            source=source,
        )
        return version

    def _adapter(self, change: Change, owner: Owner, name: str, *, wake: bool) -> AdapterRow:
        """The row of the name, made or, with `wake`, taken out of its grave. Raises RegistryLimitReached."""
        adapter = self._check_counts(change.connection, owner, name)
        if adapter is None:
            return insert_adapter(change.connection, owner, new_id(), name, change.at)
        if adapter.deleted and wake:
            revive(change.connection, owner, adapter)
        return adapter

    def _check_counts(self, connection: Connection, owner: Owner, name: str) -> AdapterRow | None:
        """The row of the name, if it may have one more version. Raises RegistryLimitReached."""
        adapter = find_adapter(connection, owner, name)
        if adapter is None:
            count, limit = count_adapters(connection, owner), self._limits.max_adapters
            if count >= limit:
                message = f"The tenant {owner.name!r} has {count} adapters; the limit is {limit} (max_adapters)."
                raise RegistryLimitReached(message)
        elif adapter.next_number > self._limits.max_versions:
            message = f"The adapter {owner.name}/{name} has had {adapter.next_number - 1} versions; "
            raise RegistryLimitReached(f"{message}the limit is {self._limits.max_versions} (max_versions).")
        return adapter

    def _check_bytes(self, connection: Connection, owner: Owner, stored: ArtifactRef) -> None:
        """Raise RegistryLimitReached if the tenant would keep too much with these files."""
        num_bytes, limit = count_bytes(connection, owner, stored), self._limits.max_bytes
        if num_bytes > limit:
            message = f"The tenant {owner.name!r} would keep {num_bytes} bytes; the limit is {limit} (max_bytes). "
            raise RegistryLimitReached(f"{message}Delete versions first.")


def _check_claim(claim: _Claim, facts: AdapterFacts) -> None:
    """Raise InvalidRequest unless the caller or the file says which base, or the caller that nobody knows."""
    if not claim.names_base(facts) and not claim.unverified:
        raise InvalidRequest(
            "The fingerprint of the base that the adapter was trained on is missing; give base_fingerprint, or "
            "base_unverified to have its absence recorded.",
            "base_fingerprint",
        )


def _check_form(base_fingerprint: str | None, source: str | None) -> None:
    """Raise InvalidRequest for what is no fingerprint, or a note on the origin that cannot stand in the audit log."""
    if base_fingerprint is not None and not is_blob_key(base_fingerprint):
        message = f"base_fingerprint must have 64 lower-case hex digits, got {base_fingerprint!r:.80}."
        raise InvalidRequest(message, "base_fingerprint")
    if source is not None and not (len(source) <= MAX_SOURCE_CHARS and source.isprintable()):
        message = f"source must be at most {MAX_SOURCE_CHARS} printable characters, got {source!r:.80}."
        raise InvalidRequest(message, "source")


def _check_base(base_fingerprint: str | None, base: BaseDescription) -> None:
    """Raise AdapterRefused (BASE_MISMATCH) if another base is named than the one that is served."""
    if base_fingerprint is not None and base_fingerprint != base.fingerprint:
        message = (
            f"The adapter was trained on the base {base_fingerprint[:12]}..., "
            f"but {base.name!r} has the fingerprint {base.fingerprint[:12]}...."
        )
        raise AdapterRefused(RefusalReason.BASE_MISMATCH, message, "base_fingerprint")


def _new_version(
    principal: Principal,
    base: BaseDescription,
    claim: _Claim,
    facts: AdapterFacts | None = None,
    stored: ArtifactRef | None = None,
    refusal: AdapterRefused | None = None,
) -> NewVersion:
    named = claim.names_base(facts)
    event = VersionEvent.REFUSE if refusal is not None else VersionEvent.VALIDATE
    return NewVersion(
        state=advance(VersionState.RECEIVED, event, "new"),
        base_fingerprint=BaseFingerprint(base.fingerprint),
        base_verified=named and refusal is None,
        base_override_by=principal.key_id if claim.unverified and not named else None,
        facts=facts,
        artifact=stored,
        refusal=refusal.reason_code if refusal is not None else None,
    )


def _keys(artifact: ArtifactRef) -> tuple[BlobKey, BlobKey]:
    return artifact.config.key, artifact.weights.key


def _unreferenced(connection: Connection, keys: list[BlobKey]) -> list[BlobKey]:
    """Which of these files no version needs; those of deleted versions are needed no more."""
    columns = versions.c
    query = (
        select(columns.config_key, columns.weights_key)
        .where(or_(columns.config_key.in_(keys), columns.weights_key.in_(keys)))
        .where(columns.state != VersionState.DELETED.value)
        .execution_options(cross_tenant="a stored file may belong to versions of several tenants")
    )
    used = {key for row in connection.execute(query) for key in row}
    return [key for key in keys if key not in used]
