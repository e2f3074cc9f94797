"""Artifacts in a directory: `tmp/` for files that are being written, `blobs/<sha256>` for those that are whole.

A file is written and synchronised under a random name, renamed to its hash, and the directory is synchronised. Nothing
else ever makes a name in `blobs/`. All opens go through a descriptor of the directory and follow no link.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from loraplex.core import ConfigError
from loraplex.core.registry_errors import ArtifactMissing, StoreFull, StoreReadOnly, StoreUnavailable
from loraplex.registry.blobs import StagedBlob, StoredBlob, check_blob_key, check_bytes, corrupt, hash_blob, is_blob_key
from loraplex.registry.types import BlobKey, BlobRef

RESERVE_BYTES = 64 * 2**20  # kept free for the database and the audit log
_CHUNK_BYTES = 2**26
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class DirectoryStore:
    """A BlobStore on a local file system."""

    __slots__ = ("_blobs_fd", "_on_step", "_read_only", "_root", "_tmp_fd")

    def __init__(self, root: Path, on_step: Callable[[str], None]) -> None:
        """Makes the directories, readable by this user only. Raises ConfigError."""
        self._root = root
        self._on_step = on_step
        self._read_only: str | None = None
        try:
            for directory in (root, root / "tmp", root / "blobs"):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._tmp_fd = os.open(root / "tmp", _DIRECTORY)
            self._blobs_fd = os.open(root / "blobs", _DIRECTORY)
        except OSError as error:
            raise ConfigError(f"The artifact directory {str(root)!r} cannot be used: {error.strerror}.") from None

    def stage(self, data: bytes | memoryview) -> StagedBlob:
        """See BlobStore."""
        self._check_writable(len(data))
        name = secrets.token_hex(16)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        staged = StagedBlob(hash_blob(data), self._root / "tmp" / name)
        try:
            with self._failures():
                fd = os.open(name, flags, 0o600, dir_fd=self._tmp_fd)
                try:
                    self._on_step("stage.created")
                    _write_all(fd, memoryview(data))
                    self._on_step("stage.written")
                    self._sync(fd)
                finally:
                    os.close(fd)
            self._on_step("stage.synced")
        except BaseException:
            self.discard(staged)
            raise
        return staged

    def discard(self, staged: StagedBlob) -> None:
        """See BlobStore."""
        with contextlib.suppress(FileNotFoundError), self._failures():
            os.unlink(staged.path.name, dir_fd=self._tmp_fd)

    def publish(self, staged: StagedBlob) -> None:
        """See BlobStore. A file that is there already is replaced: equal, or damaged and now mended."""
        self._check_writable(0)
        with self._failures():
            source, target = staged.path.name, check_blob_key(staged.ref.key)
            os.rename(source, target, src_dir_fd=self._tmp_fd, dst_dir_fd=self._blobs_fd)
            self._on_step("blob.renamed")
            self._sync(self._blobs_fd)
        self._on_step("blob.synced")

    def modified_at(self, key: BlobKey) -> float | None:
        """See BlobStore."""
        with self._failures():
            try:
                status = os.stat(check_blob_key(key), dir_fd=self._blobs_fd, follow_symlinks=False)
            except FileNotFoundError:
                return None
        return status.st_mtime if stat.S_ISREG(status.st_mode) else None

    def get(self, ref: BlobRef) -> memoryview:
        """See BlobStore."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with self._failures():
            try:
                fd = os.open(check_blob_key(ref.key), flags, dir_fd=self._blobs_fd)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
                    raise ArtifactMissing(f"Artifact {ref.key} is not in the store.") from None
                raise
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise ArtifactMissing(f"Artifact {ref.key} is not a regular file.")
                if status.st_size != ref.num_bytes:
                    raise corrupt(ref, status.st_size)
                data = _read_all(fd, ref)
            finally:
                os.close(fd)
        check_bytes(ref, data)
        return data

    def list(self) -> Iterator[StoredBlob]:
        """See BlobStore."""
        with self._failures():
            names = [name for name in os.listdir(self._blobs_fd) if is_blob_key(name)]  # noqa: PTH208
        for name in names:
            with contextlib.suppress(FileNotFoundError), self._failures():
                status = os.stat(name, dir_fd=self._blobs_fd, follow_symlinks=False)
                yield StoredBlob(BlobKey(name), status.st_mtime)

    def delete(self, key: BlobKey) -> None:
        """See BlobStore."""
        with contextlib.suppress(FileNotFoundError), self._failures():
            os.unlink(check_blob_key(key), dir_fd=self._blobs_fd)

    def sweep_staging(self, before: float) -> int:
        """See BlobStore."""
        count = 0
        with self._failures():
            names = os.listdir(self._tmp_fd)  # noqa: PTH208
        for name in names:
            with contextlib.suppress(FileNotFoundError), self._failures():
                if os.stat(name, dir_fd=self._tmp_fd, follow_symlinks=False).st_mtime < before:
                    os.unlink(name, dir_fd=self._tmp_fd)
                    count += 1
        return count

    def close(self) -> None:
        os.close(self._tmp_fd)
        os.close(self._blobs_fd)

    def _check_writable(self, num_bytes: int) -> None:
        if self._read_only is not None:
            raise StoreReadOnly(self._read_only)
        with self._failures():
            status = os.fstatvfs(self._blobs_fd)
        free = status.f_bavail * status.f_frsize
        if free < num_bytes + RESERVE_BYTES:
            message = f"The artifact of {num_bytes} bytes does not fit: {free} bytes are free in {str(self._root)!r}, "
            raise StoreFull(f"{message}of which {RESERVE_BYTES} are kept in reserve.")

    def _sync(self, fd: int) -> None:
        """fsync. After a failure the system may have dropped the data and say so only once: never try again."""
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                message = f"The artifact directory {str(self._root)!r} failed to synchronise ({error.strerror}); "
                self._read_only = f"{message}it is read-only until the server starts again."
                raise StoreReadOnly(self._read_only) from None
            raise

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Errors of the system as ours; a missing file stays one."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            where = f"the artifact directory {str(self._root)!r}"
            if error.errno in _NO_ROOM:
                raise StoreFull(f"No room is left in {where}: {error.strerror}.") from None
            raise StoreUnavailable(f"An operation in {where} failed: {error.strerror}.") from None


def _write_all(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view[:_CHUNK_BYTES]) :]


def _read_all(fd: int, ref: BlobRef) -> memoryview:
    view = memoryview(bytearray(ref.num_bytes))
    done = 0
    while done < len(view):
        got = os.readv(fd, [view[done : done + _CHUNK_BYTES]])
        if got == 0:
            raise corrupt(ref, done)
        done += got
    return view.toreadonly()
