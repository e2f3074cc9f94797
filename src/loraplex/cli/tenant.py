"""`loraplex tenant`: the customers that share a server. For operators."""

import math
import re
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from loraplex.cli.admin_command import Session, admin_command, pages
from loraplex.cli.tables import tenant_table
from loraplex.core import InvalidRequest

if TYPE_CHECKING:
    from loraplex.registry import LimitChanges

app = typer.Typer(help="Tenants: create, list, switch off and on, limit. For operators.", no_args_is_help=True)
_Name = Annotated[str, typer.Argument(help="Name of the tenant: a-z 0-9 . _ -, at most 64 characters.")]
_Weight = typer.Option(help="Its share where tenants compete, from 0.001 to 1000; 1 for a new tenant.")
_Priority = typer.Option(
    help="The earliest class that its requests may ask for, from -100 to 100; lower is earlier, 0 for a new tenant."
)
_Requests = typer.Option(help="Requests that it may have at once, or none for no bound.")
_Tokens = typer.Option(help="Tokens of prompts and answers that it may have in a minute, or none for no bound.")


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


@app.command()
@admin_command
def limits(
    session: Session,
    name: _Name,
    weight: Annotated[float | None, _Weight] = None,
    priority: Annotated[int | None, _Priority] = None,
    max_requests: Annotated[str | None, _Requests] = None,
    tokens_per_minute: Annotated[str | None, _Tokens] = None,
) -> None:
    """Set what a tenant may take of each server; without options, show it."""
    changes: LimitChanges = {}
    if weight is not None:
        changes["weight"] = _finite("--weight", weight)
    if priority is not None:
        changes["priority"] = priority
    if max_requests is not None:
        changes["max_requests"] = _bound("--max-requests", max_requests)
    if tokens_per_minute is not None:
        changes["tokens_per_minute"] = _bound("--tokens-per-minute", tokens_per_minute)
    view = session.client.change_limits(name, changes) if changes else session.client.show_tenant(name)
    session.answer(view, tenant_table([view]))


def _finite(option: str, value: float) -> float:
    """A number that JSON can carry. Raises InvalidRequest."""
    if not math.isfinite(value):
        raise InvalidRequest(f"{option} is {value}; it must be a finite number.")
    return value


def _bound(option: str, text: str) -> int | None:
    """A bound; None for "none". Raises InvalidRequest."""
    if text == "none":
        return None
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise InvalidRequest(f"{option} {text!r:.80} is neither a number nor none.")
    return int(text)
