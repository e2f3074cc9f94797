"""The audit log under attack (RELIABILITY.md, T24): every manipulation of the table or the heads file is found."""

import hashlib
import hmac
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import delete, insert, select, update

from loraplex.registry import AuditReport, AuditUnavailable, FindingKind, PermissionDenied, Role, TenantNotFound
from loraplex.registry.audit import canonical
from loraplex.registry.audit_heads import FILE_NAME, AuditHeads, Head
from loraplex.registry.schema import audit_log

from .helpers import OPERATOR, MakeWorld, World

NUM_ENTRIES = 25
Rows = list[tuple[str, int, str, str]]
Attack = Callable[[random.Random, Rows, str, str], Rows]


@pytest.fixture
def filled(world: World) -> World:
    """Two tenants with a few dozen entries each."""
    for tenant in ("acme", "globex"):
        world.tenant(tenant)
        for _ in range(NUM_ENTRIES - 2):
            world.key(tenant)
    return world


def read_rows(world: World) -> Rows:
    with world.registry._store.database.read() as connection:
        query = select(audit_log).order_by(audit_log.c.chain, audit_log.c.seq)
        return [(row.chain, row.seq, row.body, row.mac) for row in connection.execute(query)]


def write_rows(world: World, rows: Rows) -> None:
    with world.registry._store.database.write() as connection:
        connection.execute(delete(audit_log))
        if rows:
            values = [dict(zip(("chain", "seq", "body", "mac"), row, strict=True)) for row in rows]
            connection.execute(insert(audit_log), values)


def verify(world: World) -> AuditReport:
    return world.registry.verify_audit(OPERATOR)


# ---------------------------------------------------------------------- attacks on the table
def edit(rng: random.Random, rows: Rows, mine: str, other: str) -> Rows:
    index = rng.choice([i for i, row in enumerate(rows) if row[0] == mine])
    chain, seq, body, mac = rows[index]
    position = rng.randrange(len(body))
    character = rng.choice([c for c in "abcxyz0189" if c != body[position]])
    return [*rows[:index], (chain, seq, body[:position] + character + body[position + 1 :], mac), *rows[index + 1 :]]


def remove(rng: random.Random, rows: Rows, mine: str, other: str) -> Rows:
    index = rng.choice([i for i, row in enumerate(rows) if row[0] == mine])
    return [*rows[:index], *rows[index + 1 :]]


def remove_and_renumber(rng: random.Random, rows: Rows, mine: str, other: str) -> Rows:
    gone = rng.choice([row[1] for row in rows if row[0] == mine])
    kept = [row for row in rows if (row[0], row[1]) != (mine, gone)]
    return [(c, s - 1 if c == mine and s > gone else s, body, mac) for c, s, body, mac in kept]


def reorder(rng: random.Random, rows: Rows, mine: str, other: str) -> Rows:
    first, second = rng.sample([i for i, row in enumerate(rows) if row[0] == mine], 2)
    swapped = list(rows)
    (c, s, body, mac), (_, t, body2, mac2) = rows[first], rows[second]
    swapped[first], swapped[second] = (c, s, body2, mac2), (c, t, body, mac)
    return swapped


def truncate(rng: random.Random, rows: Rows, mine: str, other: str) -> Rows:
    last = rng.randrange(0, NUM_ENTRIES)
    return [row for row in rows if row[0] != mine or row[1] <= last]


def replay(rng: random.Random, rows: Rows, mine: str, other: str) -> Rows:
    _, _, body, mac = rng.choice([row for row in rows if row[0] == mine])
    last = max(row[1] for row in rows if row[0] == mine)
    return [*rows, (mine, last + 1, body, mac)]


def splice(rng: random.Random, rows: Rows, mine: str, other: str) -> Rows:
    seq = rng.randrange(2, NUM_ENTRIES)
    _, _, body, mac = next(row for row in rows if row[:2] == (other, seq))
    return [(c, s, body, mac) if (c, s) == (mine, seq) else (c, s, b, m) for c, s, b, m in rows]


