"""The registry as one object: opened on a data directory, used from any thread."""

import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from loraplex.adapters import Adapter, AdapterLimits, Artifact, check_artifact
from loraplex.core import AdapterDigest, BaseDescription, ConfigError, InvalidRequest
from loraplex.core.registry_errors import ArtifactCorrupt
from loraplex.registry.access import LOCAL_OPERATOR, find_tenant, require_role
from loraplex.registry.adapter_admin import Adapters
from loraplex.registry.audit import AuditEntry, AuditReport
from loraplex.registry.authentication import Authenticator
from loraplex.registry.blobs import BlobStore, StagedBlob
from loraplex.registry.changes import OnStep, Store, no_step
from loraplex.registry.database import Database
from loraplex.registry.directory_store import DirectoryStore
from loraplex.registry.key_admin import Keys
from loraplex.registry.limits import RegistryLimits, check_page
from loraplex.registry.master_secret import load_or_create_secret
from loraplex.registry.publishing import SWEEP_AFTER_S, Publisher, Validator
from loraplex.registry.resolver import Resolver
from loraplex.registry.sandbox import SandboxLimits, validate_in_subprocess
from loraplex.registry.standing import ChangedTenants, StandingVersion, changed_since, standing_versions
from loraplex.registry.tenants import Tenants
from loraplex.registry.types import AdapterFacts, ArtifactRef, ModelPage, Principal, ResolvedVersion, Role, VersionInfo
from loraplex.registry.uploads import Uploads

CheckFiles = Callable[[BaseDescription, AdapterLimits], Adapter]
"""Makes the adapter of files that were read. Raises ArtifactCorrupt, AdapterRefused."""


@dataclass(frozen=True, slots=True)
class RegistryConfig:
    """Where a registry lives and what it takes in. URLs may hold passwords, so they are not shown."""

    data_dir: Path
    database_url: str | None = field(default=None, repr=False)  # None: SQLite in data_dir
    artifacts_url: str | None = field(default=None, repr=False)  # s3://, gs://, az://; None: a directory in data_dir
    artifacts_options: Mapping[str, str] = field(default_factory=dict, repr=False)  # obstore's, e.g. endpoint, region
    limits: RegistryLimits = field(default_factory=RegistryLimits)
    adapter_limits: AdapterLimits = field(default_factory=AdapterLimits)
    sandbox: SandboxLimits = field(default_factory=SandboxLimits)


