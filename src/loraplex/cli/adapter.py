"""`loraplex adapter`: put adapters in, look at them, choose what a name stands for."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from loraplex.cli.admin_client import LocalBase
from loraplex.cli.admin_command import (
    Address,
    Session,
    address,
    admin_command,
    confirm,
    own_tenant,
    pages,
    parse_expected,
)
from loraplex.cli.effects import Effect, effect_of, effect_warning
from loraplex.cli.progress import progress_bar
from loraplex.cli.tables import adapter_table, base_lines, move_table, verification_table, version_table
from loraplex.core import ClientError, InvalidRequest, ModelNotFound
from loraplex.core.registry_errors import PermissionDenied

if TYPE_CHECKING:
    from loraplex.server.admin_views import AdapterView, AliasView, VerificationView, VerifiedView, VersionView

app = typer.Typer(help="Adapters: add, look at, verify, activate, roll back, delete, grant.", no_args_is_help=True)

_Adapter = Annotated[str, typer.Argument(help="tenant/name; name alone means the tenant of the key that is used.")]
_Version = Annotated[str, typer.Argument(help="tenant/name@version, or name@version.")]
_Expect = Annotated[
    str | None,
    typer.Option(help="Change nothing unless this version is active now, or none; default: what is active at start."),
]
_Base = Annotated[
    Path | None,
    typer.Option(help="Directory of the base model, on a data directory; a server knows its own."),
]
_BaseName = typer.Option(help="Name of the base in requests, which no adapter may have; default: the directory's name.")
_Device = Annotated[str, typer.Option(help="Where to compare on a data directory: auto, cpu, cuda or cuda:<number>.")]
_Source = typer.Argument(
    help="Adapter directory, or hf:org/repo@revision or hf:org/repo/folder@revision of Hugging Face (extra hub)."
)
_Fingerprint = typer.Option(
    help="Fingerprint of the base that the adapter was trained on (loraplex fingerprint), unless the file names it."
)
_Unverified = typer.Option("--base-unverified", help="Nobody knows which base it was trained on; this is recorded.")
_Skip = typer.Option("--skip-verification", help="Do without the comparison; who did so is recorded. For operators.")
_Activate = typer.Option("--activate", help="Have the name stand for the new version.")


@app.command()
@admin_command
def add(
    session: Session,
    source: Annotated[str, _Source],
    name: Annotated[str, typer.Option(help="Name of the adapter; a name that is there gets a new version.")],
    tenant: Annotated[str | None, typer.Option(help="Owner; default: the tenant of the key that is used.")] = None,
    base: _Base = None,
    served_model_name: Annotated[str | None, _BaseName] = None,
    device: _Device = "auto",
    base_fingerprint: Annotated[str | None, _Fingerprint] = None,
    base_unverified: Annotated[bool, _Unverified] = False,
    skip_verification: Annotated[bool, _Skip] = False,
    activate: Annotated[bool, _Activate] = False,
    expect: _Expect = None,
) -> None:
    """Check an adapter, keep it as the next version of its name, compare it with its merged reference.

    Ends with status 1 if the comparison fails; the version is kept then, and cannot be activated.
    """
    from loraplex.cli.source import opened
    from loraplex.server.admin_operations import BaseClaim

    _check_claim(base_fingerprint, base_unverified)
    if skip_verification:
        _check_may_skip(session)
    owner = tenant if tenant is not None else own_tenant(session, "give --tenant NAME")
    where = LocalBase(base, served_model_name, device) if base is not None else None
    expected = _expected(session, owner, name, expect) if activate else None
    with opened(session, source) as found:
        claim = BaseClaim(base_fingerprint, base_unverified, found.source or None)
        with progress_bar(session.err, "Sending and checking") as progress:
            version = session.client.add_version(owner, name, found.directory, claim, where, progress)
    made = Address(owner, name, version.version)
    session.say(f"{made} is valid: digest {version.digest}, rank {version.rank}.")
    verified = _gate(session, made, where, skip_verification)
    _warn(session, verified.verification, str(made))
    passed = verified.verification.passed is not False
    alias = None
    if activate and passed:
        alias = session.client.activate(owner, name, version.version, expected)
    _answer_added(session, verified, alias)
    if not passed:
        raise typer.Exit(1)


@app.command("list")
@admin_command
def list_(
    session: Session,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's; default: all that the key may see.")] = None,
    deleted: Annotated[bool, typer.Option("--deleted", help="Deleted ones too.")] = False,
) -> None:
    """List adapters: active and latest version, state, base fingerprint, rank, targets, bytes."""
    adapters = [adapter for adapter in _adapters(session, tenant) if deleted or not adapter.deleted]
    document = {"adapters": [adapter.model_dump(mode="json") for adapter in adapters]}
    shown = [] if session.as_json else [adapter_table(adapters, _effects(session, adapters))]
    session.answer(document, *shown)


@app.command()
@admin_command
def show(session: Session, adapter: _Adapter) -> None:
    """Show all that is known of an adapter: versions, verifications, moves, grants."""
    at = address(session, adapter)
    detail = session.client.show_adapter(at.tenant, at.name)
    state = "deleted" if detail.adapter.deleted else f"active version: {detail.adapter.active or 'none'}"
    shown: list[RenderableType] = [f"{at.adapter}, {state}", version_table(detail.versions, detail.adapter.active)]
    shown += ["", *base_lines(detail.versions)]
    if detail.verifications:
        shown += ["", verification_table(detail.verifications)]
    if detail.moves:
        shown += ["", move_table(detail)]
    if detail.grantees:
        shown += ["", f"granted to: {', '.join(detail.grantees)}"]
    session.answer(detail, *shown)


@app.command()
@admin_command
def verify(
    session: Session,
    adapter: Annotated[str, typer.Argument(help="tenant/name@version; without a version the newest one.")],
    base: _Base = None,
    served_model_name: Annotated[str | None, _BaseName] = None,
    device: _Device = "auto",
    skip_verification: Annotated[bool, _Skip] = False,
) -> None:
    """Have the engine compare a version with its merged reference; status 1 if it fails. The figures are kept."""
    at = address(session, adapter)
    if at.version is None:
        at = replace(at, version=_newest(session, at))
    where = LocalBase(base, served_model_name, device) if base is not None else None
    verified = _gate(session, at, where, skip_verification)
    _warn(session, verified.verification, str(at))
    session.answer(verified, _outcome(verified), verification_table([verified.verification]))
    if verified.verification.passed is False:
        raise typer.Exit(1)


@app.command()
@admin_command
def activate(session: Session, adapter: _Version, expect: _Expect = None) -> None:
    """Have a name stand for a version from now on; requests that run end on what they started with."""
    at = address(session, adapter)
    if at.version is None:
        raise InvalidRequest(f"Say which version of {at}: {at}@3.")
    expected = _expected(session, at.tenant, at.name, expect)
    last = _last_verification(session, at)
    alias = session.client.activate(at.tenant, at.name, at.version, expected)
    if last is not None:
        _warn(session, last, str(at))
    _answer_moved(session, alias, expected)


@app.command()
@admin_command
def rollback(session: Session, adapter: _Adapter, expect: _Expect = None) -> None:
    """Have a name stand for the version that was active before."""
    at = address(session, adapter)
    expected = _expected(session, at.tenant, at.name, expect)
    _answer_moved(session, session.client.rollback(at.tenant, at.name, expected), expected)


@app.command("rm")
@admin_command
def remove(
    session: Session,
    adapter: Annotated[str, typer.Argument(help="tenant/name, or tenant/name@version for one that is not active.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete an adapter with all its versions, or one version. A tombstone stays; the name gives a distinct error."""
    at = address(session, adapter)
    confirm(f"Delete {at}{'' if at.version is not None else ' with all its versions'}?", yes)
    client = session.client
    if at.version is None:
        view = client.delete_adapter(at.tenant, at.name)
    else:
        view = client.delete_version(at.tenant, at.name, at.version)
    session.answer(view, f"Deleted {at}.")