def forge(rng: random.Random, rows: Rows, mine: str, other: str) -> Rows:
    """A new entry that fits in every way but its MAC."""
    _, last, body, _ = max((row for row in rows if row[0] == mine), key=lambda row: row[1])
    fields = {**json.loads(body), "seq": last + 1, "prev": hashlib.sha256(body.encode()).hexdigest()}
    forged = canonical(fields)
    return [*rows, (mine, last + 1, forged, hmac.new(b"guess", forged.encode(), "sha256").hexdigest())]


ATTACKS: list[Attack] = [edit, remove, remove_and_renumber, reorder, truncate, replay, splice, forge]


def num_found(world: World, attack: Attack, tries: int) -> int:
    """How many of these attacks were found; the log is whole again afterwards."""
    rows = read_rows(world)
    mine, other = sorted({row[0] for row in rows})[:2]
    rng, found = random.Random(7), 0
    for _ in range(tries):
        changed = attack(rng, rows, mine, other)
        assert changed != rows
        write_rows(world, changed)
        found += not verify(world).ok
    write_rows(world, rows)
    return found


def test_every_attack_on_the_table_is_found(filled: World) -> None:
    report = verify(filled)
    assert report.ok
    assert (report.num_chains, report.num_entries) == (2, 2 * NUM_ENTRIES)  # the floor: there is a log to attack
    assert [num_found(filled, attack, 25) for attack in ATTACKS] == [25] * len(ATTACKS)
    assert verify(filled).ok


@pytest.mark.parametrize(
    ("guard", "missed"),
    [
        ("loraplex.registry.audit.AuditLog.is_genuine", forge),
        ("loraplex.registry.audit._ChainCheck.finish", truncate),
        ("loraplex.registry.audit._ChainCheck._check_place", replay),
    ],
)
def test_without_a_guard_its_attack_is_missed(
    filled: World, monkeypatch: pytest.MonkeyPatch, guard: str, missed: Attack
) -> None:
    """Mutants: each check is what finds its attack."""
    monkeypatch.setattr(guard, lambda *args, **kwargs: True)
    assert num_found(filled, missed, 5) < 5


# ---------------------------------------------------------------------- what is found
def kinds(world: World) -> list[FindingKind]:
    return [finding.kind for finding in verify(world).findings]


def test_findings_name_kind_chain_and_entry(filled: World) -> None:
    rows = read_rows(filled)
    chain = rows[0][0]
    write_rows(filled, [row for row in rows if row[:2] != (chain, 5)])
    findings = verify(filled).findings
    assert [(finding.kind, finding.chain, finding.seq) for finding in findings] == [
        (FindingKind.GAP, chain, 6),
        (FindingKind.BROKEN_LINK, chain, 6),
    ]
    assert "entries 5 to 5 are missing" in findings[0].message


def test_one_edit_gives_few_findings(filled: World) -> None:
    with filled.registry._store.database.write() as connection:
        where = audit_log.c.seq == 3
        connection.execute(update(audit_log).where(where).values(body=audit_log.c.body + " "))
    assert sorted(kinds(filled)) == sorted(2 * [FindingKind.EDITED, FindingKind.BROKEN_LINK])


def test_a_chain_that_is_gone_is_found(filled: World) -> None:
    write_rows(filled, [])
    assert kinds(filled) == [FindingKind.TRUNCATED, FindingKind.TRUNCATED]


def test_the_tail_cut_is_missed_without_the_heads_file(filled: World) -> None:
    """The mutant of the signed heads: they are what shows the cut."""
    rows = read_rows(filled)
    write_rows(filled, rows[:-1])
    assert kinds(filled) == [FindingKind.TRUNCATED]
    (filled.config.data_dir / FILE_NAME).unlink()
    assert kinds(filled) == []


def test_a_changed_heads_file_is_found(filled: World) -> None:
    path = filled.config.data_dir / FILE_NAME
    lines = path.read_text().splitlines()
    lines[3] = lines[3].replace('"seq":', '"seq":1')
    path.write_text("\n".join(lines) + "\n")
    assert kinds(filled) == [FindingKind.HEAD_FORGED]


