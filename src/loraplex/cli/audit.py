"""`loraplex audit`: who changed what, and whether the record is whole."""

from typing import TYPE_CHECKING, Annotated

import typer

from loraplex.cli.admin_command import Session, admin_command, own_tenant
from loraplex.cli.tables import audit_table, finding_table

if TYPE_CHECKING:
    from loraplex.server.admin_views import AuditEntryView

app = typer.Typer(help="The audit log: list what happened, verify that it is whole.", no_args_is_help=True)
_Last = typer.Option(help="Only the last entries.", min=1)
_PAGE = 1000


@app.command("list")
@admin_command
def list_(
    session: Session,
    tenant: Annotated[str | None, typer.Option(help="Whose; default: the tenant of the key that is used.")] = None,
    last: Annotated[int | None, _Last] = None,
) -> None:
    """List what was changed, oldest first."""
    owner = tenant if tenant is not None else own_tenant(session, "give --tenant NAME")
    entries = _entries(session, owner)
    entries = entries[-last:] if last is not None else entries
    document = {"tenant": owner, "entries": [entry.model_dump(mode="json") for entry in entries]}
    session.answer(document, audit_table(entries))


@app.command()
@admin_command
def verify(
    session: Session,
    tenant: Annotated[
        str | None, typer.Option(help="Only this tenant's; default: all, for operators; else that of the key.")
    ] = None,
) -> None:
    """Check every entry against its signature, its neighbour and the signed heads; status 1 if anything is wrong."""
    report = session.client.verify_audit(tenant if tenant is not None else _allowed(session))
    count = f"{report.entries} entries in {report.chains} chains"
    if report.ok:
        session.answer(report, f"The audit log is whole: {count}.")
        return
    session.answer(report, f"The audit log is BROKEN: {len(report.findings)} findings in {count}.")
    if not session.as_json:
        session.out.print(finding_table(report.findings))
    raise typer.Exit(1)


def _allowed(session: Session) -> str | None:
    """None, which is all, for operators; else the caller's own tenant."""
    from loraplex.registry import Role

    caller = session.client.whoami()
    return None if caller.role is Role.OPERATOR else caller.tenant


def _entries(session: Session, tenant: str) -> "list[AuditEntryView]":
    entries: list[AuditEntryView] = []
    after: int | None = 0
    while after is not None:
        page = session.client.audit_entries(tenant, after, _PAGE)
        entries += page.entries
        after = page.next_after
    return entries
