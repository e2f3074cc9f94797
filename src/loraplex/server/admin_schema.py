"""The request bodies of the admin API. A field that is not here is a 400 naming it."""

from typing import Any, Literal, cast

from pydantic import Field

from loraplex.core.limits import MAX_MODEL_NAME_CHARS
from loraplex.registry import LimitChanges
from loraplex.server.schema import Body

MAX_VERSION = 999_999_999


class NewTenantBody(Body):
    """POST /admin/v1/tenants. The registry checks the name."""

    tenant: str = Field(max_length=MAX_MODEL_NAME_CHARS)


def _left_out(schema: dict[str, Any]) -> None:
    """What is left out stays as it is, so there is no default to tell of."""
    schema.pop("default", None)


class LimitsBody(Body):
    """PATCH .../limits. What is left out stays; "none" takes a bound away. The registry checks the numbers."""

    weight: float = Field(default=1.0, json_schema_extra=_left_out)
    priority: int = Field(default=0, json_schema_extra=_left_out)
    max_requests: int | Literal["none"] = Field(default="none", json_schema_extra=_left_out)
    tokens_per_minute: int | Literal["none"] = Field(default="none", json_schema_extra=_left_out)

    def changes(self) -> LimitChanges:
        """The values that were given."""
        given = self.model_dump(exclude_unset=True)
        return cast("LimitChanges", {name: None if value == "none" else value for name, value in given.items()})


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
