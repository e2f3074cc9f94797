"""Packed adapters on disk: the same image bit for bit, or none."""

import errno
import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from loraplex.adapters import Adapter, AdapterLimits, load_adapter
from loraplex.core import AdapterDigest, ConfigError
from loraplex.engine import EngineConfig, LoadedBase, load_base, packed_files, packed_format
from loraplex.engine.host_arena import HostArena, LeasedPages
from loraplex.engine.packed_files import PackedFiles, packing_stamp
from loraplex.engine.packing import PackedAdapter, find_packing_fault, pack_adapter
from loraplex.server.stdlib_logs import logs_as_json

from ..conftest import MakeAdapter, MakeBase

ROOM = 2**24


@pytest.fixture(scope="module")
def loaded(tiny_base: MakeBase) -> LoadedBase:
    return load_base(tiny_base("llama"), EngineConfig(dtype="bfloat16", memory_bytes=2**23, num_threads=1))


@pytest.fixture
def arena(loaded: LoadedBase) -> HostArena:
    return HostArena(loaded.geometry.page_elems, torch.bfloat16, block_bytes=2**16)


@pytest.fixture
def adapter(loaded: LoadedBase, tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> Adapter:
    return load_adapter(tiny_adapter(tiny_base("llama"), rank=9), loaded.description, AdapterLimits())


@pytest.fixture
def packed(adapter: Adapter, loaded: LoadedBase, arena: HostArena) -> PackedAdapter:
    return pack_adapter(adapter, loaded.description.sites, loaded.geometry, arena.allocate)


@pytest.fixture
def files(tmp_path: Path) -> PackedFiles:
    return PackedFiles(tmp_path / "packed", ROOM, "stamp")


def file_of(files: PackedFiles, digest: AdapterDigest) -> Path:
    return files._directory / files._name(digest)


def test_adapter_comes_back_bit_for_bit(
    files: PackedFiles, packed: PackedAdapter, adapter: Adapter, arena: HostArena, loaded: LoadedBase
) -> None:
    assert files.load(adapter.digest, arena.allocate) is None
    assert files.store(adapter.digest, packed)
    back = files.load(adapter.digest, arena.allocate)
    assert back is not None
    assert torch.equal(back.image.stacked().view(torch.int16), packed.image.stacked().view(torch.int16))
    for name in ("chunk_start", "chunk_rank", "piece_page", "piece_offset", "scale"):
        mine, theirs = getattr(back, name), getattr(packed, name)
        assert np.array_equal(mine, theirs)
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
    assert find_packing_fault(back, adapter, loaded.description.sites) is None
    counts = files.counts()
    assert (counts.num_hits, counts.num_misses, counts.num_stored, counts.num_dropped) == (1, 1, 1, 0)
    assert counts.num_bytes == file_of(files, adapter.digest).stat().st_size
    assert file_of(files, adapter.digest).stat().st_mode & 0o777 == 0o600


def flip(at: float) -> Callable[[bytes], bytes]:
    def damage(data: bytes) -> bytes:
        place = min(int(at * len(data)), len(data) - 1)
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    return damage


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda data: b"",
    "cut in the header": lambda data: data[:20],
    "cut in the pages": lambda data: data[:-5000],
    "cut in the hash": lambda data: data[:-1],
    "more": lambda data: data + b"\0",
    "another format": lambda data: b"lplxpk00" + data[8:],
    "a long header": lambda data: data[:8] + b"\xff\xff\xff\x7f" + data[12:],
    "no JSON": lambda data: data[:12] + b"!" + data[13:],
    "zeros": lambda data: bytes(len(data)),
    "swapped halves": lambda data: data[:2000] + data[4000:6000] + data[2000:4000] + data[6000:],
    **{f"a bit at {at}": flip(at) for at in (0.0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999, 1.0)},
}


