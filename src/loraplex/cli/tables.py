"""Tables of the administrator's commands."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table

from loraplex.cli.admin_command import show_day, show_time
from loraplex.cli.effects import NOTE, Effect
from loraplex.cli.sizes import format_size

if TYPE_CHECKING:
    from loraplex.server.admin_views import (
        AdapterDetailView,
        AdapterView,
        AuditEntryView,
        FindingView,
        KeyView,
        TenantView,
        VerificationView,
        VersionView,
    )

_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
_SHORT = 12  # digits of a digest
UNVERIFIED = "?: nobody said which base it was trained on"


def describe_targets(targets: Sequence[str]) -> str:
    """Adapted projections in few letters: "all", "attention", "mlp" or "q,v"."""
    for name, group in (("all", _ATTENTION + _MLP), ("attention", _ATTENTION), ("mlp", _MLP)):
        if set(targets) == set(group):
            return name
    return ",".join(target.removesuffix("_proj") for target in targets)


def adapter_table(adapters: "Iterable[AdapterView]", effects: Mapping[str, Effect]) -> Table:
    """Every adapter with the facts of its active version, or of its latest where none is active.

    `effects` is what they do, by `tenant/name`; only what does little is marked.
    """
    notes = set()
    table = _table("adapter", "active", "latest", "state", "base", "rank", "targets", "bytes")
    for adapter in adapters:
        version, latest = adapter.active_version or adapter.latest_version, adapter.latest_version
        state = "deleted" if adapter.deleted else _state(version) if version is not None else None
        facts = [_base(version), *_facts(version)] if version is not None else [None] * 4
        if version is not None and not _is_base_known(version):
            notes.add(UNVERIFIED)
        label = f"{adapter.tenant}/{adapter.name}"
        effect = effects.get(label, Effect.SEEN)
        if effect is not Effect.SEEN:
            state = f"{state} {effect.value}"
            notes.add(NOTE)
        _add(table, label, adapter.active, latest and latest.version, state, *facts)
    table.caption = "\n".join(sorted(notes)) or None
    return table


def version_table(versions: "Iterable[VersionView]", active: int | None) -> Table:
    """Versions of one adapter; the active one has a star. Their bases are `base_lines`."""
    table = _table("version", "state", "rank", "targets", "bytes", "digest", "made", "by", caption="*: active")
    for version in versions:
        number = f"{version.version} *" if version.version == active else version.version
        digest = version.digest[:_SHORT] if version.digest is not None else None
        made = show_day(version.created_at)
        _add(table, number, _state(version), *_facts(version), digest, made, version.created_by)
    return table


def base_lines(versions: "Iterable[VersionView]") -> list[str]:
    """The base of each version, in full: one line for those that share it."""
    groups: dict[str, list[str]] = {}
    for version in versions:
        note = "" if _is_base_known(version) else " (unverified)"
        groups.setdefault(f"base fingerprint {version.base_fingerprint}{note}", []).append(str(version.version))
    return [f"{text}: version {', '.join(numbers)}" for text, numbers in groups.items()]


def verification_table(verifications: "Iterable[VerificationView]") -> Table:
    """Attempts of the gate."""
    table = _table("version", "result", "logit difference", "KL nats", "effect", "at", "by")
    for one in verifications:
        outcome = "skipped" if one.skipped else "passed" if one.passed else one.failure or "failed"
        difference = None if one.skipped else f"{_figure(one.max_logit_difference)} of {_figure(one.tolerance)}"
        _add(table, one.version, outcome, difference, _figure(one.kl), _figure(one.effect), show_time(one.at), one.by)
    return table


def move_table(detail: "AdapterDetailView") -> Table:
    """How the name moved from version to version."""
    table = _table("move", "from", "to", "at", "by")
    for move in detail.moves:
        _add(table, move.action, move.from_version, move.to_version, show_time(move.at), move.by)
    return table


def tenant_table(tenants: "Iterable[TenantView]") -> Table:
    """Tenants, whether they are switched on, and their limits."""
    table = _table("tenant", "made", "disabled", "weight", "priority", "requests", "tokens/min")
    for tenant in tenants:
        times, limits = (show_time(tenant.created_at), show_time(tenant.disabled_at)), tenant.limits
        bounds = limits.max_requests, limits.tokens_per_minute
        _add(table, tenant.tenant, *times, f"{limits.weight:g}", limits.priority, *bounds)
    return table


def key_table(keys: "Iterable[KeyView]") -> Table:
    """Keys without their secrets."""
    table = _table("key", "role", "made", "ends", "bound to")
    for key in keys:
        ends = "never" if key.expires_at is None else show_time(key.expires_at)
        if key.revoked_at is not None:
            ends = f"revoked {show_time(key.revoked_at)}"
        _add(table, key.key_id, key.role.value, show_day(key.created_at), ends, key.bound_adapter)
    return table


def audit_table(entries: "Iterable[AuditEntryView]") -> Table:
    """What happened, oldest first."""
    table = _table("entry", "at", "by", "action", "details")
    for entry in entries:
        known = ((name, value) for name, value in entry.details.items() if value is not None)
        details = ", ".join(f"{name}={_detail(name, value)}" for name, value in known)
        _add(table, entry.seq, show_time(entry.at), entry.actor, entry.action, details)
    return table


def finding_table(findings: "Iterable[FindingView]") -> Table:
    """What is wrong with an audit log."""
    table = _table("finding", "chain", "entry", "message")
    for one in findings:
        _add(table, one.kind.value, one.chain, one.seq, one.message)
    return table


def _table(*headings: str, caption: str | None = None) -> Table:
    """Only names of adapters and the last column may be folded."""
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        caption=caption,
        caption_justify="left",
    )
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading not in ("adapter", headings[-1]))
    return table


def _add(table: Table, *cells: object) -> None:
    """A row; names and notes may hold what rich would take for markup."""
    table.add_row(*(escape(str(_or_dash(cell))) for cell in cells))


def _state(version: "VersionView") -> str:
    return version.state.value if version.refusal is None else f"refused {version.refusal}"


def _base(version: "VersionView") -> str:
    return version.base_fingerprint[:_SHORT] + ("" if _is_base_known(version) else " ?")


def _is_base_known(version: "VersionView") -> bool:
    """Where it was refused, nobody needs to know."""
    return version.base_verified or version.refusal is not None


def _facts(version: "VersionView") -> list[object]:
    """Rank, targets and bytes."""
    return [
        version.rank,
        describe_targets(version.targets) if version.targets is not None else None,
        format_size(version.bytes) if version.bytes is not None else None,
    ]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _detail(name: str, value: object) -> str:
    """A detail in a table's cell: times are written out, hashes cut, as nobody reads 64 digits."""
    if isinstance(value, list):
        return "+".join(_detail(name, one) for one in value)
    if isinstance(value, float):
        return show_time(value) if name.endswith("_at") else f"{value:.3g}"
    text = str(value)
    return f"{text[:_SHORT]}..." if len(text) == 64 and set(text) <= set("0123456789abcdef") else text


def _or_dash(value: object) -> object:
    return "-" if value is None else value
