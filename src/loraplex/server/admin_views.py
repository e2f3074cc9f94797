"""What the admin API and `loraplex ... --json` show. Times are unix seconds, digests 64 lower-case hex digits.

A field is never taken away or renamed; readers must bear new ones.
"""

from pydantic import BaseModel, ConfigDict

from loraplex.registry import (
    AdapterDetail,
    AdapterInfo,
    AliasInfo,
    AliasMove,
    AuditEntry,
    AuditReport,
    CreatedKey,
    FindingKind,
    KeyInfo,
    Principal,
    Role,
    TenantInfo,
    TenantLimits,
    VerificationInfo,
    VersionInfo,
    VersionState,
)

Detail = str | int | float | bool | None | list[str]


class View(BaseModel):
    """An answer. Fields that this version does not know are passed over, so that a command may be the older part."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class CallerView(View):
    """Whose key it is. `tenant` is empty for the local operator."""

    tenant: str
    role: Role
    key_id: str
    bound_adapter: str | None
    expires_at: float | None

    @classmethod
    def of(cls, principal: Principal) -> "CallerView":
        bound, expires_at = principal.bound_adapter, principal.expires_at
        return cls(
            tenant=principal.tenant,
            role=principal.role,
            key_id=principal.key_id,
            bound_adapter=bound,
            expires_at=expires_at,
        )


class LimitsView(View):
    """A tenant's part of each server; null is no bound."""

    weight: float
    priority: int
    max_requests: int | None
    tokens_per_minute: int | None

    @classmethod
    def of(cls, limits: TenantLimits) -> "LimitsView":
        return cls(
            weight=limits.weight,
            priority=limits.priority,
            max_requests=limits.max_requests,
            tokens_per_minute=limits.tokens_per_minute,
        )


class TenantView(View):
    tenant: str
    created_at: float
    disabled_at: float | None
    limits: LimitsView

    @classmethod
    def of(cls, info: TenantInfo) -> "TenantView":
        limits = LimitsView.of(info.limits)
        return cls(tenant=info.name, created_at=info.created_at, disabled_at=info.disabled_at, limits=limits)


class TenantPage(View):
    tenants: tuple[TenantView, ...]
    next_after: str | None = None


class KeyView(View):
    """A key without its secret."""

    tenant: str
    key_id: str
    role: Role
    bound_adapter: str | None
    created_at: float
    created_by: str
    expires_at: float | None
    revoked_at: float | None

    @classmethod
    def of(cls, tenant: str, info: KeyInfo) -> "KeyView":
        return cls(
            tenant=tenant,
            key_id=info.key_id,
            role=info.role,
            bound_adapter=info.bound_adapter,
            created_at=info.created_at,
            created_by=info.created_by,
            expires_at=info.expires_at,
            revoked_at=info.revoked_at,
        )


class CreatedKeyView(View):
    """A new key. `api_key` is its text, and this the only time that it is shown."""

    api_key: str
    key: KeyView

    @classmethod
    def of(cls, tenant: str, created: CreatedKey) -> "CreatedKeyView":
        return cls(api_key=created.key.reveal(), key=KeyView.of(tenant, created.info))


class KeyPage(View):
    keys: tuple[KeyView, ...]
    next_after: str | None = None


class FileView(View):
    """One stored file."""

    name: str
    sha256: str
    bytes: int


class VersionView(View):
    """One version. What only validation can find out is null where it was refused; `refusal` is the reason then."""

    tenant: str
    name: str
    version: int
    state: VersionState
    base_fingerprint: str
    base_verified: bool  # False: nobody said which base it was trained on; `base_override_by` registered it so
    base_override_by: str | None
    created_at: float
    created_by: str
    digest: str | None
    rank: int | None
    targets: tuple[str, ...] | None
    bytes: int | None  # of the LoRA tensors
    declared_base: str | None
    files: tuple[FileView, ...]
    refusal: str | None

    @classmethod
    def of(cls, info: VersionInfo) -> "VersionView":
        facts = info.facts
        return cls(
            tenant=info.tenant,
            name=info.name,
            version=info.number,
            state=info.state,
            base_fingerprint=info.base_fingerprint,
            base_verified=info.base_verified,
            base_override_by=info.base_override_by,
            created_at=info.created_at,
            created_by=info.created_by,
            digest=facts.digest if facts is not None else None,
            rank=facts.max_rank if facts is not None else None,
            targets=facts.targets if facts is not None else None,
            bytes=facts.num_bytes if facts is not None else None,
            declared_base=facts.declared_base if facts is not None else None,
            files=_files(info),
            refusal=info.refusal,
        )


class AliasView(View):
    """Which version the name stands for; `revision` grows by one with each move."""

    tenant: str
    name: str
    active: int | None
    revision: int

    @classmethod
    def of(cls, tenant: str, name: str, info: AliasInfo) -> "AliasView":
        return cls(tenant=tenant, name=name, active=info.active, revision=info.revision)