@pytest.mark.parametrize("shape", [[-1, -1], [-1], [-2, -3], [2**40, 2**40], [0, -1], [0, 2**63], "ab", None])
def test_shape_that_cannot_be_is_damage(
    shape: object, files: PackedFiles, packed: PackedAdapter, adapter: Adapter, arena: HostArena
) -> None:
    files.store(adapter.digest, packed)
    path, leased = file_of(files, adapter.digest), arena.num_leased
    data = path.read_bytes()
    length = int.from_bytes(data[8:12], "little")
    fields = json.loads(data[12 : 12 + length])
    fields["shapes"]["piece_page"] = shape
    header = json.dumps(fields).encode()
    path.write_bytes(data[:8] + len(header).to_bytes(4, "little") + header + data[12 + length :])
    assert files.load(adapter.digest, arena.allocate) is None
    assert (files.counts().num_dropped, arena.num_leased, path.exists()) == (1, leased, False)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file_is_dropped_told_counted_and_leaves_no_pages(
    damage: str, files: PackedFiles, packed: PackedAdapter, adapter: Adapter, arena: HostArena
) -> None:
    log = MagicMock()
    files.store(adapter.digest, packed)
    path, leased = file_of(files, adapter.digest), arena.num_leased
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with logs_as_json(log):
        assert files.load(adapter.digest, arena.allocate) is None
    message = log.warning.call_args.kwargs["message"]
    assert message.startswith(f"packed adapter {adapter.digest} was dropped: it")
    assert "%" not in message
    assert arena.num_leased == leased
    assert not path.exists()
    counts = files.counts()
    assert (counts.num_dropped, counts.num_hits, counts.num_bytes) == (1, 0, 0)
    assert files.store(adapter.digest, packed)
    assert files.load(adapter.digest, arena.allocate) is not None


def test_file_of_another_adapter_or_packing_is_never_taken(
    files: PackedFiles, packed: PackedAdapter, adapter: Adapter, arena: HostArena
) -> None:
    other = AdapterDigest("0" * 64)
    files.store(adapter.digest, packed)
    file_of(files, adapter.digest).rename(file_of(files, other))
    assert files.load(other, arena.allocate) is None
    assert files.counts().num_dropped == 1
    files.store(adapter.digest, packed)
    elsewhere = PackedFiles(files._directory, ROOM, "stamp of another base")
    assert elsewhere.load(adapter.digest, arena.allocate) is None
    file_of(files, adapter.digest).rename(file_of(elsewhere, adapter.digest))
    assert elsewhere.load(adapter.digest, arena.allocate) is None
    assert elsewhere.counts().num_dropped == 1


def test_stamp_tells_bases_types_pages_and_limits_apart(loaded: LoadedBase) -> None:
    sites, geometry = loaded.description.sites, loaded.geometry
    stamps = {
        packing_stamp(sites, geometry, torch.bfloat16, AdapterLimits()),
        packing_stamp(sites[1:], geometry, torch.bfloat16, AdapterLimits()),
        packing_stamp(sites, geometry, torch.float16, AdapterLimits()),
        packing_stamp(sites, geometry, torch.bfloat16, AdapterLimits(max_rank=8)),
        packing_stamp(sites, replace(geometry, page_tokens=32), torch.bfloat16, AdapterLimits()),
    }
    assert len(stamps) == 5
    assert packing_stamp(list(sites), geometry, torch.bfloat16, AdapterLimits()) in stamps


def test_links_and_directories_are_not_opened(
    files: PackedFiles, packed: PackedAdapter, adapter: Adapter, arena: HostArena, tmp_path: Path
) -> None:
    files.store(adapter.digest, packed)
    path = file_of(files, adapter.digest)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert files.load(adapter.digest, arena.allocate) is None
    assert not path.is_symlink()
    os.mkfifo(path)
    assert files.load(adapter.digest, arena.allocate) is None
    path.mkdir()
    assert files.load(adapter.digest, arena.allocate) is None, "and what cannot be removed harms nobody"