@app.command()
@admin_command
def grant(
    session: Session, adapter: _Adapter, grantee: Annotated[str, typer.Argument(help="Tenant that may call it.")]
) -> None:
    """Let another tenant call an adapter as tenant/name. For operators."""
    at = address(session, adapter)
    view = session.client.grant(at.tenant, at.name, grantee)
    session.answer(view, f"{grantee} may call {at.adapter}.")


@app.command()
@admin_command
def revoke(
    session: Session, adapter: _Adapter, grantee: Annotated[str, typer.Argument(help="Tenant that has the grant.")]
) -> None:
    """Take a grant back. For operators."""
    at = address(session, adapter)
    view = session.client.revoke_grant(at.tenant, at.name, grantee)
    session.answer(view, f"{grantee} may not call {at.adapter} any more.")


# ---------------------------------------------------------------------- inside
def _gate(session: Session, at: Address, base: LocalBase | None, skip: bool) -> "VerifiedView":
    """Run the comparison, or record that it was left out."""
    assert at.version is not None
    if skip:
        return session.client.skip_verification(at.tenant, at.name, at.version)
    with progress_bar(session.err, "Comparing with the merged reference"):
        return session.client.verify(at.tenant, at.name, at.version, base)


def _newest(session: Session, at: Address) -> int:
    """The newest version that has files. Raises InvalidRequest if there is none."""
    from loraplex.registry import VersionState

    versions = session.client.show_adapter(at.tenant, at.name).versions
    numbers = [one.version for one in versions if one.state not in (VersionState.REFUSED, VersionState.DELETED)]
    if not numbers:
        raise InvalidRequest(f"{at} has no version that could be compared.")
    return max(numbers)


