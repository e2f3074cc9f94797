"""Packed adapters on disk, so that one that has left host memory comes back without being checked and packed again.

A file is found by digest. It is used only if it is whole, is what its name says, and was packed for the same base
sites, dtype, page and limits: that is its `stamp`. Anything else is dropped, and the adapter is packed from its
artifact. A file that the system does not let be read this time stays until it is written anew.
"""

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from loraplex.core import AdapterDigest, BaseSite, ConfigError
from loraplex.core.own_text import OwnText
from loraplex.engine.packed_format import Damaged, file_bytes, read_packed, write_packed
from loraplex.engine.packing import Allocate, PackedAdapter
from loraplex.pool import PoolGeometry

_SUFFIX = ".packed"
_TEMPORARY = ".tmp-"
_STALE_S = 3600.0  # of temporary files that a process left
_NO_FILE = frozenset({errno.ELOOP, errno.ENXIO})  # of opening a link or a socket
_NOT_REGULAR = "it is not a regular file"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackedFileCounts:
    """Since the start. `num_dropped` files were damaged or not what they are named; `num_evicted` made room."""

    num_hits: int = 0
    num_misses: int = 0
    num_stored: int = 0
    num_dropped: int = 0
    num_evicted: int = 0
    num_failures: int = 0  # of writing
    num_read_failures: int = 0  # by the system: the file stays
    num_bytes: int = 0  # on disk now


def packing_stamp(sites: Sequence[BaseSite], geometry: PoolGeometry, dtype: torch.dtype, limits: object) -> str:
    """What two packed images of one adapter must have in common to be the same: base sites, dtype, page, limits."""
    shapes = [(site.name, site.d_in, site.d_out) for site in sites]
    text = repr((shapes, str(dtype), geometry.page_elems, geometry.chunk_rank, limits))
    return hashlib.sha256(text.encode()).hexdigest()


