"""The file format of a packed adapter.

    magic (8 bytes) | length of the header (u32 little-endian) | header (JSON) | tables | pages | sha256

The header says whose file it is and how long the tables are. Pages are read straight to where they shall lie, pieces of
them at once, since hashing takes longer than reading. The sha256 at the end is that of everything before the pages and,
in their place, of the sha256 of each piece.
"""

import hashlib
import json
import logging
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.engine.host_arena import HostPages, LeasedPages
from loraplex.engine.packing import Allocate, PackedAdapter

_MAGIC = b"lplxpk02"  # the format's version is in it
_MAX_HEADER = 4096
_PIECE_BYTES = 2 * 2**20  # of pages, one page at least
_MAX_THREADS = 8  # that read a file
_SHA_BYTES = 32
_TABLES: dict[str, np.dtype[Any]] = {
    "chunk_start": np.dtype("<i4"),
    "chunk_rank": np.dtype("<i4"),
    "piece_page": np.dtype("<i8"),
    "piece_offset": np.dtype("<i8"),
    "scale": np.dtype("<f4"),
}

_log = logging.getLogger(__name__)


class Damaged(Exception):
    """What is wrong with a file."""


def file_bytes(packed: PackedAdapter, identity: Mapping[str, str]) -> int:
    """Size of the file that `write_packed` makes."""
    image = packed.image
    return sum(map(len, _start(packed, identity))) + len(image) * _page_bytes(image) + _SHA_BYTES


def write_packed(path: Path, packed: PackedAdapter, identity: Mapping[str, str]) -> None:
    """Write a new file and have the disk keep it. `identity` is what reading will ask for. Raises OSError."""
    sha = hashlib.sha256()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for part in _start(packed, identity):
            _write_all(fd, part)
            sha.update(part)
        for piece in _pieces(packed.image):
            for part in piece:
                _write_all(fd, part)
            sha.update(_sha_of(piece))
        _write_all(fd, memoryview(sha.digest()))
        os.fsync(fd)
    finally:
        os.close(fd)


def read_packed(fd: int, num_bytes: int, identity: Mapping[str, str], allocate: Allocate) -> PackedAdapter:
    """The adapter of a file of so many bytes, its pages in what `allocate` gives.

    Raises Damaged, also for a file of another identity, OSError, and what `allocate` raises; then nothing is leased.
    """
    reader = _Reader(fd, num_bytes)
    header = reader.header()
    if header.get("identity") != dict(identity):
        raise Damaged("it is another adapter's, or was packed otherwise")
    tables = {name: reader.table(header, name, dtype) for name, dtype in _TABLES.items()}
    num_pages, page_bytes = header.get("pages"), header.get("page_bytes")
    if not isinstance(num_pages, int) or num_pages < 1 or not isinstance(page_bytes, int) or page_bytes < 1:
        raise Damaged("its header says nothing of pages")
    if num_pages * page_bytes != reader.left:
        raise Damaged(f"it has {num_bytes} bytes, which is not what its header says")
    image = allocate(num_pages)
    try:
        reader.pages(image, page_bytes)
        reader.check_sha()
    except BaseException:
        image.free()
        raise
    return PackedAdapter(image=image, **tables)


def _start(packed: PackedAdapter, identity: Mapping[str, str]) -> list[memoryview]:
    """What a file holds before its pages."""
    tables = {name: getattr(packed, name).astype(dtype, order="C", copy=False) for name, dtype in _TABLES.items()}
    fields = {
        "identity": dict(identity),
        "shapes": {name: table.shape for name, table in tables.items()},
        "pages": len(packed.image),
        "page_bytes": _page_bytes(packed.image),
    }
    header = json.dumps(fields).encode()
    assert len(header) <= _MAX_HEADER, "a header that no reader takes"
    start = memoryview(_MAGIC + struct.pack("<I", len(header)) + header)
    return [start, *(_bytes_of(table) for table in tables.values())]