def test_a_rewritten_chain_differs_from_its_head(filled: World) -> None:
    """Even who holds the key of the entries cannot change what was signed as head."""
    rows = read_rows(filled)
    chain, seq, body, _ = rows[NUM_ENTRIES - 1]
    changed = body.replace('"actor":"local"', '"actor":"other"')
    assert changed != body
    rows[NUM_ENTRIES - 1] = (chain, seq, changed, filled.registry._store.audit._mac(changed))
    write_rows(filled, rows)
    assert kinds(filled) == [FindingKind.HEAD_DIFFERS]


# ---------------------------------------------------------------------- who may look
def test_entries_are_pages_of_ones_own_tenant(filled: World) -> None:
    admin = filled.principal("acme", Role.TENANT_ADMIN)
    first = filled.registry.audit_entries(admin, "acme", limit=2)
    assert [(entry.seq, entry.action, entry.actor) for entry in first] == [
        (1, "tenant.create", "local"),
        (2, "key.create", "local"),
    ]
    assert filled.registry.audit_entries(admin, "acme", after=2, limit=1)[0].seq == 3
    assert filled.registry.verify_audit(admin, "acme").num_chains == 1
    with pytest.raises(TenantNotFound):
        filled.registry.audit_entries(admin, "globex")
    with pytest.raises(PermissionDenied):
        filled.registry.verify_audit(admin)
    with pytest.raises(PermissionDenied):
        filled.registry.audit_entries(filled.principal("acme"), "acme")


# ---------------------------------------------------------------------- heads
def test_heads_that_were_not_signed_are_signed_at_the_next_start(make_world: MakeWorld) -> None:
    world = make_world()
    world.tenant("acme")
    path = world.config.data_dir / FILE_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"chain":"x","ha')  # killed while the second was written
    with world.reopen():
        pass
    write_rows(world, read_rows(world)[:-1])
    assert kinds(world) == [FindingKind.TRUNCATED]


def test_a_damaged_chain_is_not_signed_at_start(make_world: MakeWorld) -> None:
    world = make_world()
    world.tenant("acme")
    path = world.config.data_dir / FILE_NAME
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    rows = read_rows(world)
    write_rows(world, [(c, s, body + " " if s == 2 else body, mac) for c, s, body, mac in rows])
    with world.reopen():
        pass
    assert len(path.read_bytes().splitlines()) == 1
    assert FindingKind.EDITED in kinds(world)


def test_nothing_changes_while_heads_cannot_be_written(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.tenant("acme")
    with monkeypatch.context() as patch:

        def fail(self: AuditHeads, heads: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(AuditHeads, "_write", fail)
        world.registry.tenants.create(OPERATOR, "globex")  # committed before the head failed
        with pytest.raises(AuditUnavailable, match="No space left"):
            world.registry.tenants.create(OPERATOR, "initech")
    assert [tenant.name for tenant in world.registry.tenants.list(OPERATOR)] == ["acme", "globex"]
    world.registry.tenants.create(OPERATOR, "initech")
    heads, forged = world.registry._store.audit.heads.read()
    assert (len(heads), forged) == (3, ())


def test_the_heads_file_is_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.registry.audit_heads._COMPACT_ABOVE_BYTES", 2_000)
    heads = AuditHeads(tmp_path / FILE_NAME, b"k" * 32)
    for seq in range(1, 101):
        heads.append([Head(f"chain-{seq % 3}", seq, "0" * 64)])
    assert (tmp_path / FILE_NAME).stat().st_size < 4_000
    found, forged = heads.read()
    assert ({chain: head.seq for chain, head in found.items()}, forged) == (
        {"chain-0": 99, "chain-1": 100, "chain-2": 98},
        (),
    )


def test_a_change_without_an_audit_entry_does_not_commit(world: World) -> None:
    before = read_rows(world)
    with pytest.raises(RuntimeError, match="must be recorded"), world.registry._store.change(OPERATOR):
        pass
    assert read_rows(world) == before
