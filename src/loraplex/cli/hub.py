"""Adapters from Hugging Face: two files of one commit, taken to a temporary directory."""

import errno
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.adapters.artifact import CONFIG_FILE, WEIGHTS_FILE
from loraplex.adapters.limits import DEFAULT_MAX_BYTES, MAX_CONFIG_BYTES
from loraplex.core import AdapterRefused, ConfigError, InvalidRequest, LoraplexError, RefusalReason, ServerError

PREFIX = "hf:"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_FOLDER = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)  # no letter that a pattern of file names could hold
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,199}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_PATH_CHARS = 250  # of repository and folder, so that a note with the commit fits into the audit log
_TRY_AGAIN = (408, 429)  # statuses of HTTP that the caller cannot mend
_OURS = (errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EROFS)
_FILES = ((CONFIG_FILE, RefusalReason.CONFIG_MISSING), (WEIGHTS_FILE, RefusalReason.WEIGHTS_MISSING))


@dataclass(frozen=True, slots=True)
class HubSource:
    """A folder of a repository, "" for its top, at a branch, tag or commit; None is its main branch."""

    repo: str
    revision: str | None
    folder: str = ""

    @property
    def path(self) -> str:
        """Without the revision: hf:org/repo/folder."""
        return f"{PREFIX}{self.repo}" + (f"/{self.folder}" if self.folder else "")

    def file(self, name: str) -> str:
        """A file's path in the repository."""
        return f"{self.folder}/{name}" if self.folder else name

    def __str__(self) -> str:
        return self.path + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class Fetched:
    """What was taken: the files in `directory`, and the commit that they are of."""

    directory: Path
    source: str  # hf:org/repo/folder@<commit>


def parse_source(text: str) -> HubSource:
    """`hf:org/repo`, then perhaps `/folder` and `@revision`. Raises InvalidRequest."""
    path, at, revision = text.removeprefix(PREFIX).partition("@")
    org, _, rest = path.partition("/")
    name, slash, folder = rest.partition("/")
    repo = f"{org}/{name}"
    is_known = _REPO.fullmatch(repo) and (not slash or _FOLDER.fullmatch(folder)) and len(path) <= _MAX_PATH_CHARS
    if not is_known or ".." in text or (at and not _REVISION.fullmatch(revision)):
        raise InvalidRequest(f"{text!r:.200} is not hf:org/repo, hf:org/repo@revision or hf:org/repo/folder@revision.")
    return HubSource(repo, revision if at else None, folder)


@contextmanager
def fetched(source: HubSource, max_bytes: int = DEFAULT_MAX_BYTES) -> Iterator[Fetched]:
    """The adapter's two files, removed at the end of the block.

    Raises ConfigError without the extra `hub` and for what the caller can mend, ServerError (hub_unreachable) where
    Hugging Face does not answer, AdapterRefused where the folder holds no adapter or too large a one.
    """
    hub, failures = _hub()
    with tempfile.TemporaryDirectory(prefix="loraplex-") as folder:
        try:
            info = hub.HfApi().model_info(source.repo, revision=source.revision, files_metadata=True)
            commit = _checked_commit(info, source, max_bytes)
            allowed = [source.file(name) for name, _ in _FILES]
            hub.snapshot_download(source.repo, revision=commit, allow_patterns=allowed, local_dir=folder)
        except failures as error:
            raise _failure(source, error) from None
        yield Fetched(Path(folder, source.folder), f"{source.path}@{commit}")


def _hub() -> tuple[Any, tuple[type[Exception], ...]]:
    """The library and what it raises. Raises ConfigError if it is not installed."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        message = "Adapters of Hugging Face need the extra hub: pip install 'loraplex[hub]'."
        raise ConfigError(message) from None
    return huggingface_hub, (errors.HFValidationError, errors.EntryNotFoundError, OSError, *_http_errors(errors))


def _http_errors(errors: Any) -> Iterator[type[Exception]]:
    """What the library's HTTP client raises: it is httpx2 or httpx, as the library's version likes."""
    import httpx

    yield from (base for base in errors.HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    yield from (httpx.HTTPError, httpx.InvalidURL)
    with suppress(ImportError):
        import httpx2

        yield from (httpx2.HTTPError, httpx2.InvalidURL)


def _failure(source: HubSource, error: Exception) -> LoraplexError:
    """What the library raised as ours, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    message = f"{source} cannot be fetched from Hugging Face: {' '.join(lines[:2]):.300}"
    if _can_be_mended(error):
        return ConfigError(message)
    failure = ServerError(message)
    failure.code = "hub_unreachable"
    return failure


def _can_be_mended(error: Exception) -> bool:
    """By the caller: a name that is not there, a token that is missing, offline mode, a full disk."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return 400 <= status < 500 and status not in _TRY_AGAIN
    if isinstance(error, OSError) and error.errno in _OURS:
        return True
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    return isinstance(error, HFValidationError | OfflineModeIsEnabled)


def _checked_commit(info: Any, source: HubSource, max_bytes: int) -> str:
    """The commit, if it holds both files and neither is too large. Raises AdapterRefused, ConfigError."""
    sizes = {sibling.rfilename: sibling.size for sibling in info.siblings or ()}
    for name, missing in _FILES:
        file = source.file(name)
        if file not in sizes:
            advice = "" if source.folder else " at its top; write hf:org/repo/folder for one in a folder"
            raise AdapterRefused(missing, f"{source} has no {name}{advice}.", name)
        limit = MAX_CONFIG_BYTES if name == CONFIG_FILE else max_bytes
        if sizes[file] is None or sizes[file] > limit:
            message = f"{name} of {source} has {sizes[file]} bytes; the limit is {limit}."
            raise AdapterRefused(RefusalReason.TOO_LARGE, message, name)
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        raise ConfigError(f"{source}: Hugging Face names no commit, so nothing can be pinned.")
    return info.sha
