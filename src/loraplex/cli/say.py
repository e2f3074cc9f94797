"""Lines for people, printed as they are: names and paths may hold what rich would take for markup."""

import json
from datetime import UTC, datetime

from rich.console import Console


class LogConsole(Console):
    """Standard error of a server. Where it is no terminal it is the server's log, and a line there is a JSON object."""


def say(console: Console, line: str, style: str | None = None, *, event: str | None = None) -> None:
    """Print one line, unwrapped and without markup; into a log as an `event`, by default the word before the colon."""
    if isinstance(console, LogConsole) and not console.is_terminal:
        event = event or line.partition(":")[0]  # "note: ...", "warning: ..."
        level = "warning" if style is not None else "info"
        timestamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        line = json.dumps({"event": event, "level": level, "message": line, "timestamp": timestamp})
        style = None
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
