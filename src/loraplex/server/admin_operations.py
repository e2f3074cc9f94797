"""What an administrator can do, once for the admin API and for the command line on a data directory.

Who may do what is the registry's to say. Every method blocks and may be called from any thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from loraplex.adapters import Adapter
from loraplex.core import BaseDescription, LoraplexError
from loraplex.core.comparison import AdapterComparison
from loraplex.core.registry_errors import AdapterDeleted, WrongBase
from loraplex.registry import LimitChanges, Principal, Registry, Role, VerificationResult, VersionState
from loraplex.server.admin_views import (
    AdapterDetailView,
    AdapterPage,
    AdapterView,
    AliasView,
    AuditEntryView,
    AuditPage,
    AuditReportView,
    CallerView,
    CreatedKeyView,
    DeletedView,
    GrantView,
    KeyPage,
    KeyView,
    TenantPage,
    TenantView,
    VerificationView,
    VerifiedView,
    VersionView,
)

_T = TypeVar("_T")
_K = TypeVar("_K")


@dataclass(frozen=True, slots=True)
class BaseClaim:
    """What base an adapter was trained on: a fingerprint, or that nobody knows. `source` says where it came from."""

    base_fingerprint: str | None = None
    base_unverified: bool = False
    source: str | None = None


class AdminOperations:
    """The operations as one caller. Each raises what the registry's method of its name raises."""

    def __init__(self, registry: Registry, principal: Principal) -> None:
        self._registry = registry
        self._principal = principal

    def whoami(self) -> CallerView:
        """Who the caller is."""
        return CallerView.of(self._principal)

    # ------------------------------------------------------------------ tenants
    def create_tenant(self, tenant: str) -> TenantView:
        """A new tenant."""
        return TenantView.of(self._registry.tenants.create(self._principal, tenant))

    def disable_tenant(self, tenant: str) -> TenantView:
        """Switch a tenant off."""
        return TenantView.of(self._registry.tenants.disable(self._principal, tenant))

    def enable_tenant(self, tenant: str) -> TenantView:
        """Switch a tenant on again."""
        return TenantView.of(self._registry.tenants.enable(self._principal, tenant))

    def show_tenant(self, tenant: str) -> TenantView:
        """One tenant, with its limits."""
        return TenantView.of(self._registry.tenants.find(self._principal, tenant))

    def change_limits(self, tenant: str, changes: LimitChanges) -> TenantView:
        """Set some of a tenant's limits."""
        return TenantView.of(self._registry.tenants.change_limits(self._principal, tenant, changes))

    def list_tenants(self, after: str = "", limit: int = 100) -> TenantPage:
        """Tenants in order of name, from the one behind `after`."""
        found = self._registry.tenants.list(self._principal, after, limit)
        return TenantPage(
            tenants=tuple(map(TenantView.of, found)), next_after=_last(found, limit, lambda one: one.name)
        )

    # ------------------------------------------------------------------ keys
    def create_key(
        self, tenant: str, role: Role, bound_adapter: str | None = None, expires_at: float | None = None
    ) -> CreatedKeyView:
        """A new key, with its text."""
        keys = self._registry.keys
        created = keys.create(self._principal, tenant, role, bound_adapter=bound_adapter, expires_at=expires_at)
        return CreatedKeyView.of(tenant, created)

    def list_keys(self, tenant: str, after: str = "", limit: int = 100) -> KeyPage:
        """A tenant's keys in order of id, from the one behind `after`."""
        found = self._registry.keys.list(self._principal, tenant, after, limit)
        keys = tuple(KeyView.of(tenant, info) for info in found)
        return KeyPage(keys=keys, next_after=_last(found, limit, lambda one: one.key_id))

    def revoke_key(self, tenant: str, key_id: str) -> KeyView:
        """Make a key worthless, for good."""
        return KeyView.of(tenant, self._registry.keys.revoke(self._principal, tenant, key_id))

    # ------------------------------------------------------------------ adapters
    def list_adapters(self, tenant: str, after: str = "", limit: int = 100) -> AdapterPage:
        """A tenant's adapters in order of name, from the one behind `after`, deleted ones too."""
        found = self._registry.adapters.list(self._principal, tenant, after, limit)
        adapters = tuple(AdapterView.of(tenant, info) for info in found)
        return AdapterPage(adapters=adapters, next_after=_last(found, limit, lambda one: one.name))

    def show_adapter(self, tenant: str, name: str) -> AdapterDetailView:
        """All that is known of an adapter."""
        return AdapterDetailView.of(tenant, self._registry.adapters.show(self._principal, tenant, name))

    def publish(self, tenant: str, name: str, directory: Path, base: BaseDescription, claim: BaseClaim) -> VersionView:
        """Check the adapter in a directory that we chose and keep it as the next version."""
        version = self._registry.publish(
            self._principal,
            tenant,
            name,
            directory,
            base,
            base_fingerprint=claim.base_fingerprint,
            base_unverified=claim.base_unverified,
            source=claim.source,
        )
        return VersionView.of(version)

    def compare(
        self,
        tenant: str,
        name: str,
        version: int,
        base: BaseDescription,
        compare: Callable[[Adapter], AdapterComparison],
    ) -> VerifiedView:
        """Have the engine compare a version with its merged reference and record the figures, pass or fail.

        Raises WrongBase where it is of another base than the engine's, ArtifactMissing, ArtifactCorrupt.
        """
        info = self._registry.adapters.version(self._principal, tenant, name, version)
        if info.state is VersionState.DELETED:
            raise AdapterDeleted(f"{tenant}/{name}@{version}")
        if info.base_fingerprint != base.fingerprint:
            message = f"{tenant}/{info.label} is of the base {info.base_fingerprint[:12]}..., "
            raise WrongBase(f"{message}but {base.name!r} is {base.fingerprint[:12]}....")
        figures = compare(self._registry.load(info, base, self._registry.adapter_limits))
        result = VerificationResult(
            passed=figures.passed,
            max_logit_difference=figures.max_logit_difference,
            kl=figures.kl,
            effect=figures.effect,
            tolerance=figures.tolerance,
            failure=figures.failure,
        )
        self._registry.adapters.record_verification(self._engine_for_caller(), tenant, name, version, result)
        return self._verified(tenant, name, version)

    def skip_verification(self, tenant: str, name: str, version: int) -> VerifiedView:
        """Let a version be used without comparison."""
        self._registry.adapters.skip_verification(self._principal, tenant, name, version)
        return self._verified(tenant, name, version)

    def activate(self, tenant: str, name: str, version: int, expected: int | None) -> AliasView:
        """Point the name at a version, if `expected` is the active one now."""
        adapters = self._registry.adapters
        alias = adapters.activate(self._principal, tenant, name, version, expected=expected)
        return AliasView.of(tenant, name, alias)

    def rollback(self, tenant: str, name: str, expected: int | None) -> AliasView:
        """Point the name at the version that was active before, if `expected` is the active one now."""
        alias = self._registry.adapters.rollback(self._principal, tenant, name, expected=expected)
        return AliasView.of(tenant, name, alias)

    def delete_adapter(self, tenant: str, name: str) -> DeletedView:
        """Delete a name with all its versions."""
        self._registry.adapters.delete(self._principal, tenant, name)
        return DeletedView(tenant=tenant, name=name, version=None)

    def delete_version(self, tenant: str, name: str, version: int) -> DeletedView:
        """Delete one version that is not active."""
        self._registry.adapters.delete_version(self._principal, tenant, name, version)
        return DeletedView(tenant=tenant, name=name, version=version)

    def grant(self, tenant: str, name: str, grantee: str) -> GrantView:
        """Let another tenant call the adapter."""
        self._registry.adapters.grant(self._principal, tenant, name, grantee)
        return GrantView(tenant=tenant, name=name, grantee=grantee, granted=True)

    def revoke_grant(self, tenant: str, name: str, grantee: str) -> GrantView:
        """Take a grant back."""
        self._registry.adapters.revoke_grant(self._principal, tenant, name, grantee)
        return GrantView(tenant=tenant, name=name, grantee=grantee, granted=False)

    # ------------------------------------------------------------------ audit
    def audit_entries(self, tenant: str, after: int = 0, limit: int = 100) -> AuditPage:
        """What happened to a tenant, oldest first, from the entry behind number `after`."""
        found = self._registry.audit_entries(self._principal, tenant, after, limit)
        entries = tuple(map(AuditEntryView.of, found))
        return AuditPage(tenant=tenant, entries=entries, next_after=_last(found, limit, lambda one: one.seq))

    def verify_audit(self, tenant: str | None = None) -> AuditReportView:
        """Check the audit log of one tenant, or of all."""
        return AuditReportView.of(self._registry.verify_audit(self._principal, tenant))

    def digest_of(self, tenant: str, name: str, version: int) -> str | None:
        """The digest of a version that the caller may see; None where there is none."""
        try:
            facts = self._registry.adapters.version(self._principal, tenant, name, version).facts
        except LoraplexError:  # what is asked of the version next says what is wrong
            return None
        return None if facts is None else facts.digest

    # ------------------------------------------------------------------ inside
    def _verified(self, tenant: str, name: str, version: int) -> VerifiedView:
        """The version with its last attempt."""
        detail = self._registry.adapters.show(self._principal, tenant, name)
        info = next(one for one in detail.versions if one.number == version)
        attempt = detail.verifications[version][-1]
        return VerifiedView(version=VersionView.of(info), verification=VerificationView.of(version, attempt))

    def _engine_for_caller(self) -> Principal:
        """Who vouches for figures is the engine; what is recorded is who asked for them.

        Only operators may hand in figures. A tenant's admin asks for them here and cannot touch them.
        """
        return replace(Registry.local_operator(), key_id=self._principal.key_id)


def _last(found: Sequence[_T], limit: int, key: Callable[[_T], _K]) -> _K | None:
    """The `after` of the next page; None where this one was not full."""
    return key(found[-1]) if len(found) == limit else None
