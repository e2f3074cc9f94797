"""Artifacts in a directory: durable, whole, hashed at each read (RELIABILITY.md, T06, T21, T23)."""

import errno
import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.core import InvalidRequest, LoraplexError
from loraplex.registry import (
    ArtifactCorrupt,
    ArtifactMissing,
    BlobKey,
    BlobRef,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
)
from loraplex.registry import blobs as blobs_module
from loraplex.registry.blobs import BlobStore, check_blob_key, hash_blob
from loraplex.registry.changes import no_step
from loraplex.registry.directory_store import DirectoryStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectoryStore]:
    store = DirectoryStore(tmp_path / "artifacts", no_step)
    yield store
    store.close()


def put(store: BlobStore, data: bytes) -> BlobRef:
    staged = store.stage(data)
    store.publish(staged)
    return staged.ref


def blob_path(tmp_path: Path, ref: BlobRef) -> Path:
    return tmp_path / "artifacts" / "blobs" / ref.key


def test_bytes_come_back_under_their_hash(store: DirectoryStore, tmp_path: Path) -> None:
    ref = put(store, b"weights")
    assert ref == hash_blob(b"weights")
    assert bytes(store.get(ref)) == b"weights"
    assert store.modified_at(ref.key) is not None
    assert [blob.key for blob in store.list()] == [ref.key]
    assert list((tmp_path / "artifacts" / "tmp").iterdir()) == []
    assert stat.S_IMODE(blob_path(tmp_path, ref).stat().st_mode) == 0o600


def test_publishing_twice_mends_a_damaged_file(store: DirectoryStore, tmp_path: Path) -> None:
    ref = put(store, b"weights")
    blob_path(tmp_path, ref).write_bytes(b"weightz")
    assert put(store, b"weights") == ref
    assert bytes(store.get(ref)) == b"weights"


def test_discarded_and_deleted_files_are_gone(store: DirectoryStore, tmp_path: Path) -> None:
    store.discard(staged := store.stage(b"x"))
    store.discard(staged)
    ref = put(store, b"y")
    store.delete(ref.key)
    store.delete(ref.key)
    assert store.modified_at(ref.key) is None
    with pytest.raises(ArtifactMissing):
        store.get(ref)


