"""The audit log: one chain of hashes a tenant, written in the transaction of the change that it records.

An entry's body is canonical JSON (keys sorted, no spaces, ASCII) with `chain`, `seq` counting from 1, `prev`, the
sha256 of the body before, and what happened. Its MAC is made with a key that the database does not hold. A chain alone
cannot show that its tail was cut; the signed heads of `audit_heads` do.
"""

import hashlib
import hmac
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import Connection, func, insert, select

from loraplex.registry.audit_heads import AuditHeads, Head
from loraplex.registry.schema import AnyRow, audit_log
from loraplex.registry.types import KeyId

SYSTEM_CHAIN = "system"
_FIRST_PREV = "0" * 64
_ROWS_AT_ONCE = 500

Detail = str | int | float | bool | None | list[str]


class FindingKind(StrEnum):
    """What verification can find."""

    EDITED = "edited"  # body and MAC do not belong together
    MISPLACED = "misplaced"  # a genuine entry in another place than its own: moved, replayed, or of another chain
    GAP = "gap"  # entries are missing in the middle
    BROKEN_LINK = "broken_link"  # the entry does not follow the one before
    TRUNCATED = "truncated"  # a signed head lies behind the last entry
    HEAD_DIFFERS = "head_differs"  # the entry at a signed head is another one
    HEAD_FORGED = "head_forged"  # a line of the heads file is not ours


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One thing wrong. `chain` is a tenant's id or "system"; `seq` the entry, 0 where it is about the heads file."""

    kind: FindingKind
    chain: str
    seq: int
    message: str


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What `verify` looked at and found."""

    num_chains: int
    num_entries: int
    findings: tuple[AuditFinding, ...]

    @property
    def ok(self) -> bool:
        return not self.findings


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One recorded event."""

    chain: str
    seq: int
    at: float
    actor: KeyId
    action: str
    details: Mapping[str, Detail]


class AuditLog:
    """Appends to the chains and checks them. Knows no transaction of its own."""

    __slots__ = ("_key", "heads")

    def __init__(self, key: bytes, heads: AuditHeads) -> None:
        self._key = key
        self.heads = heads

    def append(
        self, connection: Connection, chain: str, actor: KeyId, action: str, details: Mapping[str, Detail], at: float
    ) -> Head:
        """Add one entry inside the caller's transaction, which must hold the registry's write lock."""
        last = _last(connection, chain)
        seq = last.seq + 1 if last is not None else 1
        body = canonical(
            {
                "action": action,
                "actor": actor,
                "at_us": round(at * 1e6),
                "chain": chain,
                "details": dict(details),
                "prev": _hash(last.body) if last is not None else _FIRST_PREV,
                "seq": seq,
            }
        )
        connection.execute(insert(audit_log).values(chain=chain, seq=seq, body=body, mac=self._mac(body)))
        return Head(chain, seq, _hash(body))

    def entries(self, connection: Connection, chain: str, after: int, limit: int) -> tuple[AuditEntry, ...]:
        """Entries of a chain in order, from the one behind `after`."""
        query = (
            select(audit_log.c.body)
            .where(audit_log.c.chain == chain, audit_log.c.seq > after)
            .order_by(audit_log.c.seq)
            .limit(limit)
        )
        return tuple(_entry(body) for body in connection.execute(query).scalars())

    def verify(self, connection: Connection, chains: Iterable[str] | None = None) -> AuditReport:
        """Check every entry of the named chains, or of all, against its MAC, its neighbour and the signed heads."""
        heads, forged = self.heads.read()
        findings = [_forged(line) for line in forged]
        if chains is None:
            stored = connection.execute(select(audit_log.c.chain).distinct()).scalars()
            chains = sorted({*stored, *heads})
        num_chains = num_entries = 0
        for chain in chains:
            check = _ChainCheck(self, chain, heads.get(chain))
            for row in _rows(connection, chain, 0):
                check.take(row)
            check.finish()
            findings += check.findings
            num_chains += 1
            num_entries += check.num_entries
        return AuditReport(num_chains, num_entries, tuple(findings))

    def catch_up(self, connection: Connection) -> None:
        """Sign what was committed but not signed before the process ended. What does not verify stays unsigned."""
        heads, _ = self.heads.read()
        query = select(audit_log.c.chain, func.max(audit_log.c.seq)).group_by(audit_log.c.chain)
        behind = [chain for chain, seq in connection.execute(query) if chain not in heads or heads[chain].seq < seq]
        signed = []
        for chain in behind:
            check = _ChainCheck(self, chain, heads.get(chain))
            for row in _rows(connection, chain, 0):
                check.take(row)
            check.finish()
            if not check.findings and check.last is not None:
                signed.append(check.last)
        self.heads.append(signed)

    def is_genuine(self, body: str, mac: str) -> bool:
        """True if we made this MAC for this body."""
        return hmac.compare_digest(self._mac(body).encode(), mac.encode())

    def _mac(self, body: str) -> str:
        return hmac.new(self._key, b"entry " + body.encode(), hashlib.sha256).hexdigest()


