"""Adapters between disk, host memory and the pool: nothing leaks, and they come back as they were."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters import AdapterLimits, load_adapter
from loraplex.core import AdapterDigest, AdapterRefused, ModelNotFound, RefusalReason
from loraplex.core.host_memory import HostMemoryFull, Restored
from loraplex.core.reloads import OFTEN
from loraplex.engine import AsyncEngine, Engine
from loraplex.engine.host_arena import HostArena
from loraplex.engine.packed_files import PackedFiles, packing_stamp

from ..conftest import MakeAdapter, MakeBase
from ..oracle import GREEDY, Harness, random_prompt


def keep_packed(harness: Harness, directory: Path) -> PackedFiles:
    engine = harness.engine
    stamp = packing_stamp(engine.base.sites, engine._geometry, engine._decoder.dtype, AdapterLimits())
    files = engine.shelf._files = PackedFiles(directory, 2**30, stamp)
    return files


def bound_host_memory(engine: Engine, max_bytes: int) -> None:
    arena = HostArena(engine._geometry.page_elems, engine._decoder.dtype, max_bytes=max_bytes, block_bytes=2**16)
    engine.arena = engine.shelf._arena = arena


def test_adapter_comes_back_from_its_packed_file_with_the_same_answers(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path
) -> None:
    base, prompt = tiny_base("llama"), random_prompt(9)
    path = tiny_adapter(base, rank=16)
    harness = Harness(base)
    keep_packed(harness, tmp_path)
    ref = harness.load("a", path)
    wanted = harness.answer(prompt, GREEDY, ref)
    harness.engine.store_adapter(ref.digest)
    harness.engine.retire_adapter(ref.digest)
    harness.step()
    assert harness.engine.shelf.packed == {}
    assert harness.engine.arena.num_leased == 0
    with pytest.raises(ModelNotFound):
        harness.add(prompt, GREEDY, ref)
    restarted = Harness(base)
    files = keep_packed(restarted, tmp_path)
    for one in (harness, restarted):
        assert one.engine.restore_adapter(ref.digest) is Restored.FILE
        assert one.answer(prompt, GREEDY, ref).tokens == wanted.tokens
    assert files.counts().num_hits == 1
    stats = restarted.engine.stats()
    assert (dict(stats.packed_files)["hit"], stats.packed_bytes) == (1, files.counts().num_bytes)
    restarted.engine.retire_adapter(ref.digest)
    assert restarted.engine.restore_adapter(ref.digest) is Restored.HERE, "it has not left"
    restarted.step()
    assert ref.digest in restarted.engine.shelf.packed
    assert files.counts().num_hits == 1


def test_host_pages_stay_while_copies_may_still_read_them(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, where a step may be planned on a load that is ready before its last bytes have gone over the link."""
    base = tiny_base("llama")
    harness = Harness(base)
    ref = harness.load("a", tiny_adapter(base))
    harness.answer(random_prompt(5), GREEDY, ref)
    shelf, arena = harness.engine.shelf, harness.engine.arena
    reading = {ref.digest}
    monkeypatch.setattr(shelf._loader, "is_reading", reading.__contains__)
    num_leased = arena.num_leased
    harness.engine.retire_adapter(ref.digest)
    for _ in range(3):
        shelf.sweep()
    assert ref.digest in shelf.packed
    assert arena.num_leased == num_leased > 0
    assert harness.engine.scheduler.residency.is_resident(ref.digest)
    reading.clear()
    shelf.sweep()
    assert (shelf.packed, arena.num_leased) == ({}, 0)


def test_what_was_never_stored_or_is_damaged_is_not_restored(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path
) -> None:
    base = tiny_base("llama")
    harness = Harness(base)
    adapter = load_adapter(tiny_adapter(base), harness.engine.base, AdapterLimits())
    assert not harness.engine.restore_adapter(adapter.digest), "there is no place for packed files"
    harness.engine.store_adapter(adapter.digest)
    keep_packed(harness, tmp_path)
    assert not harness.engine.restore_adapter(adapter.digest)
    harness.engine.store_adapter(adapter.digest)
    assert list(tmp_path.iterdir()) == [], "an adapter that is not here is not stored"
    harness.engine.add_adapter(adapter)
    harness.engine.store_adapter(adapter.digest)
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    harness.engine.retire_adapter(adapter.digest)
    harness.step()
    assert not harness.engine.restore_adapter(adapter.digest)
    assert harness.engine.arena.num_leased == 0