def _page_bytes(image: HostPages) -> int:
    return image.page_elems * image.dtype.itemsize


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _pieces(image: HostPages) -> Iterator[list[memoryview]]:
    """The memory of an image, some pages at a time, of which neighbours lie together."""
    step = max(1, _PIECE_BYTES // _page_bytes(image))
    for first in range(0, len(image), step):
        yield [_bytes_of(run.view(torch.uint8).numpy()) for run in image[first : first + step].runs]


def _sha_of(piece: list[memoryview]) -> bytes:
    sha = hashlib.sha256()
    for part in piece:
        sha.update(part)
    return sha.digest()


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _read_at(fd: int, view: memoryview, offset: int) -> int:
    """Fill a view from that place of a file on; the place behind."""
    while view:
        count = os.preadv(fd, [view], offset)
        if count == 0:
            raise Damaged("it was cut")
        view, offset = view[count:], offset + count
    return offset


def _read_piece(fd: int, piece: list[memoryview], offset: int) -> bytes:
    """Fill a piece from that place of a file on; its hash."""
    for part in piece:
        offset = _read_at(fd, part, offset)
    return _sha_of(piece)


def _read_pieces(fd: int, pieces: list[list[memoryview]], offsets: Sequence[int]) -> list[bytes]:
    """Fill pieces from these places of a file on; their hashes. In this thread if the system gives no others."""
    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)), len(pieces))
    if num_threads > 1:
        try:
            with ThreadPoolExecutor(num_threads) as threads:
                return list(threads.map(_read_piece, repeat(fd), pieces, offsets))
        except RuntimeError as error:  # a thread cannot be started; those that were have ended
            _log.warning("a packed adapter is read by one thread", exc_info=error)
    return [_read_piece(fd, piece, offset) for piece, offset in zip(pieces, offsets, strict=True)]


class _Reader:
    """Reads a file from its start and hashes what it reads."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._fd = fd
        self._sha = hashlib.sha256()
        self._offset = 0
        self.left = num_bytes - _SHA_BYTES  # before the hash

    def header(self) -> dict[str, Any]:
        start = self._take(len(_MAGIC) + 4)
        if start[: len(_MAGIC)] != _MAGIC:
            raise Damaged("it is no packed adapter of this version")
        (length,) = struct.unpack("<I", start[len(_MAGIC) :])
        if length > _MAX_HEADER:
            raise Damaged("its header is too long")
        try:
            fields = json.loads(self._take(length))
        except (ValueError, RecursionError):
            raise Damaged("its header cannot be read") from None
        if not isinstance(fields, dict):
            raise Damaged("its header cannot be read")
        return fields

    def table(self, header: Mapping[str, Any], name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The next table, of the shape that the header says."""
        try:
            shape = tuple(int(size) for size in header["shapes"][name])
            num_bytes = math.prod(shape) * dtype.itemsize
        except (KeyError, TypeError, ValueError, OverflowError):
            raise Damaged(f"its header says nothing of {name}") from None
        if len(shape) > 2 or any(size < 0 for size in shape) or not 0 <= num_bytes <= self.left:
            raise Damaged(f"its header gives {name} a shape that cannot be")
        data = self._take(num_bytes)
        try:
            return np.frombuffer(data, dtype).reshape(shape)
        except ValueError:  # beside a size of 0 another may be beyond what numpy takes
            raise Damaged(f"its header gives {name} a shape that cannot be") from None

    def pages(self, image: LeasedPages, page_bytes: int) -> None:
        if page_bytes != _page_bytes(image):
            raise Damaged(f"its pages have {page_bytes} bytes")
        pieces = list(_pieces(image))
        step = sum(map(len, pieces[0]))
        offsets = range(self._offset, self._offset + len(image) * page_bytes, step)
        for digest in _read_pieces(self._fd, pieces, offsets):
            self._sha.update(digest)
        self._offset += len(image) * page_bytes

    def check_sha(self) -> None:
        """Raise Damaged unless the hash that follows is that of everything before."""
        wanted, sha = self._sha.digest(), bytearray(_SHA_BYTES)
        self.left = _SHA_BYTES
        self._fill(memoryview(sha))
        if bytes(sha) != wanted:
            raise Damaged("its bytes have changed")

    def _take(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        """Read exactly as much as the view holds."""
        if len(view) > self.left:
            raise Damaged("it is too short")
        self.left -= len(view)
        self._offset = _read_at(self._fd, view, self._offset)
        self._sha.update(view)
