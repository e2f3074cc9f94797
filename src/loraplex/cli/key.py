"""`loraplex key`: API keys."""

import time
from enum import StrEnum
from functools import partial
from typing import Annotated

import typer

from loraplex.cli.admin_command import Session, admin_command, own_tenant, pages, parse_age
from loraplex.cli.tables import key_table

app = typer.Typer(help="API keys: create, list, revoke.", no_args_is_help=True)
_Tenant = Annotated[str | None, typer.Option(help="Whose keys; default: the tenant of the key that is used.")]
_Role = typer.Option(help="What it may do: tenant calls models, tenant_admin manages its tenant, operator all.")
_Adapter = typer.Option(help="The only model that it may call: name, or tenant/name where it was granted.")
_Expires = typer.Option(help="When it ends: 30m, 12h, 90d or 4w from now; default: never.")


class KeyRole(StrEnum):
    """As `registry.Role`, without the registry's packages, which take long to import for a page of help."""

    TENANT = "tenant"
    TENANT_ADMIN = "tenant_admin"
    OPERATOR = "operator"


@app.command()
@admin_command
def create(
    session: Session,
    tenant: _Tenant = None,
    role: Annotated[KeyRole, _Role] = KeyRole.TENANT,
    adapter: Annotated[str | None, _Adapter] = None,
    expires_in: Annotated[str | None, _Expires] = None,
) -> None:
    """Make a key and print it: the only time that it can be seen."""
    from loraplex.registry import Role

    expires_at = time.time() + parse_age(expires_in) if expires_in is not None else None
    created = session.client.create_key(_tenant(session, tenant), Role(role), adapter, expires_at)
    key = created.key
    session.say(f"Key {key.key_id} of {key.tenant}, role {key.role.value}. It is not shown again.")
    session.answer(created, created.api_key)


@app.command("list")
@admin_command
def list_(session: Session, tenant: _Tenant = None) -> None:
    """List a tenant's keys, without their secrets."""
    owner = _tenant(session, tenant)
    keys = [key for page in pages(partial(session.client.list_keys, owner)) for key in page.keys]
    session.answer({"keys": [key.model_dump(mode="json") for key in keys]}, key_table(keys))


@app.command()
@admin_command
def revoke(
    session: Session,
    key_id: Annotated[str, typer.Argument(help="Id of the key: the 12 characters behind lpx_live_.")],
    tenant: _Tenant = None,
) -> None:
    """Make a key worthless, for good."""
    view = session.client.revoke_key(_tenant(session, tenant), key_id)
    session.answer(view, f"Revoked the key {view.key_id} of {view.tenant}.")


def _tenant(session: Session, tenant: str | None) -> str:
    return tenant if tenant is not None else own_tenant(session, "give --tenant NAME")