class AdapterView(View):
    """One adapter with its active and its latest version, where there are any."""

    tenant: str
    name: str
    deleted: bool
    active: int | None
    revision: int
    active_version: VersionView | None
    latest_version: VersionView | None

    @classmethod
    def of(cls, tenant: str, info: AdapterInfo) -> "AdapterView":
        return cls(
            tenant=tenant,
            name=info.name,
            deleted=info.deleted,
            active=info.alias.active,
            revision=info.alias.revision,
            active_version=VersionView.of(info.active) if info.active is not None else None,
            latest_version=VersionView.of(info.latest) if info.latest is not None else None,
        )


class AdapterPage(View):
    adapters: tuple[AdapterView, ...]
    next_after: str | None = None


class VerificationView(View):
    """One attempt of the gate. The figures are null where it was skipped; `effect` 0 means that it changes nothing."""

    version: int
    attempt: int
    at: float
    by: str
    skipped: bool
    passed: bool | None
    max_logit_difference: float | None
    tolerance: float | None
    kl: float | None
    effect: float | None
    failure: str | None

    @classmethod
    def of(cls, version: int, info: VerificationInfo) -> "VerificationView":
        result = info.result
        return cls(
            version=version,
            attempt=info.attempt,
            at=info.at,
            by=info.by,
            skipped=info.skipped,
            passed=result.passed if result is not None else None,
            max_logit_difference=result.max_logit_difference if result is not None else None,
            tolerance=result.tolerance if result is not None else None,
            kl=result.kl if result is not None else None,
            effect=result.effect if result is not None else None,
            failure=result.failure if result is not None else None,
        )


class MoveView(View):
    """One move of the pointer."""

    revision: int
    action: str
    from_version: int | None
    to_version: int | None
    at: float
    by: str

    @classmethod
    def of(cls, move: AliasMove) -> "MoveView":
        return cls(
            revision=move.revision,
            action=move.action,
            from_version=move.from_version,
            to_version=move.to_version,
            at=move.at,
            by=move.by,
        )


class AdapterDetailView(View):
    """All that is known of one adapter."""

    adapter: AdapterView
    versions: tuple[VersionView, ...]
    verifications: tuple[VerificationView, ...]
    moves: tuple[MoveView, ...]
    grantees: tuple[str, ...]

    @classmethod
    def of(cls, tenant: str, detail: AdapterDetail) -> "AdapterDetailView":
        return cls(
            adapter=AdapterView.of(tenant, detail.info),
            versions=tuple(map(VersionView.of, detail.versions)),
            verifications=tuple(
                VerificationView.of(version, attempt)
                for version in sorted(detail.verifications)
                for attempt in detail.verifications[version]
            ),
            moves=tuple(map(MoveView.of, detail.moves)),
            grantees=detail.grantees,
        )


class VerifiedView(View):
    """A version after an attempt of the gate, and that attempt."""

    version: VersionView
    verification: VerificationView


class GrantView(View):
    """Whether a tenant may call another tenant's adapter."""

    tenant: str
    name: str
    grantee: str
    granted: bool


class PinView(View):
    """Whether this server keeps the adapter in its pool; `digest` is that of the weights that the name stands for."""

    tenant: str
    name: str
    pinned: bool
    digest: str | None


class DeletedView(View):
    """What was deleted; `version` null stands for the name with all its versions."""

    tenant: str
    name: str
    version: int | None


class AuditEntryView(View):
    """One recorded event."""

    seq: int
    at: float
    actor: str
    action: str
    details: dict[str, Detail]

    @classmethod
    def of(cls, entry: AuditEntry) -> "AuditEntryView":
        return cls(seq=entry.seq, at=entry.at, actor=entry.actor, action=entry.action, details=dict(entry.details))


class AuditPage(View):
    tenant: str
    entries: tuple[AuditEntryView, ...]
    next_after: int | None = None


class FindingView(View):
    """One thing wrong. `chain` is a tenant's id or "system"."""

    kind: FindingKind
    chain: str
    seq: int
    message: str


class AuditReportView(View):
    """What was checked, and what is wrong with it."""

    ok: bool
    chains: int
    entries: int
    findings: tuple[FindingView, ...]

    @classmethod
    def of(cls, report: AuditReport) -> "AuditReportView":
        findings = tuple(
            FindingView(kind=one.kind, chain=one.chain, seq=one.seq, message=one.message) for one in report.findings
        )
        return cls(ok=report.ok, chains=report.num_chains, entries=report.num_entries, findings=findings)


def _files(info: VersionInfo) -> tuple[FileView, ...]:
    if info.artifact is None:
        return ()
    blobs = (("adapter_config.json", info.artifact.config), ("adapter_model.safetensors", info.artifact.weights))
    return tuple(FileView(name=name, sha256=blob.key, bytes=blob.num_bytes) for name, blob in blobs)