def test_least_recently_used_go_first_and_a_restart_remembers(
    packed: PackedAdapter, arena: HostArena, tmp_path: Path
) -> None:
    digests = [AdapterDigest(letter * 64) for letter in "abcd"]
    one = PackedFiles(tmp_path, ROOM, "stamp")
    one.store(digests[0], packed)
    size = one.counts().num_bytes
    files = PackedFiles(tmp_path, 3 * size, "stamp")
    for number, digest in enumerate(digests[:3]):
        files.store(digest, packed)
        os.utime(file_of(files, digest), (number, number))
    assert files.load(digests[0], arena.allocate) is not None
    files.store(digests[3], packed)
    assert [files.has_readable(digest) for digest in digests] == [True, False, True, True]
    assert (files.counts().num_evicted, files.counts().num_bytes) == (1, 3 * size)
    again = PackedFiles(tmp_path, 2 * size, "stamp")
    assert [again.has_readable(digest) for digest in digests] == [True, False, False, True]
    assert not PackedFiles(tmp_path, size - 1, "stamp").store(digests[0], packed)
    assert list(tmp_path.iterdir()) == []


def test_failed_write_leaves_nothing_and_is_counted(
    files: PackedFiles, packed: PackedAdapter, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert not files.store(adapter.digest, packed)
    assert list(files._directory.iterdir()) == []
    assert (files.counts().num_failures, files.counts().num_bytes) == (1, 0)


def test_crash_before_the_rename_leaves_no_adapter(
    files: PackedFiles,
    packed: PackedAdapter,
    adapter: Adapter,
    arena: HostArena,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Crash(BaseException):
        pass

    def crash(*args: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", crash)
        with pytest.raises(Crash):
            files.store(adapter.digest, packed)
    (left,) = files._directory.iterdir()
    assert files.load(adapter.digest, arena.allocate) is None
    again = PackedFiles(files._directory, ROOM, "stamp")
    assert left.exists(), "another process may be writing it"
    assert again.counts().num_bytes == left.stat().st_size
    assert again.sweep(lambda digest: digest == adapter.digest) == 1
    assert not left.exists()
    left.touch()
    monkeypatch.setattr(packed_files, "_STALE_S", -1.0)
    PackedFiles(files._directory, ROOM, "stamp")
    assert not left.exists()


def test_directory_that_cannot_be_used_is_refused_with_the_knob(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--packed-cache-size"):
        PackedFiles(tmp_path / "file" / "packed", ROOM, "stamp")


def test_sweep_removes_what_nobody_wants(files: PackedFiles, packed: PackedAdapter) -> None:
    kept, gone = AdapterDigest("a" * 64), AdapterDigest("b" * 64)
    for digest in (kept, gone):
        files.store(digest, packed)
    assert files.sweep(lambda digest: digest == kept) == 1
    assert (files.has_readable(kept), files.has_readable(gone)) == (True, False)


def test_readers_and_writers_at_once_never_see_half_a_file(
    files: PackedFiles, packed: PackedAdapter, adapter: Adapter, arena: HostArena
) -> None:
    wanted, wrong = packed.image.stacked().view(torch.int16), list[str]()

    def read() -> None:
        for _ in range(40):
            back = files.load(adapter.digest, arena.allocate)
            if back is not None:
                if not torch.equal(back.image.stacked().view(torch.int16), wanted):
                    wrong.append("other weights")
                back.image.free()

    def write() -> None:
        for _ in range(20):
            files.store(adapter.digest, packed)

    threads = [threading.Thread(target=call) for call in (read, write, read, write)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    counts = files.counts()
    assert (counts.num_dropped, counts.num_failures, counts.num_stored) == (0, 0, 40)
    assert arena.num_leased == len(packed.image)


# ---------------------------------------------------------------------- the system's own troubles
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "fstat", "preadv"])
def test_file_that_cannot_be_read_this_time_stays(
    code: int,
    call: str,
    files: PackedFiles,
    packed: PackedAdapter,
    adapter: Adapter,
    arena: HostArena,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files.store(adapter.digest, packed)
    leased = arena.num_leased

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, call, fail)
        assert files.load(adapter.digest, arena.allocate) is None
    assert os.strerror(code) in caplog.text
    counts = files.counts()
    assert (counts.num_read_failures, counts.num_misses, counts.num_dropped) == (1, 1, 0)
    assert (arena.num_leased, adapter.digest in files.sizes()) == (leased, True)
    assert not files.has_readable(adapter.digest)
    assert files.load(adapter.digest, arena.allocate) is not None, "and is there the next time"
    assert files.has_readable(adapter.digest)


# ---------------------------------------------------------------------- several pieces
@pytest.fixture(params=[1, 2, 3])
def pages_a_piece(request: pytest.FixtureRequest, packed: PackedAdapter, monkeypatch: pytest.MonkeyPatch) -> int:
    """So many pages are hashed together, by four threads."""
    count: int = request.param
    monkeypatch.setattr(packed_format, "_PIECE_BYTES", count * page_bytes(packed))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4))
    assert len(packed.image) > 2 * count
    return count


def page_bytes(packed: PackedAdapter) -> int:
    return packed.image.page_elems * packed.image.dtype.itemsize


def first_page_at(data: bytes, packed: PackedAdapter) -> int:
    """Where in a file its pages begin; the hash is behind them."""
    return len(data) - 32 - len(packed.image) * page_bytes(packed)


@pytest.mark.usefixtures("pages_a_piece")
def test_adapter_of_several_pieces_comes_back_bit_for_bit(
    files: PackedFiles, packed: PackedAdapter, adapter: Adapter, arena: HostArena
) -> None:
    assert files.store(adapter.digest, packed)
    back = files.load(adapter.digest, arena.allocate)
    assert back is not None
    assert torch.equal(back.image.stacked().view(torch.int16), packed.image.stacked().view(torch.int16))


@pytest.mark.parametrize(
    "damage", ["swapped", "middle", "last", "twice", "cut", "cut by a piece", "longer", "a page more"]
)
def test_damage_to_one_of_several_pieces_is_found(
    damage: str,
    pages_a_piece: int,
    files: PackedFiles,
    packed: PackedAdapter,
    adapter: Adapter,
    arena: HostArena,
) -> None:
    files.store(adapter.digest, packed)
    path, leased = file_of(files, adapter.digest), arena.num_leased
    data, size = path.read_bytes(), pages_a_piece * page_bytes(packed)
    at = first_page_at(data, packed)
    one, two, rest = data[at : at + size], data[at + size : at + 2 * size], data[at + 2 * size :]
    assert one != two
    changed = {
        "swapped": two + one + rest,
        "middle": one + flip(0.5)(two) + rest,
        "last": one + two + rest[:-33] + flip(0.0)(rest[-33:-32]) + rest[-32:],
        "twice": one + one + rest,
        "cut": one + two + rest[:-100],
        "cut by a piece": one + rest,
        "longer": one + two + rest + b"0" * 100,
        "a page more": one + two + one[: page_bytes(packed)] + rest,
    }
    path.write_bytes(data[:at] + changed[damage])
    assert files.load(adapter.digest, arena.allocate) is None
    assert (files.counts().num_dropped, arena.num_leased, path.exists()) == (1, leased, False)


@pytest.mark.usefixtures("pages_a_piece")
def test_file_that_is_cut_while_it_is_read_is_damage(
    files: PackedFiles, packed: PackedAdapter, adapter: Adapter, arena: HostArena
) -> None:
    files.store(adapter.digest, packed)
    path, leased = file_of(files, adapter.digest), arena.num_leased

    def cut_first(num_pages: int) -> LeasedPages:
        os.truncate(path, path.stat().st_size - page_bytes(packed))
        return arena.allocate(num_pages)

    assert files.load(adapter.digest, cut_first) is None
    assert (files.counts().num_dropped, arena.num_leased, path.exists()) == (1, leased, False)


@pytest.mark.usefixtures("pages_a_piece")
@pytest.mark.parametrize("num_started", [0, 1])
def test_adapter_is_read_without_further_threads_where_the_system_gives_none(
    num_started: int,
    files: PackedFiles,
    packed: PackedAdapter,
    adapter: Adapter,
    arena: HostArena,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files.store(adapter.digest, packed)
    start, started = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if len(started) == num_started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(threading.Thread, "start", limited)
        back = files.load(adapter.digest, arena.allocate)
    assert back is not None
    assert torch.equal(back.image.stacked().view(torch.int16), packed.image.stacked().view(torch.int16))
    assert "can't start new thread" in caplog.text
    assert not any(thread.is_alive() for thread in started)
