"""Adapters from Hugging Face: two files of one commit, taken to a temporary directory."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.adapters.artifact import CONFIG_FILE, WEIGHTS_FILE
from loraplex.adapters.limits import DEFAULT_MAX_BYTES, MAX_CONFIG_BYTES
from loraplex.core import AdapterRefused, ConfigError, InvalidRequest, RefusalReason

PREFIX = "hf:"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,199}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILES = ((CONFIG_FILE, RefusalReason.CONFIG_MISSING), (WEIGHTS_FILE, RefusalReason.WEIGHTS_MISSING))


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository, and a branch, tag or commit of it; None is its main branch."""

    repo: str
    revision: str | None


@dataclass(frozen=True, slots=True)
class Fetched:
    """What was taken: the files in `directory`, and the commit that they are of."""

    directory: Path
    source: str  # hf:org/repo@<commit>


def parse_source(text: str) -> HubSource:
    """`hf:org/repo` or `hf:org/repo@revision`. Raises InvalidRequest."""
    repo, at, revision = text.removeprefix(PREFIX).partition("@")
    if not _REPO.fullmatch(repo) or ".." in text or (at and not _REVISION.fullmatch(revision)):
        raise InvalidRequest(f"{text!r:.200} is not hf:org/repo or hf:org/repo@revision.")
    return HubSource(repo, revision if at else None)


@contextmanager
def fetched(source: HubSource, max_bytes: int = DEFAULT_MAX_BYTES) -> Iterator[Fetched]:
    """The adapter's two files, removed at the end of the block.

    Raises ConfigError without the extra `hub` or a connection, AdapterRefused where the repository holds no adapter or
    too large a one.
    """
    hub, failures = _hub()
    name = f"{PREFIX}{source.repo}" + (f"@{source.revision}" if source.revision else "")
    with tempfile.TemporaryDirectory(prefix="loraplex-") as folder:
        try:
            info = hub.HfApi().model_info(source.repo, revision=source.revision, files_metadata=True)
            commit = _checked_commit(info, name, max_bytes)
            allowed = [CONFIG_FILE, WEIGHTS_FILE]
            hub.snapshot_download(source.repo, revision=commit, allow_patterns=allowed, local_dir=folder)
        except failures as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"{name} cannot be fetched from Hugging Face: {first:.300}") from None
        yield Fetched(Path(folder), f"{PREFIX}{source.repo}@{commit}")


def _hub() -> tuple[Any, tuple[type[Exception], ...]]:
    """The library and what it raises. Raises ConfigError if it is not installed."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    except ImportError:
        message = "Adapters of Hugging Face need the extra hub: pip install 'loraplex[hub]'."
        raise ConfigError(message) from None
    import httpx

    return huggingface_hub, (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, httpx.HTTPError, OSError)


def _checked_commit(info: Any, name: str, max_bytes: int) -> str:
    """The commit, if it holds both files and neither is too large. Raises AdapterRefused, ConfigError."""
    sizes = {sibling.rfilename: sibling.size for sibling in info.siblings or ()}
    for file, missing in _FILES:
        if file not in sizes:
            raise AdapterRefused(missing, f"{name} has no {file} at its top.", file)
        limit = MAX_CONFIG_BYTES if file == CONFIG_FILE else max_bytes
        if sizes[file] is None or sizes[file] > limit:
            message = f"{file} of {name} has {sizes[file]} bytes; the limit is {limit}."
            raise AdapterRefused(RefusalReason.TOO_LARGE, message, file)
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        raise ConfigError(f"{name}: Hugging Face names no commit, so nothing can be pinned.")
    return info.sha