def test_packed_file_that_cannot_be_read_is_written_anew(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_base("llama")
    harness = Harness(base)
    files = keep_packed(harness, tmp_path)
    adapter = load_adapter(tiny_adapter(base), harness.engine.base, AdapterLimits())
    harness.engine.add_adapter(adapter)
    harness.engine.store_adapter(adapter.digest)
    harness.engine.store_adapter(adapter.digest)
    assert files.counts().num_stored == 1
    (file,) = tmp_path.iterdir()
    broken, real = file.stat().st_ino, os.open

    def fail(path: Path | str, *args: Any, **kwargs: Any) -> int:
        if path == file and file.stat().st_ino == broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", fail)
    harness.engine.retire_adapter(adapter.digest)
    harness.step()
    assert not harness.engine.restore_adapter(adapter.digest)
    harness.engine.add_adapter(adapter)
    harness.engine.store_adapter(adapter.digest)
    harness.engine.retire_adapter(adapter.digest)
    harness.step()
    assert harness.engine.restore_adapter(adapter.digest)
    counts = files.counts()
    assert (counts.num_read_failures, counts.num_stored, counts.num_bytes) == (1, 2, file.stat().st_size)


def test_restored_adapter_must_fit_the_pool_too(tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path) -> None:
    base = tiny_base("llama")
    harness = Harness(base)
    keep_packed(harness, tmp_path)
    ref = harness.load("a", tiny_adapter(base, rank=16))
    harness.engine.store_adapter(ref.digest)
    small = Harness(base, kv_pages=harness.engine.shelf.packed[ref.digest].num_pages)
    keep_packed(small, tmp_path)
    with pytest.raises(AdapterRefused) as caught:
        small.engine.restore_adapter(ref.digest)
    assert caught.value.reason is RefusalReason.TOO_LARGE


def test_full_host_memory_refuses_and_room_comes_back_with_what_is_retired(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    base = tiny_base("llama")
    harness = Harness(base)
    paths = [tiny_adapter(base, rank=16, seed=seed) for seed in range(3)]
    adapters = [load_adapter(path, harness.engine.base, AdapterLimits()) for path in paths]
    bound_host_memory(harness.engine, 2**18)
    arena = harness.engine.arena
    harness.engine.add_adapter(adapters[0])
    needed = arena.num_leased
    bound_host_memory(harness.engine, 1 << (2 * needed * arena.page_bytes - 1).bit_length())
    harness.engine.shelf.packed.clear()
    arena, count = harness.engine.arena, 0
    with pytest.raises(HostMemoryFull):
        for adapter in adapters * 10:
            harness.engine.retire_adapter(adapter.digest)
            harness.engine.add_adapter(adapter)
            count += 1
            arena.allocate(needed)
    assert count >= 1
    leased = arena.num_leased
    held = harness.engine.hold_adapter(adapters[2])
    assert arena.num_leased == leased, "a comparison finds room beside the bound"
    assert held.num_pages == needed
    harness.engine.release_adapter(adapters[2].digest)
    for adapter in adapters:
        harness.engine.retire_adapter(adapter.digest)
    harness.step()
    assert harness.engine.shelf.packed == {}
    assert arena.num_leased == leased - count * needed


def test_eviction_for_room_in_host_memory_has_a_reason_of_its_own(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    base = tiny_base("llama")
    harness = Harness(base)
    client = AsyncEngine(harness.engine)
    refs = [harness.load(name, tiny_adapter(base, seed=seed)) for seed, name in enumerate("ab")]
    for ref, for_room in zip(refs, (True, False), strict=True):
        num_bytes = harness.engine.shelf.packed[ref.digest].num_pages * harness.engine.arena.page_bytes
        assert (client.host_bytes(ref.digest), client.is_in_pool(ref.digest)) == (num_bytes, False)
        harness.answer(random_prompt(9), GREEDY, ref)
        assert client.is_in_pool(ref.digest)
        client.retire_adapter(ref.digest, for_room=for_room)
        harness.step()
        assert (client.host_bytes(ref.digest), client.is_in_pool(ref.digest)) == (0, False)
    assert dict(harness.engine.stats().evictions_by_reason) == {
        "load": 0,
        "start": 0,
        "growth": 0,
        "retired": 1,
        "host": 1,
    }


def test_adapter_that_is_refused_while_it_is_packed_leaves_no_pages(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_base("llama")
    harness = Harness(base)
    adapter = load_adapter(tiny_adapter(base), harness.engine.base, AdapterLimits())

    def refuse(*args: object) -> None:
        raise AdapterRefused(RefusalReason.NONFINITE, "it has NaN")

    monkeypatch.setattr("loraplex.engine.packing._cast", refuse)
    with pytest.raises(AdapterRefused):
        harness.engine.add_adapter(adapter)
    assert harness.engine.arena.num_leased == 0


def test_thrash_is_a_line_in_the_log_with_the_pages_that_would_cure_it(
    tiny_base: MakeBase, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness(tiny_base("llama"))
    reloads, digest = harness.engine.scheduler.residency.reloads, AdapterDigest("a")
    for _ in range(2):
        for _ in range(OFTEN):
            reloads.evicted(digest, 5)
            reloads.loaded(digest, 1.0)
        harness.engine.shelf.advance_loads(1.0, lambda seq, retry_after_s: None, 0.0)
    (record,) = caplog.records
    assert f"last minute {OFTEN} adapters" in record.getMessage()
    assert "5 pages more" in record.getMessage()
    assert "--kv-pages or --memory" in record.getMessage()