# ---------------------------------------------------------------------- T21
def tampered(rng: random.Random, data: bytes) -> bytes:
    """Bits flipped, cut, a block swapped with another, a block of zeros, bytes added."""
    kind, copy = rng.randrange(5), bytearray(data)
    if kind == 0:
        for _ in range(rng.choice((1, 1, 3))):
            position = rng.randrange(len(copy) * 8)
            copy[position // 8] ^= 1 << position % 8
    elif kind == 1:
        del copy[rng.randrange(len(copy)) :]
    elif kind == 2:
        a, b = rng.sample(range(0, len(copy), 64), 2)
        copy[a : a + 64], copy[b : b + 64] = copy[b : b + 64], copy[a : a + 64]
    elif kind == 3:
        start = rng.randrange(0, len(copy), 64)
        copy[start : start + 64] = bytes(len(copy[start : start + 64]))
    else:
        copy += b"\0"
    return bytes(copy)


def count_undetected(store: DirectoryStore, path: Path, data: bytes, ref: BlobRef, tries: int) -> int:
    rng, undetected, changed = random.Random(3), 0, 0
    for _ in range(tries):
        bad = tampered(rng, data)
        changed += bad != data
        path.write_bytes(bad)
        try:
            store.get(ref)
            undetected += bad != data
        except ArtifactCorrupt:
            assert bad != data
    assert changed > 0.9 * tries  # the floor: nearly all tries changed something
    path.write_bytes(data)
    return undetected


def test_every_change_of_a_stored_file_is_found(store: DirectoryStore, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(4_096)
    ref = put(store, data)
    assert count_undetected(store, blob_path(tmp_path, ref), data, ref, 500) == 0
    assert bytes(store.get(ref)) == data


def test_without_the_hash_changes_are_missed(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: the hash is what finds them."""
    data = random.Random(1).randbytes(4_096)
    ref = put(store, data)
    monkeypatch.setattr("loraplex.registry.directory_store.check_bytes", lambda ref, data: None)
    assert count_undetected(store, blob_path(tmp_path, ref), data, ref, 100) > 0


# ---------------------------------------------------------------------- T06
HOSTILE_KEYS = ["", ".", "..", "../secret", "/etc/passwd", "a" * 63, "a" * 65, "A" * 64, "g" * 64]
HOSTILE_KEYS += ["a" * 63 + "/", "..%2f" + "a" * 59, "a" * 63 + "\0", "\uff0e" * 64, "a" * 64 + "\n", "a\\" * 32]


@pytest.mark.parametrize("key", HOSTILE_KEYS)
def test_only_hashes_are_names(store: DirectoryStore, key: str) -> None:
    for operation in (store.modified_at, store.delete, lambda key: store.get(BlobRef(key, 1)), check_blob_key):
        with pytest.raises(InvalidRequest):
            operation(BlobKey(key))


@pytest.mark.parametrize("kind", ["link", "directory", "fifo"])
def test_what_is_no_regular_file_is_missing(store: DirectoryStore, tmp_path: Path, kind: str) -> None:
    ref = put(store, b"weights")
    path = blob_path(tmp_path, ref)
    path.unlink()
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(b"weights")
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(ArtifactMissing):
        store.get(ref)
    assert store.modified_at(ref.key) is None


# ---------------------------------------------------------------------- T23, T32: order and failures of system calls
def record_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes which of these calls happen, and on what."""
    calls: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        calls.append("fsync directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "fsync file")
        real_fsync(fd)

    def rename(*args: Any, **kwargs: Any) -> None:
        calls.append("rename")
        real_rename(*args, **kwargs)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    return calls


DURABLE = ["fsync file", "rename", "fsync directory"]


def test_a_file_is_synchronised_before_and_its_name_after_the_rename(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record_calls(monkeypatch)
    put(store, b"weights")
    assert calls == DURABLE


def test_without_synchronising_the_order_is_seen_to_be_wrong(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant of the test above."""
    monkeypatch.setattr(DirectoryStore, "_sync", lambda self, fd: None)
    calls = record_calls(monkeypatch)
    put(store, b"weights")
    assert calls != DURABLE


CALLS = ["open", "write", "fsync", "rename", "close"]


class FailingCalls:
    """Lets the k-th of all calls in CALLS fail."""

    def __init__(self, k: int, code: int) -> None:
        self.left = k
        self.code = code

    def wrap(self, name: str) -> Any:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left != 0:
                return real(*args, **kwargs)
            if name == "close":
                real(*args, **kwargs)
            raise OSError(self.code, os.strerror(self.code))

        return call


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_the_kth_failing_call_leaves_no_blob_and_no_false_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Fails the first, second, ... system call, until a publication gets through all of them."""
    wanted, num_failed, done = hash_blob(b"weights"), 0, False
    while not done:
        store = DirectoryStore(tmp_path / str(num_failed) / "artifacts", no_step)
        failing = FailingCalls(num_failed + 1, code)
        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, failing.wrap(name))
            try:
                put(store, b"weights")
                done = True
            except (StoreFull, StoreReadOnly, StoreUnavailable):
                num_failed += 1
        names = [blob.key for blob in store.list()]
        assert names in ([wanted.key], []) if not done else names == [wanted.key]
        for _ in names:  # also where the rename is not known to be durable, the file is whole
            assert bytes(store.get(wanted)) == b"weights"
        store.close()
    assert num_failed >= len(CALLS)


def test_a_failed_synchronisation_makes_the_store_read_only(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = put(store, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        with pytest.raises(StoreReadOnly, match="Input/output error"):
            store.stage(b"new")
    with pytest.raises(StoreReadOnly, match="starts again"):
        store.stage(b"new")
    assert bytes(store.get(old)) == b"old"


def test_a_reserve_is_kept_free(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.registry.directory_store.RESERVE_BYTES", 2**62)
    with pytest.raises(StoreFull, match="in reserve"):
        store.stage(b"x")


def test_staging_is_swept_by_age(store: DirectoryStore) -> None:
    old, new = store.stage(b"old"), store.stage(b"new")
    os.utime(old.path, (1_000, 1_000))
    assert store.sweep_staging(before=2_000) == 1
    assert (old.path.exists(), new.path.exists()) == (False, True)


def test_errors_of_the_store_are_ours(store: DirectoryStore) -> None:
    assert issubclass(StoreFull, LoraplexError)
    assert blobs_module.corrupt(BlobRef(BlobKey("0" * 64), 3), 4).code == "artifact_corrupt"