class PackedFiles:
    """A directory of packed adapters, within `max_bytes`: the least recently used go first. Any thread may call it."""

    def __init__(self, directory: Path, max_bytes: int, stamp: str) -> None:
        """Raises ConfigError for a directory that cannot be used."""
        self._directory = directory
        self._max_bytes = max_bytes
        self._stamp = stamp
        self._lock = threading.Lock()
        self._unread: set[str] = set()  # files that could not be read the last time
        self._counts = dict.fromkeys(PackedFileCounts.__slots__, 0)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._sizes = self._scan()
        except OSError as error:
            message = f"Packed adapters cannot be kept in {str(directory)!r}: {error.strerror} (--packed-cache-size)."
            raise ConfigError(message) from None
        self._make_room(0)

    def counts(self) -> PackedFileCounts:
        """Figures as of now."""
        with self._lock:
            return PackedFileCounts(**{**self._counts, "num_bytes": sum(self._sizes.values())})

    def sizes(self) -> dict[AdapterDigest, int]:
        """Bytes of each adapter's file that is packed as these are."""
        ending = self._name(AdapterDigest(""))
        with self._lock:
            found = [(name.removesuffix(ending), size) for name, size in self._sizes.items() if name.endswith(ending)]
        return {AdapterDigest(digest): size for digest, size in found}

    def has_readable(self, digest: AdapterDigest) -> bool:
        """Whether there is an adapter's file that could be read when that was last tried."""
        name = self._name(digest)
        return name in self._sizes and name not in self._unread

    # ------------------------------------------------------------------ reading
    def load(self, digest: AdapterDigest, allocate: Allocate) -> PackedAdapter | None:
        """The adapter from its file, in pages that `allocate` gives; None where there is no file that can be used.

        Raises HostMemoryFull and what else `allocate` raises.
        """
        name = self._name(digest)
        try:
            packed = self._read(name, digest, allocate)
        except FileNotFoundError:
            self._count("num_misses")
            self._forget(name)
            return None
        except Damaged as error:
            _log.warning("packed adapter %s was dropped: %s", OwnText(digest), OwnText(error))
            self._count("num_dropped", "num_misses")
            self.remove(digest)
            return None
        except OSError as error:  # EMFILE, ENOMEM: of a moment; EIO, EACCES: perhaps for ever, so `store` replaces it
            _log.warning("packed adapter %s could not be read this time: %s", OwnText(digest), _reason(error))
            self._count("num_read_failures", "num_misses")
            with self._lock:
                if name in self._sizes:
                    self._unread.add(name)
            return None
        self._count("num_hits")
        with self._lock:
            self._unread.discard(name)
        self._touch(name)
        return packed

    def _read(self, name: str, digest: AdapterDigest, allocate: Allocate) -> PackedAdapter:
        try:
            fd = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in _NO_FILE:
                raise Damaged(_NOT_REGULAR) from None
            raise
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise Damaged(_NOT_REGULAR)
            return read_packed(fd, status.st_size, self._identity(digest), allocate)
        finally:
            os.close(fd)

    # ------------------------------------------------------------------ writing
    def store(self, digest: AdapterDigest, packed: PackedAdapter) -> bool:
        """Write an adapter's file, whole or not at all; False if it was not written. Its pages must stay meanwhile."""
        name, identity = self._name(digest), self._identity(digest)
        size = file_bytes(packed, identity)
        if size > self._max_bytes:
            return False
        self._make_room(size)
        temporary = self._directory / f"{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            write_packed(temporary, packed, identity)
            temporary.replace(self._directory / name)
            _sync_directory(self._directory)
        except OSError as error:
            _log.warning("packed adapter %s could not be kept: %s", OwnText(digest), _reason(error))
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._count("num_failures")
            return False
        self._count("num_stored")
        with self._lock:
            self._sizes[name] = size
            self._sizes.move_to_end(name)
            self._unread.discard(name)
        return True

    # ------------------------------------------------------------------ books
    def remove(self, digest: AdapterDigest) -> None:
        """Remove an adapter's file, if it is there."""
        self._unlink(self._name(digest))

    def sweep(self, is_wanted: Callable[[AdapterDigest], bool]) -> int:
        """Remove the files of adapters that are not wanted any more, also those packed otherwise; how many."""
        with self._lock:
            names = list(self._sizes)
        unwanted = [name for name in names if not is_wanted(AdapterDigest(name.partition("-")[0]))]
        for name in unwanted:
            self._unlink(name)
        return len(unwanted)

    def _name(self, digest: AdapterDigest) -> str:
        return f"{digest}-{self._stamp[:16]}{_SUFFIX}"

    def _identity(self, digest: AdapterDigest) -> dict[str, str]:
        return {"digest": str(digest), "stamp": self._stamp}

    def _scan(self) -> "OrderedDict[str, int]":
        """Sizes of the files, the least recently used first. Removes what interrupted writes have left.

        Those that may still be written to count until `sweep` takes them.
        """
        found: list[tuple[float, str, int]] = []
        for path in self._directory.iterdir():
            try:
                status = path.lstat()
                if path.name.startswith(_TEMPORARY) and time.time() - status.st_mtime > _STALE_S:
                    path.unlink()
                    continue
            except FileNotFoundError:
                continue  # another process was quicker
            if path.name.endswith(_SUFFIX) or path.name.startswith(_TEMPORARY):
                found.append((status.st_mtime, path.name, status.st_size))
        return OrderedDict((name, size) for _, name, size in sorted(found))

    def _make_room(self, num_bytes: int) -> None:
        """Remove the least recently used until so many bytes have room."""
        with self._lock:
            total, oldest = sum(self._sizes.values()), list[str]()
            for name, size in self._sizes.items():
                if total + num_bytes <= self._max_bytes:
                    break
                oldest.append(name)
                total -= size
        for name in oldest:
            self._unlink(name)
            self._count("num_evicted")

    def _touch(self, name: str) -> None:
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)
        try:
            os.utime(self._directory / name)
        except OSError:
            self._forget(name)

    def _unlink(self, name: str) -> None:
        self._forget(name)
        try:
            (self._directory / name).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("packed file %s could not be removed: %s", OwnText(name), _reason(error))

    def _forget(self, name: str) -> None:
        with self._lock:
            self._sizes.pop(name, None)
            self._unread.discard(name)

    def _count(self, *names: str) -> None:
        with self._lock:
            for name in names:
                self._counts[name] += 1


def _reason(error: OSError) -> OwnText:
    """What the system says of an error, without the paths that Python adds."""
    return OwnText(os.strerror(error.errno or 0))


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
