"""What the registry raises on purpose, below the classes of `errors.py`.

ClientError
├── Unauthenticated             no key, or one that is not valid, whatever the reason
├── PermissionDenied            the key's role does not allow this
├── TenantNotFound              no such tenant (for this caller)
├── TenantExists                the name of a new tenant is taken
├── KeyNotFound                 no such key in this tenant
├── ModelNotFound (core)        no such adapter or version (for this caller)
│   └── AdapterDeleted          it was there and was deleted
├── AdapterNotVerified          the version was not verified, failed, or was refused
├── AdapterNotActive            the name has no active version
├── WrongBase                   the version belongs to another base than the one that is served
├── VersionConflict             the active version is not the one that the caller expected
├── VersionStateError           the version's state does not allow this
└── RegistryLimitReached        a limit on keys, adapters or versions of a tenant
ServerError
├── RegistryUnavailable         the database cannot be reached, or is locked
├── StoreUnavailable            the artifact store cannot be reached
├── StoreFull                   no room for an artifact
├── StoreReadOnly               a write failed in a way that makes further ones unsafe
├── ArtifactMissing             a stored artifact is gone
├── ArtifactCorrupt             a stored artifact does not have the bytes its hash names
├── ValidatorFailed             the process that checks an adapter ended without a result
└── AuditUnavailable            the signed heads cannot be written, so nothing may be changed
"""

from loraplex.core.errors import ClientError, ModelNotFound, ServerError


class Unauthenticated(ClientError):
    """The one answer to every key that is not valid. It says nothing of the reason."""

    code = "invalid_api_key"

    def __init__(self) -> None:
        super().__init__("A valid API key is required.")


class PermissionDenied(ClientError):
    code = "permission_denied"


class TenantNotFound(ClientError):
    """No tenant of this name, or one that the caller may not see."""

    code = "tenant_not_found"

    def __init__(self, tenant: str) -> None:
        super().__init__(f"The tenant {tenant!r:.80} does not exist.")
        self.tenant = tenant


class TenantExists(ClientError):
    code = "tenant_exists"


class KeyNotFound(ClientError):
    code = "key_not_found"


class AdapterDeleted(ModelNotFound):
    """A tombstone answers: the adapter or version was deleted."""

    code = "adapter_deleted"

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.message = f"The model {model!r} was deleted."
        self.args = (self.message,)


class AdapterNotVerified(ClientError):
    code = "adapter_not_verified"


class AdapterNotActive(ClientError):
    code = "adapter_not_active"


class WrongBase(ClientError):
    code = "wrong_base"


class VersionConflict(ClientError):
    """A compare-and-set lost. `current` is the version that is active now, None if there is none."""

    code = "version_conflict"

    def __init__(self, message: str, current: int | None) -> None:
        super().__init__(message)
        self.current = current


class VersionStateError(ClientError):
    code = "version_state"


class RegistryLimitReached(ClientError):
    code = "registry_limit"


class RegistryUnavailable(ServerError):
    """`retry_after_s` is as in StoreUnavailable."""

    code = "registry_unavailable"
    retry_after_s = 1.0


class StoreUnavailable(ServerError):
    """`retry_after_s` is after how many seconds to try again; `goes_on`: of a read that failed so before, still."""

    code = "store_unavailable"
    retry_after_s = 1.0
    goes_on = False


class StoreFull(ServerError):
    code = "store_full"


class StoreReadOnly(ServerError):
    code = "store_read_only"


class ArtifactMissing(ServerError):
    code = "artifact_missing"


class ArtifactCorrupt(ServerError):
    code = "artifact_corrupt"


class ValidatorFailed(ServerError):
    code = "validator_failed"


class AuditUnavailable(ServerError):
    code = "audit_unavailable"
