"""Entry point of the `loraplex` command."""

import sys
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from loraplex.cli import adapter, audit, key, tenant
from loraplex.cli.demo import demo
from loraplex.cli.fingerprint import fingerprint
from loraplex.cli.import_gguf import import_gguf
from loraplex.cli.say import say
from loraplex.cli.serve import serve
from loraplex.core import AdapterRefused, BaseRefused, ClientError, LoraplexError


class RefusedValues(TyperGroup):
    """A group whose commands, and theirs, say which value of a flag was refused, not only what it should be."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            from pydantic import ValidationError

            if isinstance(error.__cause__, ValidationError):
                value = error.__cause__.errors(include_url=False)[0]["input"]
                error.message = f"{error.message}, got {value!r:.80}"
            raise


app = typer.Typer(
    cls=RefusedValues,
    help="Serve one base LLM with many LoRA adapters: the right weights for every request.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(demo)
app.command()(fingerprint)
app.command(name="import-gguf")(import_gguf)
app.add_typer(adapter.app, name="adapter")
app.add_typer(tenant.app, name="tenant")
app.add_typer(key.app, name="key")
app.add_typer(audit.app, name="audit")


def spread_values(argv: Sequence[str], option: str = "--lora-modules") -> list[str]:
    """Let an option take several values, as vLLM users write it: `--x a b` becomes `--x a --x b`."""
    spread: list[str] = []
    is_open = False
    for index, word in enumerate(argv):
        if word.startswith("-"):
            is_open = word == option
            spread.append(word)
        elif is_open and argv[index - 1] != option:
            spread += [option, word]
        else:
            spread.append(word)
    return spread


def main() -> None:
    """Run a command. An error is one line on stderr; status 2 for a mistake of the caller's, 3 for what broke here."""
    try:
        app(spread_values(sys.argv[1:]))
    except LoraplexError as error:
        code = error.reason_code if isinstance(error, AdapterRefused | BaseRefused) else error.code
        say(Console(stderr=True), f"error {code}: {error.message}")
        raise SystemExit(2 if isinstance(error, ClientError) else 3) from None
