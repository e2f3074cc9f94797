"""`loraplex tenant`: the customers that share a server. For operators."""

from functools import partial
from typing import Annotated

import typer

from loraplex.cli.admin_command import Session, admin_command, pages
from loraplex.cli.tables import tenant_table

app = typer.Typer(help="Tenants: create, list, switch off and on. For operators.", no_args_is_help=True)
_Name = Annotated[str, typer.Argument(help="Name of the tenant: a-z 0-9 . _ -, at most 64 characters.")]


@app.command()
@partial(admin_command, creates=True)
def create(session: Session, name: _Name) -> None:
    """Make a tenant, and on a data directory without a registry that registry."""
    view = session.client.create_tenant(name)
    session.answer(view, f"Made the tenant {view.tenant}.")


@app.command("list")
@admin_command
def list_(session: Session) -> None:
    """List all tenants."""
    tenants = [tenant for page in pages(session.client.list_tenants) for tenant in page.tenants]
    document = {"tenants": [tenant.model_dump(mode="json") for tenant in tenants]}
    session.answer(document, tenant_table(tenants))


@app.command()
@admin_command
def disable(session: Session, name: _Name) -> None:
    """Switch a tenant off: its keys are refused and its adapters are gone for all."""
    view = session.client.disable_tenant(name)
    session.answer(view, f"Switched {view.tenant} off.")


@app.command()
@admin_command
def enable(session: Session, name: _Name) -> None:
    """Switch a tenant on again."""
    view = session.client.enable_tenant(name)
    session.answer(view, f"Switched {view.tenant} on.")
