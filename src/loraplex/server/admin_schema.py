"""The request bodies of the admin API. A field that is not here is a 400 naming it."""

from typing import Literal

from pydantic import Field

from loraplex.core.limits import MAX_MODEL_NAME_CHARS
from loraplex.server.schema import Body

MAX_VERSION = 999_999_999


class NewTenantBody(Body):
    """POST /admin/v1/tenants. The registry checks the name."""

    tenant: str = Field(max_length=MAX_MODEL_NAME_CHARS)


class NewKeyBody(Body):
    """POST .../keys. `expires_at` in unix seconds."""

    role: Literal["tenant", "tenant_admin", "operator"] = "tenant"
    bound_adapter: str | None = Field(default=None, max_length=MAX_MODEL_NAME_CHARS)
    expires_at: float | None = None


class VerifyBody(Body):
    """POST .../verify. `skip` is for operators."""

    skip: bool = False


class ActivateBody(Body):
    """POST .../activate. `expected` is the version that is active now; null or left out: none is."""

    version: int = Field(ge=1, le=MAX_VERSION)
    expected: int | None = Field(default=None, ge=1, le=MAX_VERSION)


class RollbackBody(Body):
    """POST .../rollback. `expected` as in ActivateBody."""

    expected: int | None = Field(default=None, ge=1, le=MAX_VERSION)


class EmptyBody(Body):
    """For requests that say everything by their path."""