class _ChainCheck:
    """Walks one chain. After a fault it goes on from what is there, so that one fault gives few findings."""

    __slots__ = ("_chain", "_head", "_log", "findings", "last", "num_entries")

    def __init__(self, log: AuditLog, chain: str, head: Head | None) -> None:
        self._log = log
        self._chain = chain
        self._head = head
        self.last: Head | None = None
        self.findings: list[AuditFinding] = []
        self.num_entries = 0

    def take(self, row: AnyRow) -> None:
        """Check the next entry: MAC, place, neighbour, head."""
        self.num_entries += 1
        seq, body, expected = row.seq, row.body, self.last.seq + 1 if self.last else 1
        if seq != expected:
            self._find(FindingKind.GAP, seq, f"entries {expected} to {seq - 1} are missing")
        if not self._log.is_genuine(body, row.mac):
            self._find(FindingKind.EDITED, seq, "the entry was changed or made by someone else")
        else:
            self._check_place(seq, body)
        this = Head(self._chain, seq, _hash(body))
        if self._head is not None and self._head.seq == seq and self._head.hash != this.hash:
            self._find(FindingKind.HEAD_DIFFERS, seq, "another entry was signed as head here")
        self.last = this

    def _check_place(self, seq: int, body: str) -> None:
        fields = json.loads(body)
        if (fields["chain"], fields["seq"]) != (self._chain, seq):
            message = f"the entry is number {fields['seq']} of chain {fields['chain']}"
            self._find(FindingKind.MISPLACED, seq, message)
        elif fields["prev"] != (self.last.hash if self.last else _FIRST_PREV):
            self._find(FindingKind.BROKEN_LINK, seq, "the entry does not follow the one before it")

    def finish(self) -> None:
        """Check that the chain reaches its signed head."""
        last = self.last.seq if self.last else 0
        if self._head is not None and last < self._head.seq:
            self._find(FindingKind.TRUNCATED, last, f"it ends at {last}, but {self._head.seq} was signed as head")

    def _find(self, kind: FindingKind, seq: int, message: str) -> None:
        self.findings.append(AuditFinding(kind, self._chain, seq, f"Chain {self._chain}, entry {seq}: {message}."))


def canonical(value: Mapping[str, object]) -> str:
    """The one way to write a value as JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _hash(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def _last(connection: Connection, chain: str) -> AnyRow | None:
    columns = audit_log.c
    query = select(columns.seq, columns.body).where(columns.chain == chain).order_by(columns.seq.desc()).limit(1)
    return connection.execute(query).one_or_none()


def _rows(connection: Connection, chain: str, after: int) -> Iterator[AnyRow]:
    """All entries behind `after`, a few hundred in memory at a time."""
    columns = audit_log.c
    while True:
        query = (
            select(columns.seq, columns.body, columns.mac)
            .where(columns.chain == chain, columns.seq > after)
            .order_by(columns.seq)
            .limit(_ROWS_AT_ONCE)
        )
        rows = connection.execute(query).all()
        yield from rows
        if len(rows) < _ROWS_AT_ONCE:
            return
        after = rows[-1].seq


def _entry(body: str) -> AuditEntry:
    fields = json.loads(body)
    return AuditEntry(
        fields["chain"],
        fields["seq"],
        fields["at_us"] / 1e6,
        KeyId(fields["actor"]),
        fields["action"],
        fields["details"],
    )


def _forged(line: int) -> AuditFinding:
    return AuditFinding(
        FindingKind.HEAD_FORGED, "", 0, f"Line {line} of the heads file was not written by this server."
    )
