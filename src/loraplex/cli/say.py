"""Lines for people, printed as they are: names and paths may hold what rich would take for markup."""

from rich.console import Console


def say(console: Console, line: str, style: str | None = None) -> None:
    """Print one line, unwrapped and without markup."""
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
