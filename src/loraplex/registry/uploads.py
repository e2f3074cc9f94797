"""Where files that a client sends are kept until `publish` has read them: one directory for each upload.

They lie in the data directory under names of ours. What a crash leaves behind is removed by the sweep.
"""

import contextlib
import errno
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from loraplex.core import ConfigError, Overloaded, OverloadReason
from loraplex.core.registry_errors import StoreFull, StoreUnavailable
from loraplex.registry.directory_store import RESERVE_BYTES

MAX_UPLOADS = 4  # at a time
_RETRY_AFTER_S = 5.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Uploads:
    """Directories for uploads. Every method may be called from any thread."""

    __slots__ = ("_places", "_root")

    def __init__(self, root: Path) -> None:
        """Makes the directory, for this user only. Raises ConfigError."""
        self._root = root
        self._places = threading.BoundedSemaphore(MAX_UPLOADS)
        try:
            root.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"The directory {str(root)!r} cannot be used: {error.strerror}.") from None

    @contextlib.contextmanager
    def directory(self, num_bytes: int) -> Iterator[Path]:
        """See Registry.upload_directory."""
        free = shutil.disk_usage(self._root).free
        if free < num_bytes + RESERVE_BYTES:
            message = f"{free} bytes are free for an upload of {num_bytes}; {RESERVE_BYTES} are kept free."
            raise StoreFull(message)
        if not self._places.acquire(blocking=False):
            message = f"{MAX_UPLOADS} uploads are running, which is the limit; try again."
            raise Overloaded(message, _RETRY_AFTER_S, OverloadReason.WORK)
        try:
            with write_failures():
                directory = Path(tempfile.mkdtemp(dir=self._root))
            try:
                yield directory
            finally:
                shutil.rmtree(directory, ignore_errors=True)
        finally:
            self._places.release()

    def sweep(self, before: float) -> int:
        """Remove directories that were made before a time, in unix seconds; returns how many."""
        count = 0
        for directory in self._root.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if directory.lstat().st_mtime < before:
                    shutil.rmtree(directory, ignore_errors=True)
                    count += 1
        return count


@contextlib.contextmanager
def write_failures() -> Iterator[None]:
    """Raise StoreFull or StoreUnavailable for what the system says."""
    try:
        yield
    except OSError as error:
        message = f"An upload cannot be written: {error.strerror}."
        raise (StoreFull if error.errno in _NO_ROOM else StoreUnavailable)(message) from None
