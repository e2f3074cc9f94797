"""Where `adapter add` takes an adapter from: a directory, or Hugging Face."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loraplex.adapters import AdapterLimits
from loraplex.adapters.artifact import CONFIG_FILE, WEIGHTS_FILE, read_artifact
from loraplex.cli import hub
from loraplex.cli.admin_command import Session
from loraplex.core import AdapterRefused


@contextmanager
def opened(session: Session, source: str) -> Iterator[hub.Fetched]:
    """Where the files are; `source` of it is empty for a directory of the caller's.

    Raises AdapterRefused where they are not there, before anything is recorded.
    """
    if not source.startswith(hub.PREFIX):
        directory = Path(source)
        check_files(directory)
        yield hub.Fetched(directory, "")
        return
    with hub.fetched(hub.parse_source(source)) as found:
        session.say(f"Fetched {found.source}.")
        yield found


def check_files(directory: Path) -> None:
    """Raise AdapterRefused, naming the directory, unless both files are there. Does not look into them."""
    if all(os.access(directory / name, os.F_OK) for name in (CONFIG_FILE, WEIGHTS_FILE)):
        return
    try:
        read_artifact(directory, AdapterLimits())
    except AdapterRefused as error:
        named = error.message if str(directory) in error.message else f"{str(directory)!r}: {error.message}"
        raise AdapterRefused(error.reason, named, error.subject) from None
