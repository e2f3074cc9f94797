"""One set of administrator's operations for the commands, on a data directory or on a server."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from loraplex.core import ConfigError

if TYPE_CHECKING:
    from loraplex.registry import LimitChanges, Role
    from loraplex.server.admin_operations import BaseClaim
    from loraplex.server.admin_views import (
        AdapterDetailView,
        AdapterPage,
        AliasView,
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
        VerifiedView,
        VersionView,
    )

Progress = Callable[[int, int], None]
"""Called with (done, in all)."""


@dataclass(frozen=True, slots=True)
class LocalBase:
    """The base that a command on a data directory checks adapters against; a server knows its own."""

    directory: Path
    name: str | None = None  # in requests; None: the directory's name
    device: str = "auto"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the commands work: a data directory, or the URL of a server."""

    data_dir: Path | None = None
    database_url: str | None = None
    artifacts_url: str | None = None
    url: str | None = None
    api_key_file: Path | None = None


class AdminClient(Protocol):
    """What an administrator can do. Lists come in pages: `after` is `next_after` of the page before.

    Every method raises LoraplexError with the code that the registry or the server gave.
    """

    def whoami(self) -> "CallerView": ...

    def create_tenant(self, tenant: str) -> "TenantView": ...

    def disable_tenant(self, tenant: str) -> "TenantView": ...

    def enable_tenant(self, tenant: str) -> "TenantView": ...

    def show_tenant(self, tenant: str) -> "TenantView": ...

    def change_limits(self, tenant: str, changes: "LimitChanges") -> "TenantView": ...

    def list_tenants(self, after: str = "", limit: int = 100) -> "TenantPage": ...

    def create_key(
        self, tenant: str, role: "Role", bound_adapter: str | None = None, expires_at: float | None = None
    ) -> "CreatedKeyView": ...

    def list_keys(self, tenant: str, after: str = "", limit: int = 100) -> "KeyPage": ...

    def revoke_key(self, tenant: str, key_id: str) -> "KeyView": ...

    def list_adapters(self, tenant: str, after: str = "", limit: int = 100) -> "AdapterPage": ...

    def show_adapter(self, tenant: str, name: str) -> "AdapterDetailView": ...

    def add_version(
        self, tenant: str, name: str, directory: Path, claim: "BaseClaim", base: LocalBase | None, progress: Progress
    ) -> "VersionView":
        """Check an adapter directory and keep it as the next version. A server takes no `base`: it has one."""
        ...

    def verify(self, tenant: str, name: str, version: int, base: LocalBase | None) -> "VerifiedView":
        """Have an engine compare the version with its merged reference."""
        ...

    def skip_verification(self, tenant: str, name: str, version: int) -> "VerifiedView": ...

    def activate(self, tenant: str, name: str, version: int, expected: int | None) -> "AliasView": ...

    def rollback(self, tenant: str, name: str, expected: int | None) -> "AliasView": ...

    def delete_adapter(self, tenant: str, name: str) -> "DeletedView": ...

    def delete_version(self, tenant: str, name: str, version: int) -> "DeletedView": ...

    def grant(self, tenant: str, name: str, grantee: str) -> "GrantView": ...

    def revoke_grant(self, tenant: str, name: str, grantee: str) -> "GrantView": ...

    def audit_entries(self, tenant: str, after: int = 0, limit: int = 100) -> "AuditPage": ...

    def verify_audit(self, tenant: str | None = None) -> "AuditReportView": ...


@contextmanager
def open_client(place: Place, *, creates: bool = False) -> Iterator[AdminClient]:
    """The client of a place, closed at the end. Raises ConfigError unless one place is given.

    A data directory must hold a registry, unless the command `creates` one.
    """
    if place.url is not None and place.data_dir is not None:
        raise ConfigError("Give --data-dir or --url, not both (LORAPLEX_DATA_DIR and LORAPLEX_URL count too).")
    if place.url is not None:
        from loraplex.cli.http_client import HttpClient

        with HttpClient(place.url, _read_key(place.api_key_file)) as client:
            yield client
    elif place.data_dir is not None:
        from loraplex.cli.local_client import LocalClient, check_registry

        if not creates:
            check_registry(place.data_dir, place.database_url)
        with LocalClient(place.data_dir, place.database_url, place.artifacts_url) as client:
            yield client
    else:
        raise ConfigError("Say where to work: --data-dir DIR, or --url URL of a server.")


def _read_key(path: Path | None) -> str:
    """The key of a file, else of LORAPLEX_API_KEY. Raises ConfigError."""
    if path is None:
        key = os.environ.get("LORAPLEX_API_KEY", "")
    else:
        try:
            key = path.read_text(encoding="ascii", errors="replace").strip()
        except OSError as error:
            raise ConfigError(f"--api-key-file {str(path)!r} cannot be read: {error.strerror}.") from None
    if not key:
        raise ConfigError("A server wants a key: set LORAPLEX_API_KEY, or give --api-key-file.")
    if not all("!" <= char <= "~" for char in key):
        raise ConfigError("The API key holds characters that no key has; it must be one line of ASCII.")
    return key
