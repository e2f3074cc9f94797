"""What the administrator's commands share: where they work, how they answer, and how adapters are written."""

import inspect
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, Protocol, TypeVar

import typer
from rich.console import Console, RenderableType

from loraplex.cli.admin_client import AdminClient, Place, open_client
from loraplex.cli.say import say
from loraplex.core import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from pydantic import BaseModel

_P = ParamSpec("_P")
_PIPE_COLUMNS = 200  # of a table that is not shown on a terminal
_AGES = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}

_DataDir = typer.Option(envvar="LORAPLEX_DATA_DIR", help="Work on this data directory, as the local operator.")
_Database = typer.Option(
    envvar="LORAPLEX_DATABASE_URL", help="PostgreSQL database of the registry; default: SQLite in the data directory."
)
_Artifacts = typer.Option(
    envvar="LORAPLEX_ARTIFACTS_URL",
    help="s3://, gs:// or az:// place of the adapters' files; default: in the data directory.",
)
_Url = typer.Option(envvar="LORAPLEX_URL", help="Work on this server, with the key in LORAPLEX_API_KEY.")
_KeyFile = typer.Option(help="File that holds the key, in place of LORAPLEX_API_KEY.")
_AsJson = typer.Option("--json", help="Print one JSON document.")


@dataclass(frozen=True, slots=True)
class Session:
    """A command while it runs: answers go to standard output, all else to standard error."""

    client: AdminClient
    as_json: bool
    out: Console = field(default_factory=lambda: _console(sys.stdout))
    err: Console = field(default_factory=lambda: Console(stderr=True))

    def answer(self, value: "BaseModel | dict[str, Any]", *shown: RenderableType) -> None:
        """Print the JSON document, or what people read: text as it is, tables drawn."""
        if self.as_json:
            document = value if isinstance(value, dict) else value.model_dump(mode="json")
            sys.stdout.write(json.dumps(document, indent=2) + "\n")
            return
        for one in shown:
            if isinstance(one, str):
                say(self.out, one)
            else:
                self.out.print(one)

    def say(self, line: str, style: str | None = None) -> None:
        """A line beside the answer."""
        say(self.err, line, style)


@dataclass(frozen=True, slots=True)
class Address:
    """An adapter, or one version of it."""

    tenant: str
    name: str
    version: int | None = None

    @property
    def adapter(self) -> str:
        return f"{self.tenant}/{self.name}"

    def __str__(self) -> str:
        return self.adapter if self.version is None else f"{self.adapter}@{self.version}"


def address(session: Session, text: str) -> Address:
    """`name`, `tenant/name`, each with `@version` or without. Raises InvalidRequest."""
    path, at, version = text.partition("@")
    tenant, _, name = path.rpartition("/")
    if at and not re.fullmatch(r"[1-9][0-9]{0,8}", version):
        raise InvalidRequest(f"{text!r:.200} names no version; write for example {path:.100}@3.")
    return Address(tenant or own_tenant(session, f"write tenant/{name:.100}"), name, int(version) if at else None)


def own_tenant(session: Session, advice: str) -> str:
    """The tenant of the caller's key. Raises InvalidRequest with an advice for the local operator, who has none."""
    tenant = session.client.whoami().tenant
    if not tenant:
        raise InvalidRequest(f"Say which tenant: {advice}.")
    return tenant


def parse_expected(text: str | None) -> int | None:
    """`--expect`: a version, or "none". Raises InvalidRequest."""
    if text is None or text == "none":
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise InvalidRequest(f"--expect {text!r:.80} is neither a version nor none.")
    return int(text)


def parse_age(text: str) -> float:
    """Seconds of "30m", "12h", "90d" or "4w". Raises InvalidRequest."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})([mhdw])", text.strip())
    if match is None:
        raise InvalidRequest(f"{text!r:.80} is no time; write for example 30m, 12h, 90d or 4w.")
    return float(int(match[1]) * _AGES[match[2]])


def confirm(question: str, yes: bool) -> None:
    """Ask on the terminal. Raises ConfigError unless the answer is yes."""
    if yes:
        return
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort:  # no terminal, or Ctrl-C: the question's line is still open
        typer.echo(err=True)
        agreed = False
    if not agreed:
        raise ConfigError("Nothing was changed; answer y, or give --yes.")


class _Page(Protocol):
    @property
    def next_after(self) -> str | None: ...


_PageT = TypeVar("_PageT", bound=_Page)


def pages(fetch: Callable[[str, int], _PageT]) -> Iterator[_PageT]:
    """All pages of a list."""
    after = ""
    while True:
        page = fetch(after, 1000)
        yield page
        if page.next_after is None:
            return
        after = page.next_after


def show_time(at: float | None) -> str:
    """UTC, to the minute; "-" for never."""
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%MZ", time.gmtime(at))


def show_day(at: float) -> str:
    """The day, in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime(at))


def admin_command(run: Callable[Concatenate[Session, _P], None], *, creates: bool = False) -> Callable[..., None]:
    """A command for typer: its own parameters, then where to work and --json, which become its Session.

    One that `creates` makes a registry where there is none; all others refuse a data directory without one.
    """

    def command(**values: Any) -> None:
        place = Place(**{one.name: values.pop(one.name) for one in fields(Place)})
        as_json = values.pop("as_json")
        with open_client(place, creates=creates) as client:
            run(Session(client, as_json), **values)  # type: ignore[call-arg]

    own = list(inspect.signature(run, eval_str=True).parameters.values())[1:]
    parameters = [*own, *inspect.signature(_shared).parameters.values()]
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _shared(
    data_dir: Annotated[Path | None, _DataDir] = None,
    database_url: Annotated[str | None, _Database] = None,
    artifacts_url: Annotated[str | None, _Artifacts] = None,
    url: Annotated[str | None, _Url] = None,
    api_key_file: Annotated[Path | None, _KeyFile] = None,
    as_json: Annotated[bool, _AsJson] = False,
) -> None:
    """The options of every administrator's command."""


def _console(stream: Any) -> Console:
    console = Console(file=stream)
    return console if console.is_terminal else Console(file=stream, width=_PIPE_COLUMNS)
