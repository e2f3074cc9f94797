"""The administrator's operations on a server, through its admin API."""

import io
import json
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from loraplex.adapters import AdapterLimits
from loraplex.adapters.artifact import read_artifact
from loraplex.cli.admin_client import LocalBase, Progress
from loraplex.core import ClientError, ConfigError, InvalidRequest, LoraplexError, ServerError
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
    View,
)

_V = TypeVar("_V", bound=View)
_Json = dict[str, Any]
_TIMEOUT = httpx.Timeout(30.0, read=900.0)  # a comparison on a large base may take minutes


class HttpClient:
    """An AdminClient. Use it in a `with` block, which closes the connection."""

    def __init__(self, url: str, api_key: str) -> None:
        """Connects at the first call. Raises ConfigError for what is no URL."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url!r:.200} is not a URL; write for example http://127.0.0.1:8000.")
        try:
            base_url = httpx.URL(url.rstrip("/").removesuffix("/v1"))
        except httpx.InvalidURL as error:
            raise ConfigError(f"--url {url!r:.200} is not a URL: {error}.") from None
        self._http = httpx.Client(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}, timeout=_TIMEOUT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def whoami(self) -> CallerView:
        """See AdminClient."""
        return self._call(CallerView, "GET", "caller")

    # ------------------------------------------------------------------ tenants
    def create_tenant(self, tenant: str) -> TenantView:
        """See AdminClient."""
        return self._call(TenantView, "POST", "tenants", body={"tenant": tenant})

    def disable_tenant(self, tenant: str) -> TenantView:
        """See AdminClient."""
        return self._call(TenantView, "POST", _path(tenant, "disable"), body={})

    def enable_tenant(self, tenant: str) -> TenantView:
        """See AdminClient."""
        return self._call(TenantView, "POST", _path(tenant, "enable"), body={})

    def show_tenant(self, tenant: str) -> TenantView:
        """See AdminClient."""
        return self._call(TenantView, "GET", _path(tenant))

    def change_limits(self, tenant: str, changes: LimitChanges) -> TenantView:
        """See AdminClient."""
        body = {name: "none" if value is None else value for name, value in changes.items()}
        return self._call(TenantView, "PATCH", _path(tenant, "limits"), body=body)

    def list_tenants(self, after: str = "", limit: int = 100) -> TenantPage:
        """See AdminClient."""
        return self._call(TenantPage, "GET", "tenants", query={"after": after, "limit": limit})

    # ------------------------------------------------------------------ keys
    def create_key(
        self, tenant: str, role: Role, bound_adapter: str | None = None, expires_at: float | None = None
    ) -> CreatedKeyView:
        """See AdminClient."""
        body = {"role": role.value, "bound_adapter": bound_adapter, "expires_at": expires_at}
        return self._call(CreatedKeyView, "POST", _path(tenant, "keys"), body=body)

    def list_keys(self, tenant: str, after: str = "", limit: int = 100) -> KeyPage:
        """See AdminClient."""
        return self._call(KeyPage, "GET", _path(tenant, "keys"), query={"after": after, "limit": limit})

    def revoke_key(self, tenant: str, key_id: str) -> KeyView:
        """See AdminClient."""
        return self._call(KeyView, "DELETE", _path(tenant, "keys", key_id))

    # ------------------------------------------------------------------ adapters
    def list_adapters(self, tenant: str, after: str = "", limit: int = 100) -> AdapterPage:
        """See AdminClient."""
        return self._call(AdapterPage, "GET", _path(tenant, "adapters"), query={"after": after, "limit": limit})

    def show_adapter(self, tenant: str, name: str) -> AdapterDetailView:
        """See AdminClient."""
        return self._call(AdapterDetailView, "GET", _path(tenant, "adapters", name))

    def add_version(
        self, tenant: str, name: str, directory: Path, claim: BaseClaim, base: LocalBase | None, progress: Progress
    ) -> VersionView:
        """See AdminClient. Reads the directory as a server would: two files, no pickles, no links that leave it."""
        if base is not None:
            raise ConfigError("A server checks against the base that it serves; leave out --base.")
        artifact = read_artifact(directory, AdapterLimits())
        fields = {"base_fingerprint": claim.base_fingerprint, "source": claim.source}
        data = {key: value for key, value in fields.items() if value is not None}
        if claim.base_unverified:
            data["base_unverified"] = "true"
        weights = _Counted(artifact.weights, progress)
        files = {"config": ("config", artifact.config), "weights": ("weights", weights)}
        return self._call(VersionView, "POST", _path(tenant, "adapters", name, "versions"), data=data, files=files)

    def verify(self, tenant: str, name: str, version: int, base: LocalBase | None) -> VerifiedView:
        """See AdminClient."""
        if base is not None:
            raise ConfigError("A server compares on the base that it serves; leave out --base.")
        return self._verify(tenant, name, version, skip=False)

    def skip_verification(self, tenant: str, name: str, version: int) -> VerifiedView:
        """See AdminClient."""
        return self._verify(tenant, name, version, skip=True)

    def activate(self, tenant: str, name: str, version: int, expected: int | None) -> AliasView:
        """See AdminClient."""
        body = {"version": version, "expected": expected}
        return self._call(AliasView, "POST", _path(tenant, "adapters", name, "activate"), body=body)

    def rollback(self, tenant: str, name: str, expected: int | None) -> AliasView:
        """See AdminClient."""
        return self._call(AliasView, "POST", _path(tenant, "adapters", name, "rollback"), body={"expected": expected})

    def delete_adapter(self, tenant: str, name: str) -> DeletedView:
        """See AdminClient."""
        return self._call(DeletedView, "DELETE", _path(tenant, "adapters", name))

    def delete_version(self, tenant: str, name: str, version: int) -> DeletedView:
        """See AdminClient."""
        return self._call(DeletedView, "DELETE", _path(tenant, "adapters", name, "versions", str(version)))

    def grant(self, tenant: str, name: str, grantee: str) -> GrantView:
        """See AdminClient."""
        return self._call(GrantView, "PUT", _path(tenant, "adapters", name, "grants", grantee))

    def revoke_grant(self, tenant: str, name: str, grantee: str) -> GrantView:
        """See AdminClient."""
        return self._call(GrantView, "DELETE", _path(tenant, "adapters", name, "grants", grantee))

    # ------------------------------------------------------------------ audit
    def audit_entries(self, tenant: str, after: int = 0, limit: int = 100) -> AuditPage:
        """See AdminClient."""
        return self._call(AuditPage, "GET", _path(tenant, "audit"), query={"after": after, "limit": limit})

    def verify_audit(self, tenant: str | None = None) -> AuditReportView:
        """See AdminClient."""
        path = "audit/verify" if tenant is None else _path(tenant, "audit", "verify")
        return self._call(AuditReportView, "GET", path)

    # ------------------------------------------------------------------ inside
    def _verify(self, tenant: str, name: str, version: int, *, skip: bool) -> VerifiedView:
        path = _path(tenant, "adapters", name, "versions", str(version), "verify")
        return self._call(VerifiedView, "POST", path, body={"skip": skip})

    def _call(
        self,
        view: type[_V],
        method: str,
        path: str,
        *,
        body: _Json | None = None,
        query: _Json | None = None,
        data: _Json | None = None,
        files: _Json | None = None,
    ) -> _V:
        """One request. Raises what the server answered, and ServerError where no answer can be understood."""
        try:
            answer = self._http.request(
                method, f"/admin/v1/{path}", json=body, params=query, data=data, files=files, follow_redirects=False
            )
        except httpx.HTTPError as error:
            message = f"{self._http.base_url} cannot be reached: {str(error) or type(error).__name__}"
            raise _with_code(ServerError(message), "server_unreachable") from None
        if not answer.is_success:
            raise _refusal(answer)
        try:
            return view.model_validate_json(answer.content)
        except ValidationError:
            raise ServerError(f"{self._http.base_url} gave an answer that this version cannot read.") from None


class _Counted(io.RawIOBase):
    """Bytes as a file that says how much of it was read."""

    def __init__(self, data: memoryview, progress: Progress) -> None:
        self._data = data
        self._at = 0
        self._progress = progress

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = start + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = len(self._data) if size < 0 else self._at + size
        data = bytes(self._data[self._at : end])
        self._at += len(data)
        self._progress(self._at, len(self._data))
        return data


def _path(tenant: str, *parts: str) -> str:
    """The path below a tenant. Raises InvalidRequest for names that would lead elsewhere."""
    for part in (tenant, *parts):
        if part in ("", ".", "..") or "/" in part:
            raise InvalidRequest(f"{part!r:.120} is no name.")
    return "/".join(("tenants", *(quote(part, safe="") for part in (tenant, *parts))))


def _refusal(answer: httpx.Response) -> LoraplexError:
    """The server's error as ours, with its code."""
    try:
        error = json.loads(answer.content)["error"]
        code, message = str(error.get("reason") or error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return ServerError(f"{answer.url} answered with status {answer.status_code}, and not as loraplex does.")
    if code == "route_not_found":
        message = f"{message} A server has the admin API when it is started with --data-dir."
    return _with_code(ServerError(message) if answer.is_server_error else ClientError(message), code)


def _with_code(error: LoraplexError, code: str) -> LoraplexError:
    error.code = code
    return error
