"""Who calls, and what a route asks of its callers."""

from dataclasses import dataclass
from enum import StrEnum

from loraplex.registry import KeyId, Principal, Role


class Access(StrEnum):
    """Who may use a route."""

    PUBLIC = "public"  # anyone, without a key
    CALLER = "caller"  # any valid key
    ADMIN = "admin"  # tenant admins and operators
    OPERATOR = "operator"

    @property
    def role(self) -> Role:
        """The least role that a caller must have."""
        return _ROLES.get(self, Role.TENANT)


_ROLES = {Access.ADMIN: Role.TENANT_ADMIN, Access.OPERATOR: Role.OPERATOR}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from. Without a registry there is no principal: whoever has the one key is the operator."""

    principal: Principal | None
    role: Role

    @property
    def tenant(self) -> str | None:
        return self.principal.tenant if self.principal is not None else None

    @property
    def account(self) -> str:
        """Whose share of the server's limits a request takes: the tenant's; empty without a registry."""
        return self.tenant or ""

    @property
    def key_id(self) -> KeyId | None:
        return self.principal.key_id if self.principal is not None else None


LOCAL_CALLER = Caller(None, Role.OPERATOR)
"""The caller of a server without a registry."""