class Registry:
    """Tenants, keys, adapters and their history. Every method may be called from any thread; close it at the end.

    `tenants`, `keys` and `adapters` manage; `authenticate`, `resolve` and `list_models` are what requests need;
    `adapter_limits` is what is taken in. Any method may raise RegistryUnavailable, and one that changes something also
    AuditUnavailable and StoreFull.
    """

    __slots__ = (
        "_authenticator",
        "_blobs",
        "_publisher",
        "_resolver",
        "_store",
        "_uploads",
        "adapter_limits",
        "adapters",
        "keys",
        "tenants",
    )

    def __init__(
        self,
        config: RegistryConfig,
        *,
        clock: Callable[[], float] = time.time,
        validate: Validator | None = None,
        on_step: OnStep = no_step,
    ) -> None:
        """Open, creating what is not there. Raises ConfigError. A server calls `sweep` once after that.

        `clock`, `validate` and `on_step` stand in for the wall clock, the sandbox and nothing, in tests.
        """
        data_dir = _prepare_data_dir(config.data_dir)
        secret = load_or_create_secret(data_dir)
        self._store = Store(Database(config.database_url, data_dir), data_dir, secret, clock, on_step)
        try:
            self._store.prepare(secret)
            self._blobs = _open_blobs(config, data_dir, on_step)
            self._uploads = Uploads(data_dir / "uploads")
        except BaseException:
            self._store.database.close()
            raise
        if validate is None:
            validate = partial(_validate, limits=config.adapter_limits, sandbox=config.sandbox)
        pepper = secret.derive("api keys 1")
        self.tenants = Tenants(self._store)
        self.keys = Keys(self._store, pepper, config.limits)
        self.adapters = Adapters(self._store, config.limits)
        self.adapter_limits = config.adapter_limits
        self._authenticator = Authenticator(self._store, pepper)
        self._resolver = Resolver(self._store)
        self._publisher = Publisher(self._store, self._blobs, config.limits, config.adapter_limits, validate)

    @staticmethod
    def local_operator() -> Principal:
        """The operator that anyone is who can open the data directory. Its changes are recorded as by `local`."""
        return LOCAL_OPERATOR

    # ------------------------------------------------------------------ requests
    def authenticate(self, key: str) -> Principal:
        """Whose key this is. Raises Unauthenticated, the same for every reason."""
        return self._authenticator.authenticate(key)

    def recall_principal(self, key: str) -> Principal:
        """As `authenticate`, but never blocks. Raises NotInMemory where the database must be asked."""
        return self._authenticator.recall(key)

    def resolve(self, principal: Principal, model: str | None, base: BaseDescription) -> ResolvedVersion | None:
        """What `model` stands for: `name`, `name@3`, `tenant/name` or `tenant/name@3`. None for the base's exact name.

        `model` None means the adapter that the key is bound to. Raises ModelNotFound (also for what belongs to others),
        AdapterDeleted, AdapterNotVerified, AdapterNotActive, WrongBase, InvalidRequest.
        """
        return self._resolver.resolve(principal, model, base)

    def recall_version(self, principal: Principal, model: str | None, base: BaseDescription) -> ResolvedVersion | None:
        """As `resolve`, but never blocks. Raises NotInMemory where the database must be asked."""
        return self._resolver.recall(principal, model, base)

    def changed_since(self, epoch: int) -> ChangedTenants:
        """The tenants that something was changed of after an epoch, by any process. Blocks, for a query or two."""
        return changed_since(self._store, epoch)

    def standing_versions(self, names: Mapping[str, Collection[str]]) -> tuple[StandingVersion, ...]:
        """The usable versions of adapters that are given by tenant and name; none of what was taken away. Blocks."""
        return standing_versions(self._store, names)

    def list_models(self, principal: Principal, base: BaseDescription, after: str = "", limit: int = 100) -> ModelPage:
        """Active adapters of this base that the caller may use, by name, from the one behind `after`.

        The base itself is not among them. Raises InvalidRequest if `limit` is not in 1 .. 1000.
        """
        return self._resolver.page(principal, base, after, limit)

    def load(self, version: ResolvedVersion | VersionInfo, base: BaseDescription, limits: AdapterLimits) -> Adapter:
        """Read a version's files, hash and check them again. Blocks.

        Raises ArtifactMissing, ArtifactCorrupt, AdapterRefused, InvalidRequest for a version without files.
        """
        return self.read(version)(base, limits)

    def read(self, version: ResolvedVersion | VersionInfo) -> CheckFiles:
        """Read a version's files and hash them; what is returned checks them. Blocks for the store, little for the CPU.

        Raises ArtifactMissing, ArtifactCorrupt, StoreUnavailable, InvalidRequest for a version without files.
        """
        if isinstance(version, ResolvedVersion):
            ref, digest = version.artifact, version.ref.digest
        elif version.artifact is not None and version.facts is not None:
            ref, digest = version.artifact, version.facts.digest
        else:
            raise InvalidRequest(f"Version {version.label} is {version.state.value}; it has no files.", "version")
        return partial(_check_files, self.read_artifact(ref), ref, digest)

    def read_artifact(self, ref: ArtifactRef) -> Artifact:
        """Both files of a version, hashed again. Raises ArtifactMissing, ArtifactCorrupt, StoreUnavailable."""
        return Artifact(bytes(self._blobs.get(ref.config)), self._blobs.get(ref.weights))

    # ------------------------------------------------------------------ publishing
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
        """Check an adapter directory and keep it as the next version of a name. Nothing is activated. Blocks.

        `directory` is a path that the server chose; never take one from a client.
        `base_fingerprint` is the base it was trained on. Without it the weights' metadata must name it
        (`base_fingerprint`), or `base_unverified` must be set, and is recorded.
        `source` is a note on where it came from, for the audit log.
        For tenant admins and operators, whose keys must still be valid at the end: otherwise Unauthenticated, and
        nothing is kept. Raises AdapterRefused, after recording the refused version, InvalidRequest,
        PermissionDenied, TenantNotFound, RegistryLimitReached, StoreFull, StoreReadOnly, ValidatorFailed.
        """
        return self._publisher.publish(
            principal,
            tenant,
            name,
            directory,
            base,
            base_fingerprint=base_fingerprint,
            base_unverified=base_unverified,
            source=source,
        )

    def upload_directory(self, num_bytes: int = 0) -> AbstractContextManager[Path]:
        """A new empty directory beside the artifacts, for files that a client sends; gone at the end of the block.

        Raises Overloaded, StoreFull where there is no room for so many bytes, StoreUnavailable.
        """
        return self._uploads.directory(num_bytes)

    def sweep(self, older_than_s: float = SWEEP_AFTER_S) -> int:
        """Remove files that no version needs and uploads that were left, if older than this; returns how many."""
        return self._publisher.sweep(older_than_s) + self._uploads.sweep(self._store.now() - older_than_s)

    def digests(self) -> frozenset[AdapterDigest]:
        """Digests of all versions that were not deleted, of all tenants: for who keeps weights by digest."""
        return self._publisher.digests()

    # ------------------------------------------------------------------ audit
    def verify_audit(self, principal: Principal, tenant: str | None = None) -> AuditReport:
        """Check the audit log of one tenant, or with None of all (operators only), against its signatures."""
        require_role(principal, Role.OPERATOR if tenant is None else Role.TENANT_ADMIN)
        with self._store.read() as connection:
            chains = None if tenant is None else [find_tenant(connection, principal, tenant).tenant_id]
            return self._store.audit.verify(connection, chains)

    def audit_entries(
        self, principal: Principal, tenant: str, after: int = 0, limit: int = 100
    ) -> tuple[AuditEntry, ...]:
        """What happened to a tenant, oldest first, from the entry behind number `after`."""
        require_role(principal, Role.TENANT_ADMIN)
        check_page(limit)
        with self._store.read() as connection:
            chain = find_tenant(connection, principal, tenant).tenant_id
            return self._store.audit.entries(connection, chain, after, limit)

    # ------------------------------------------------------------------ life
    def check_ready(self) -> None:
        """Raise RegistryUnavailable unless the database answers, or did within the last 5 s."""
        self._store.cache.refresh()

    def close(self) -> None:
        """Close database connections and directories. The object cannot be used afterwards."""
        self._store.database.close()
        self._blobs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_files(
    artifact: Artifact, ref: ArtifactRef, digest: AdapterDigest, base: BaseDescription, limits: AdapterLimits
) -> Adapter:
    adapter = check_artifact(artifact, base, limits)
    if adapter.digest != digest:
        message = f"The files {ref.weights.key} and {ref.config.key} make the adapter {adapter.digest}, "
        raise ArtifactCorrupt(f"{message}not {digest} as recorded.")
    return adapter


def _validate(
    config: StagedBlob, weights: StagedBlob, base: BaseDescription, *, limits: AdapterLimits, sandbox: SandboxLimits
) -> AdapterFacts:
    return validate_in_subprocess(config, weights, base, limits, sandbox)


def _prepare_data_dir(data_dir: Path) -> Path:
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        data_dir = data_dir.resolve(strict=True)
    except OSError as error:
        raise ConfigError(f"The data directory {str(data_dir)!r} cannot be used: {error.strerror}.") from None
    if not os.access(data_dir, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"The data directory {str(data_dir)!r} cannot be written.")
    return data_dir


def _open_blobs(config: RegistryConfig, data_dir: Path, on_step: OnStep) -> BlobStore:
    directory = DirectoryStore(data_dir / "artifacts", on_step)
    if config.artifacts_url is None:
        return directory
    from loraplex.registry.object_store import ObjectStore

    return ObjectStore(config.artifacts_url, directory, on_step, config.artifacts_options)
