"""Managing versions: verification, the active version, deletion, grants, and what is shown of them."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection

from loraplex.core import InvalidRequest, ModelNotFound
from loraplex.core.limits import MAX_MODEL_NAME_CHARS
from loraplex.core.registry_errors import (
    AdapterDeleted,
    AdapterNotVerified,
    RegistryLimitReached,
    TenantNotFound,
    VersionConflict,
    VersionStateError,
)
from loraplex.registry import repository
from loraplex.registry.access import find_owner, require_role, tenant_by_name
from loraplex.registry.changes import Change, Store
from loraplex.registry.lifecycle import VersionEvent, advance
from loraplex.registry.limits import MAX_FAILURE_CHARS, RegistryLimits, check_page
from loraplex.registry.repository import AdapterRow, Owner
from loraplex.registry.types import (
    AdapterDetail,
    AdapterInfo,
    AliasInfo,
    AliasMove,
    Principal,
    Role,
    VerificationInfo,
    VerificationResult,
    VersionInfo,
    VersionState,
)


@dataclass(frozen=True, slots=True)
class _Subject:
    """A change of one adapter."""

    change: Change
    owner: Owner
    adapter: AdapterRow
    principal: Principal

    @property
    def label(self) -> str:
        return f"{self.owner.name}/{self.adapter.name}"

    def record(self, action: str, **details: "str | int | float | bool | None") -> None:
        self.change.record(self.owner.tenant_id, self.principal.key_id, action, adapter=self.adapter.name, **details)


class Adapters:
    """Manages the adapters of a tenant; for its tenant admins and for operators, where nothing else is said.

    All methods raise PermissionDenied, TenantNotFound, ModelNotFound and AdapterDeleted.
    """

    __slots__ = ("_limits", "_store")

    def __init__(self, store: Store, limits: RegistryLimits) -> None:
        self._store = store
        self._limits = limits

    # ------------------------------------------------------------------ verification
    def record_verification(
        self, principal: Principal, tenant: str, name: str, version: int, result: VerificationResult
    ) -> VersionInfo:
        """Store a comparison with the merged reference. Operators only. A failed one makes the version unusable.

        Raises InvalidRequest for figures that are not finite, VersionStateError, and RegistryLimitReached after
        `max_verifications` attempts, unless the comparison takes a usable version out of service.
        """
        require_role(principal, Role.OPERATOR)
        _check_result(result)
        event = VersionEvent.VERIFY if result.passed else VersionEvent.FAIL
        figures = {
            "passed": result.passed,
            "max_logit_difference": result.max_logit_difference,
            "kl": result.kl,
            "effect": result.effect,
            "tolerance": result.tolerance,
            "failure": result.failure,
        }
        with self._subject(principal, tenant, name) as subject:
            before = _live_version(subject, version)
            if result.passed or not before.state.usable:
                self._check_attempts(subject, version)
            info = self._advance(subject, version, event)
            self._add_verification(subject, version, result)
            subject.record("version.verify", version=version, **figures)
            return info

    def skip_verification(self, principal: Principal, tenant: str, name: str, version: int) -> VersionInfo:
        """Let a version be used without comparison; who did it stays on record. Operators only.

        Raises VersionStateError, RegistryLimitReached.
        """
        require_role(principal, Role.OPERATOR)
        with self._subject(principal, tenant, name) as subject:
            info = self._advance(subject, version, VersionEvent.SKIP)
            self._check_attempts(subject, version)
            self._add_verification(subject, version, None)
            subject.record("version.skip_verification", version=version)
            return info

    # ------------------------------------------------------------------ the active version
    def activate(
        self, principal: Principal, tenant: str, name: str, version: int, *, expected: int | None
    ) -> AliasInfo:
        """Point the name at a version, if `expected` is the active one now (None: none is).

        Raises VersionConflict if it is another, AdapterNotVerified.
        """
        require_role(principal, Role.TENANT_ADMIN)
        with self._subject(principal, tenant, name) as subject:
            _check_expected(subject, expected)
            info = _live_version(subject, version)
            if not info.state.usable:
                raise AdapterNotVerified(f"Version {subject.label}@{version} is {_shown(info)}; it cannot be active.")
            return self._move(subject, "activate", version)

    def rollback(self, principal: Principal, tenant: str, name: str, *, expected: int | None) -> AliasInfo:
        """Point the name at the version that was active before, if `expected` is the active one now.

        Versions that are no longer usable are passed over. Raises VersionConflict, VersionStateError if none is left.
        """
        require_role(principal, Role.TENANT_ADMIN)
        with self._subject(principal, tenant, name) as subject:
            _check_expected(subject, expected)
            connection, owner, adapter = subject.change.connection, subject.owner, subject.adapter
            usable = {info.number for info in repository.list_versions(connection, owner, adapter) if info.state.usable}
            target = previous_version(repository.list_moves(connection, owner, adapter), usable)
            if target is None:
                raise VersionStateError(f"{subject.label} has no earlier version to roll back to.")
            return self._move(subject, "rollback", target)

    # ------------------------------------------------------------------ deletion
    def delete(self, principal: Principal, tenant: str, name: str) -> None:
        """Delete a name with all its versions and grants. Tombstones stay, and the numbers are never used again.

        What is published later under the name is another adapter: neither grants nor keys bound to this one open it.
        """
        require_role(principal, Role.TENANT_ADMIN)
        with self._subject(principal, tenant, name) as subject:
            connection, owner, adapter = subject.change.connection, subject.owner, subject.adapter
            if adapter.alias.active is not None:
                self._move(subject, "delete", None)
            for info in repository.list_versions(connection, owner, adapter):
                if info.state is not VersionState.DELETED:
                    self._bury(subject, info.number)
            for grantee in repository.list_grantees(connection, owner, adapter):
                self._end_grant(subject, grantee)
            repository.set_deleted(connection, owner, adapter, subject.change.at)
            subject.record("adapter.delete")

    def delete_version(self, principal: Principal, tenant: str, name: str, version: int) -> None:
        """Delete one version. Raises VersionConflict if it is the active one."""
        require_role(principal, Role.TENANT_ADMIN)
        with self._subject(principal, tenant, name) as subject:
            if subject.adapter.alias.active == version:
                message = f"Version {subject.label}@{version} is active; activate another one first."
                raise VersionConflict(message, version)
            self._bury(subject, version)
            subject.record("version.delete", version=version)

    # ------------------------------------------------------------------ grants
    def grant(self, principal: Principal, tenant: str, name: str, grantee: str) -> None:
        """Let another tenant call the adapter as `tenant/name`. Operators only; granting twice changes nothing."""
        require_role(principal, Role.OPERATOR)
        with self._subject(principal, tenant, name) as subject:
            connection, owner, adapter = subject.change.connection, subject.owner, subject.adapter
            other = tenant_by_name(connection, grantee)
            if other is None:
                raise TenantNotFound(grantee)
            if other.tenant_id == owner.tenant_id:
                raise InvalidRequest(f"The tenant {grantee!r} owns the adapter.", "grantee")
            if other.tenant_id not in {
                known.tenant_id for known in repository.list_grantees(connection, owner, adapter)
            }:
                at, by = subject.change.at, principal.key_id
                repository.add_grant(connection, owner, adapter, other.tenant_id, at, by)
            subject.change.touch(other.tenant_id)
            subject.record("grant.add", grantee=grantee)

    def revoke_grant(self, principal: Principal, tenant: str, name: str, grantee: str) -> None:
        """Take a grant back. Operators only. Raises TenantNotFound if the tenant has none."""
        require_role(principal, Role.OPERATOR)
        with self._subject(principal, tenant, name) as subject:
            other = tenant_by_name(subject.change.connection, grantee)
            if other is None or not self._end_grant(subject, Owner(other.tenant_id, other.name)):
                raise TenantNotFound(grantee)

    # ------------------------------------------------------------------ pins
    def record_pin(self, principal: Principal, tenant: str, name: str, *, is_pinned: bool) -> None:
        """Put on record that a server pinned the adapter, or unpins it. Operators only.

        Also of a deleted one, whose name may still be pinned.
        """
        require_role(principal, Role.OPERATOR)
        with self._subject(principal, tenant, name, deleted=True) as subject:
            subject.record("adapter.pin" if is_pinned else "adapter.unpin")

    # ------------------------------------------------------------------ reading
    def list(self, principal: Principal, tenant: str, after: str = "", limit: int = 100) -> tuple[AdapterInfo, ...]:
        """Adapters in order of name, from the one behind `after`, deleted ones too. `limit` is at most 1000."""
        require_role(principal, Role.TENANT_ADMIN)
        check_page(limit)
        with self._store.read() as connection:
            owner = find_owner(connection, principal, tenant, enabled=False)
            rows = repository.list_adapters(connection, owner, after, limit)
            current = repository.current_versions(connection, owner, rows)
            return tuple(_info(row, current) for row in rows)

    def show(self, principal: Principal, tenant: str, name: str) -> AdapterDetail:
        """All that is known of an adapter, also of a deleted one."""
        require_role(principal, Role.TENANT_ADMIN)
        with self._store.read() as connection:
            owner = find_owner(connection, principal, tenant, enabled=False)
            adapter = _adapter(connection, owner, name)
            versions = tuple(repository.list_versions(connection, owner, adapter))
            return AdapterDetail(
                info=_info(adapter, repository.current_versions(connection, owner, [adapter])),
                versions=versions,
                moves=tuple(repository.list_moves(connection, owner, adapter)),
                grantees=tuple(other.name for other in repository.list_grantees(connection, owner, adapter)),
                verifications=repository.list_verifications(connection, owner, adapter),
            )

    def version(self, principal: Principal, tenant: str, name: str, number: int) -> VersionInfo:
        """One version, in whatever state."""
        require_role(principal, Role.TENANT_ADMIN)
        with self._store.read() as connection:
            owner = find_owner(connection, principal, tenant, enabled=False)
            return _version(connection, owner, _adapter(connection, owner, name), number)

    # ------------------------------------------------------------------ inside
    @contextmanager
    def _subject(self, principal: Principal, tenant: str, name: str, *, deleted: bool = False) -> Iterator[_Subject]:
        """`deleted`: a deleted adapter will do too."""
        with self._store.change(principal) as change:
            owner = find_owner(change.connection, principal, tenant, enabled=False)
            adapter = _adapter(change.connection, owner, name)
            if adapter.deleted and not deleted:
                raise AdapterDeleted(f"{owner.name}/{name}")
            yield _Subject(change, owner, adapter, principal)

    def _advance(self, subject: _Subject, number: int, event: VersionEvent) -> VersionInfo:
        connection, owner, adapter = subject.change.connection, subject.owner, subject.adapter
        info = _live_version(subject, number)
        after = advance(info.state, event, f"{subject.label}@{number}")
        if not repository.set_state(connection, owner, adapter, number, info.state, after):
            raise VersionConflict(f"Version {subject.label}@{number} was changed at the same time.", number)
        return _version(connection, owner, adapter, number)

    def _add_verification(self, subject: _Subject, number: int, result: VerificationResult | None) -> VerificationInfo:
        at, by = subject.change.at, subject.principal.key_id
        return repository.add_verification(
            subject.change.connection, subject.owner, subject.adapter, number, result, at, by
        )

    def _move(self, subject: _Subject, action: str, target: int | None) -> AliasInfo:
        current = subject.adapter.alias
        at, by = subject.change.at, subject.principal.key_id
        move = AliasMove(current.revision + 1, action, current.active, target, at, by)
        if not repository.move_alias(subject.change.connection, subject.owner, subject.adapter, move):
            raise VersionConflict(f"The active version of {subject.label} was moved at the same time.", current.active)
        if action != "delete":
            subject.record(f"alias.{action}", from_version=current.active, to_version=target)
        return AliasInfo(target, move.revision)

    def _check_attempts(self, subject: _Subject, number: int) -> None:
        count = repository.count_verifications(subject.change.connection, subject.owner, subject.adapter, number)
        if count >= self._limits.max_verifications:
            message = f"Version {subject.label}@{number} has had {count} verifications; "
            raise RegistryLimitReached(f"{message}the limit is {self._limits.max_verifications} (max_verifications).")

    def _end_grant(self, subject: _Subject, grantee: Owner) -> bool:
        """False if there was none."""
        connection, owner, adapter = subject.change.connection, subject.owner, subject.adapter
        if not repository.remove_grant(connection, owner, adapter, grantee.tenant_id):
            return False
        subject.change.touch(grantee.tenant_id)
        subject.record("grant.remove", grantee=grantee.name)
        return True

    def _bury(self, subject: _Subject, number: int) -> None:
        at, by = subject.change.at, subject.principal.key_id
        info = self._advance(subject, number, VersionEvent.DELETE)
        repository.add_tombstone(subject.change.connection, subject.owner, subject.adapter, info, at, by)


def previous_version(moves: list[AliasMove], usable: set[int]) -> int | None:
    """Where a rollback goes: activations stack up, rollbacks take them off again; the next usable one below the top.

    After 1, 2, 3 a rollback gives 2 and another one 1. A deleted name starts anew.
    """
    stack: list[int] = []
    for move in moves:
        if move.to_version is None:
            stack.clear()
        elif move.action == "rollback":
            while stack and stack[-1] != move.to_version:
                stack.pop()
        elif not stack or stack[-1] != move.to_version:
            stack.append(move.to_version)
    below = [number for number in stack[:-1] if number in usable and number != stack[-1]]
    return below[-1] if below else None


def _check_expected(subject: _Subject, expected: int | None) -> None:
    current = subject.adapter.alias.active
    if current != expected:
        shown = "none" if current is None else f"version {current}"
        wanted = "none" if expected is None else f"version {expected}"
        message = f"The active version of {subject.label} is {shown}, not {wanted} as expected; nothing was changed."
        raise VersionConflict(message, current)


def _check_result(result: VerificationResult) -> None:
    for name in ("max_logit_difference", "kl", "effect", "tolerance"):
        value = getattr(result, name)
        if not math.isfinite(value):
            raise InvalidRequest(f"{name} of a verification must be finite, got {value}.", name)
    if result.passed and result.max_logit_difference > result.tolerance:
        message = f"A difference of {result.max_logit_difference} does not pass a tolerance of {result.tolerance}."
        raise InvalidRequest(message, "passed")
    if result.failure is not None and (result.passed or len(result.failure) > MAX_FAILURE_CHARS):
        message = f"A failure is for what did not pass, in at most {MAX_FAILURE_CHARS} characters."
        raise InvalidRequest(message, "failure")


def _shown(info: VersionInfo) -> str:
    return f"{info.state.value} ({info.refusal})" if info.refusal is not None else info.state.value


def _adapter(connection: Connection, owner: Owner, name: str) -> AdapterRow:
    adapter = repository.find_adapter(connection, owner, name)
    if adapter is None:
        raise ModelNotFound(f"{owner.name}/{name[:MAX_MODEL_NAME_CHARS]}")
    return adapter


def _version(connection: Connection, owner: Owner, adapter: AdapterRow, number: int) -> VersionInfo:
    """One version, in whatever state. Raises ModelNotFound."""
    info = repository.find_version(connection, owner, adapter, number)
    if info is None:
        raise ModelNotFound(f"{owner.name}/{adapter.name}@{number}")
    return info


def _live_version(subject: _Subject, number: int) -> VersionInfo:
    """A version that is not deleted. Raises ModelNotFound, AdapterDeleted."""
    info = _version(subject.change.connection, subject.owner, subject.adapter, number)
    if info.state is VersionState.DELETED:
        raise AdapterDeleted(f"{subject.label}@{number}")
    return info


def _info(row: AdapterRow, current: Mapping[tuple[str, int], VersionInfo]) -> AdapterInfo:
    active = current.get((row.adapter_id, row.alias.active)) if row.alias.active is not None else None
    latest = current.get((row.adapter_id, row.next_number - 1))
    return AdapterInfo(row.name, row.alias, row.deleted, active, latest)
