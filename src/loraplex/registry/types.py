"""Values that the registry gives out. Times are unix seconds, digests and hashes 64 lower-case hex digits."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from loraplex.core import AdapterDigest, AdapterRef, BaseFingerprint
from loraplex.registry.limits import TenantLimits

TenantId = NewType("TenantId", str)
"""Made by the registry; never text of a client."""

KeyId = NewType("KeyId", str)
"""The public part of an API key."""

BlobKey = NewType("BlobKey", str)
"""sha256 of the bytes of one stored file; made by `blobs.check_blob_key` or by hashing."""


class Role(StrEnum):
    """What a key may do: call models; also manage its tenant's adapters and keys; also manage all tenants."""

    TENANT = "tenant"
    TENANT_ADMIN = "tenant_admin"
    OPERATOR = "operator"

    def covers(self, other: "Role") -> bool:
        """True if this role may do all that the other may."""
        order = list(Role)
        return order.index(self) >= order.index(other)


class VersionState(StrEnum):
    """Where a version stands. RECEIVED lasts while `publish` runs and is never stored."""

    RECEIVED = "received"
    VALIDATED = "validated"  # may be served exactly; not compared with its merged reference yet
    VERIFIED = "verified"  # compared, and equal within the tolerance
    SKIPPED = "skipped"  # an operator decided to do without the comparison
    REFUSED = "refused"
    DELETED = "deleted"

    @property
    def usable(self) -> bool:
        """True where requests may be served from it and it may be activated."""
        return self in (VersionState.VERIFIED, VersionState.SKIPPED)


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is calling, as an API key says. `bound_adapter` is the only model the key may use, if it is bound to one.

    The binding ends with the adapter: what is published later under its name has another life than `bound_life`.
    """

    tenant_id: TenantId
    tenant: str
    role: Role
    key_id: KeyId
    bound_adapter: str | None = None  # as the caller would write it: `name`, or `tenant/name` where it was granted
    expires_at: float | None = None
    bound_life: int | None = None
    limits: TenantLimits = field(default_factory=TenantLimits)  # of its tenant


@dataclass(frozen=True, slots=True)
class TenantInfo:
    tenant_id: TenantId
    name: str
    created_at: float
    disabled_at: float | None
    limits: TenantLimits = field(default_factory=TenantLimits)


@dataclass(frozen=True, slots=True)
class RegistryCounts:
    """How much a registry holds: enabled tenants, and names of theirs that stand for a version."""

    tenants: int
    adapters: int


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """An API key without its secret."""

    key_id: KeyId
    role: Role
    bound_adapter: str | None
    created_at: float
    created_by: KeyId
    expires_at: float | None
    revoked_at: float | None


@dataclass(frozen=True, slots=True)
class BlobRef:
    """One stored file."""

    key: BlobKey
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ArtifactRef:
    """The two stored files of a version."""

    config: BlobRef
    weights: BlobRef


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What validation found out about an adapter. `num_bytes` counts the LoRA tensors as stored."""

    digest: AdapterDigest
    max_rank: int
    num_bytes: int
    targets: tuple[str, ...]
    declared_base: str | None  # the name its config gives; proof of nothing
    names_base: bool = False  # the weights' metadata holds the fingerprint of the base that it was checked against


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version. `facts` and `artifact` are None where it was refused; `refusal` is the reason's code then."""

    tenant: str
    name: str
    number: int
    state: VersionState
    base_fingerprint: BaseFingerprint
    base_verified: bool  # False: registered with the recorded override, by `base_override_by`
    base_override_by: KeyId | None
    created_at: float
    created_by: KeyId
    facts: AdapterFacts | None
    artifact: ArtifactRef | None
    refusal: str | None = None

    @property
    def label(self) -> str:
        return f"{self.name}@{self.number}"


@dataclass(frozen=True, slots=True)
class ResolvedVersion:
    """What a request's `model` stands for, for this caller at this moment."""

    ref: AdapterRef  # `ref.name` is `tenant/name` where the adapter was granted by another tenant
    tenant: str  # the owner
    artifact: ArtifactRef
    base_fingerprint: BaseFingerprint
    base_verified: bool
    declared_base: str | None
    rank: int
    num_bytes: int
    created: float


@dataclass(frozen=True, slots=True)
class ModelPage:
    """Models in order of name. `next_after` is the `after` of the next page, None on the last."""

    models: tuple[ResolvedVersion, ...]
    next_after: str | None


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """A comparison of unmerged and merged weights over probe prompts."""

    passed: bool
    max_logit_difference: float
    kl: float  # nats, mean over the positions compared
    effect: float  # largest change of a logit against the base without adapter; 0 means that it changes nothing
    tolerance: float  # what `max_logit_difference` was held against
    failure: str | None = None  # what was wrong whatever the logits say, in words


@dataclass(frozen=True, slots=True)
class VerificationInfo:
    """A recorded verification; `result` is None where it was skipped."""

    attempt: int
    at: float
    by: KeyId
    result: VerificationResult | None

    @property
    def skipped(self) -> bool:
        return self.result is None


@dataclass(frozen=True, slots=True)
class AliasInfo:
    """Which version a name stands for. `revision` grows by one with each move."""

    active: int | None
    revision: int


@dataclass(frozen=True, slots=True)
class AliasMove:
    """One move of the pointer."""

    revision: int
    action: str  # "activate", "rollback" or "delete"
    from_version: int | None
    to_version: int | None
    at: float
    by: KeyId


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """One adapter name. `active` and `latest` are the versions, where there are any."""

    name: str
    alias: AliasInfo
    deleted: bool
    active: VersionInfo | None
    latest: VersionInfo | None


@dataclass(frozen=True, slots=True)
class AdapterDetail:
    """All that is known of one adapter; `verifications` maps version numbers to their attempts, oldest first."""

    info: AdapterInfo
    versions: tuple[VersionInfo, ...]
    moves: tuple[AliasMove, ...]
    grantees: tuple[str, ...]
    verifications: dict[int, tuple[VerificationInfo, ...]] = field(default_factory=dict)