def _check_claim(base_fingerprint: str | None, base_unverified: bool) -> None:
    """Neither will do where the file itself names the base, which the registry finds out. Raises InvalidRequest."""
    if base_fingerprint is not None and base_unverified:
        raise InvalidRequest(
            "Say which base the adapter was trained on: either --base-fingerprint HEX (loraplex fingerprint DIR), or "
            "--base-unverified to have it recorded that nobody knows."
        )


def _check_may_skip(session: Session) -> None:
    """Before anything is sent. Raises PermissionDenied."""
    from loraplex.registry import Role

    role = session.client.whoami().role
    if role is not Role.OPERATOR:
        raise PermissionDenied(f"--skip-verification is for operators, and this key is a {role.value}'s.")


def _warn(session: Session, verification: "VerificationView", label: str) -> None:
    """Of an adapter that changes nothing, or next to nothing."""
    warning = effect_warning(verification, label)
    if warning is not None:
        session.say(warning, style="yellow")


def _last_verification(session: Session, at: Address) -> "VerificationView | None":
    """The last attempt of the gate on a version."""
    attempts = session.client.show_adapter(at.tenant, at.name).verifications
    found = [one for one in attempts if one.version == at.version]
    return found[-1] if found else None


def _effects(session: Session, adapters: "Iterable[AdapterView]") -> dict[str, Effect]:
    """What verified adapters do, by `tenant/name`. Lists do not tell, so each is asked about."""
    from loraplex.registry import VersionState

    effects = {}
    for adapter in adapters:
        version = adapter.active_version or adapter.latest_version
        if version is None or version.state is not VersionState.VERIFIED or adapter.deleted:
            continue
        at = Address(adapter.tenant, adapter.name, version.version)
        last = _last_verification(session, at)
        effect = effect_of(last) if last is not None else None
        if effect is not None:
            effects[at.adapter] = effect
    return effects


def _expected(session: Session, tenant: str, name: str, expect: str | None) -> int | None:
    """What `--expect` says, else what is active now; None where the name is new."""
    if expect is not None:
        return parse_expected(expect)
    try:
        return session.client.show_adapter(tenant, name).adapter.active
    except ClientError as error:
        if error.code != ModelNotFound.code:
            raise
        return None


def _adapters(session: Session, tenant: str | None) -> "Iterator[AdapterView]":
    """The adapters of one tenant, or of all that the caller may manage."""
    tenants = [tenant] if tenant is not None else _tenants(session)
    for owner in tenants:
        for page in pages(partial(session.client.list_adapters, owner)):
            yield from page.adapters


def _tenants(session: Session) -> list[str]:
    from loraplex.registry import Role

    caller = session.client.whoami()
    if caller.role is not Role.OPERATOR:
        return [caller.tenant]
    return [tenant.tenant for page in pages(session.client.list_tenants) for tenant in page.tenants]


def _answer_added(session: Session, verified: "VerifiedView", alias: "AliasView | None") -> None:
    document = {
        "version": verified.version.model_dump(mode="json"),
        "verification": verified.verification.model_dump(mode="json"),
        "alias": alias.model_dump(mode="json") if alias is not None else None,
    }
    version = verified.version
    table = version_table([version], alias.active if alias is not None else None)
    shown: list[RenderableType] = [_outcome(verified), "", table, "", *base_lines([version])]
    if alias is None and version.state.usable:
        shown.append(f"It is not active: loraplex adapter activate {_label(version)}")
    session.answer(document, *shown)


def _answer_moved(session: Session, alias: "AliasView", before: int | None) -> None:
    name = f"{alias.tenant}/{alias.name}"
    session.answer(alias, f"{name} stands for version {alias.active} now; before: {before or 'none'}.")


def _outcome(verified: "VerifiedView") -> str:
    """One line on how the gate went."""
    one, label = verified.verification, _label(verified.version)
    if one.skipped:
        return f"{label} was not compared; that is on record."
    assert one.max_logit_difference is not None
    assert one.tolerance is not None
    figures = f"largest logit difference {one.max_logit_difference:.3g} of {one.tolerance:.3g} allowed"
    if not one.passed:
        why = f", and {one.failure}" if one.failure else ""
        return f"{label} FAILED verification: {figures}{why}. It cannot be activated."
    return f"{label} is verified: {figures}, KL {one.kl:.3g} nats, effect {one.effect:.3g}."


def _label(version: "VersionView") -> str:
    return f"{version.tenant}/{version.name}@{version.version}"
