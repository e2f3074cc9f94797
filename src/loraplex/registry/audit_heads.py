"""The signed heads of the audit chains: a file beside the database, one line for each head, last one counts."""

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loraplex.core.registry_errors import AuditUnavailable
from loraplex.registry.master_secret import sync_directory

FILE_NAME = "audit-heads.jsonl"
_COMPACT_ABOVE_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Head:
    """The last entry of a chain: its number and the sha256 of its body."""

    chain: str
    seq: int
    hash: str


class AuditHeads:
    """Appends heads durably. Heads that could not be written are kept and come first at the next call."""

    __slots__ = ("_key", "_lock", "_path", "_pending")

    def __init__(self, path: Path, key: bytes) -> None:
        self._path = path
        self._key = key
        self._lock = threading.Lock()
        self._pending: list[Head] = []

    def append(self, heads: Sequence[Head]) -> None:
        """Sign heads and write them, those left over first. Raises AuditUnavailable."""
        with self._lock:
            self._pending += heads
            if not self._pending:
                return
            try:
                self._write(self._pending)
            except OSError as error:
                message = f"The audit heads file {str(self._path)!r} cannot be written: {error.strerror}."
                raise AuditUnavailable(f"{message} Nothing can be changed until it can.") from None
            self._pending = []

    def read(self) -> tuple[dict[str, Head], tuple[int, ...]]:
        """The head with the highest number of each chain, and the numbers of lines that are not genuine."""
        heads: dict[str, Head] = {}
        forged = []
        for number, line in enumerate(self._lines(), 1):
            head = self._parse(line)
            if head is None:
                forged.append(number)
            elif head.chain not in heads or heads[head.chain].seq < head.seq:
                heads[head.chain] = head
        return heads, tuple(forged)

    def _lines(self) -> list[bytes]:
        """Whole lines; the piece of a line that a crash left behind is none."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return []
        return data.split(b"\n")[:-1]

    def _write(self, heads: Sequence[Head]) -> None:
        with _locked(self._path) as fd:
            size = _drop_torn_line(fd)
            _write_all(fd, b"".join(map(self._line, heads)))
            os.fsync(fd)
            if size > _COMPACT_ABOVE_BYTES:
                self._compact()

    def _compact(self) -> None:
        """Put a file with one line a chain in place of this one, if all lines are genuine."""
        heads, forged = self.read()
        if forged:
            return
        copy = self._path.with_suffix(".new")
        fd = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _write_all(fd, b"".join(map(self._line, heads.values())))
            os.fsync(fd)
        finally:
            os.close(fd)
        copy.replace(self._path)
        sync_directory(self._path.parent)

    def _line(self, head: Head) -> bytes:
        fields: dict[str, str | int] = {"chain": head.chain, "hash": head.hash, "seq": head.seq}
        return _json({**fields, "mac": self._mac(fields)}) + b"\n"

    def _parse(self, line: bytes) -> Head | None:
        try:
            fields = json.loads(line)
        except ValueError:
            return None
        if not isinstance(fields, dict) or set(fields) != {"chain", "hash", "mac", "seq"}:
            return None
        mac = fields.pop("mac")
        if not isinstance(mac, str) or not hmac.compare_digest(mac.encode(), self._mac(fields).encode()):
            return None
        return Head(fields["chain"], fields["seq"], fields["hash"])

    def _mac(self, fields: dict[str, str | int]) -> str:
        return hmac.new(self._key, b"head " + _json(fields), hashlib.sha256).hexdigest()


def _json(fields: dict[str, str | int]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file, open for appending and held alone; opened again where another process just put a new one in place."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                yield fd
                return
        finally:
            os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _drop_torn_line(fd: int) -> int:
    """Cut what a crash left behind the last line end; returns the file's size."""
    size = os.fstat(fd).st_size
    if size == 0 or os.pread(fd, 1, size - 1) == b"\n":
        return size
    start = max(0, size - 4096)
    kept = start + os.pread(fd, size - start, start).rfind(b"\n") + 1
    os.ftruncate(fd, kept)
    return kept
