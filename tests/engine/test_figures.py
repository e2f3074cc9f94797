"""What an engine tells of itself: where a request's time went, what steps were like, where adapters are."""

import threading
import time
from pathlib import Path

import pytest

from loraplex.core import (
    AdapterDigest,
    AdapterRef,
    Histogram,
    LoadedAdapter,
    Request,
    RequestId,
    SamplingParams,
    Timings,
)
from loraplex.core.figures import DISTINCT_BUCKETS, NUM_POPULAR_ADAPTERS, HistogramCounter, distinct_bucket
from loraplex.engine.packed_files import PackedFiles

from ..conftest import MakeAdapter, MakeBase
from ..oracle import Harness, random_prompt

LONG = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0)


def engine_with(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter, num: int, **settings: int
) -> tuple[Harness, list[AdapterRef]]:
    base = tiny_base("llama")
    harness = Harness(base, **settings)
    return harness, [harness.load(f"a{i}", tiny_adapter(base, rank=4, seed=i)) for i in range(num)]


def num_counted(histogram: Histogram | None) -> int:
    assert histogram is not None
    return sum(histogram.counts)


# ---------------------------------------------------------------------- requests
def test_timings_are_of_the_queue_the_prompt_and_the_rest(tiny_base: MakeBase) -> None:
    harness = Harness(tiny_base("llama"), max_num_seqs=1, max_num_batched_tokens=8)
    first, second = (harness.add(random_prompt(20, seed=i), LONG) for i in range(2))
    started = time.perf_counter()
    harness.run()
    took_s = time.perf_counter() - started
    for name in (first, second):
        outputs = harness.outputs[name]
        assert outputs[0].timings.decode_s == 0.0
        assert outputs[0].timings.prefill_s > 0
        assert len({(output.timings.queue_s, output.timings.prefill_s) for output in outputs}) == 1
        decode = [output.timings.decode_s for output in outputs]
        assert decode == sorted(decode)
        assert 0 < decode[-1] < took_s
    waits = [harness.outputs[name][-1].timings.queue_s for name in (first, second)]
    assert waits[0] == pytest.approx(0.01), "the harness adds 0.01 s before each step"
    assert waits[1] == pytest.approx(0.01 * (3 + 5 + 1)), "three steps of its prompt and five more before it"
    assert num_counted(harness.engine.stats().queue_s) == 2


def test_engines_without_clocks_tell_of_no_time() -> None:
    assert Timings() == Timings(0.0, 0.0, 0.0)


# ---------------------------------------------------------------------- pages and host memory
def test_idle_adapters_and_prefixes_are_pages_that_could_be_evicted(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    harness, (ref,) = engine_with(tiny_base, tiny_adapter, 1)
    assert harness.engine.stats().num_idle_pages == 0
    harness.engine.add_request(Request(RequestId("r"), random_prompt(40), LONG, ref, "acme"), harness.now)
    harness.step()
    running = harness.engine.stats()
    assert running.num_free_pages + running.num_idle_pages < running.num_pages
    harness.run()
    stats = harness.engine.stats()
    assert stats.num_adapter_pages > 0
    assert stats.num_cached_pages > 0
    assert stats.num_idle_pages == stats.num_adapter_pages + stats.num_cached_pages
    assert stats.num_free_pages + stats.num_idle_pages == stats.num_pages


def test_host_memory_is_told(tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    harness, refs = engine_with(tiny_base, tiny_adapter, 2)
    memory, arena = harness.engine.stats().host_memory, harness.engine.arena
    num_pages = sum(packed.num_pages for packed in harness.engine.shelf.packed.values())
    assert (memory.num_adapters, memory.leased_bytes) == (2, num_pages * arena.page_bytes)
    assert (memory.held_bytes, memory.max_bytes) == (arena.held_bytes, None)
    for ref in refs:
        harness.engine.retire_adapter(ref.digest)
    harness.step()
    after = harness.engine.stats().host_memory
    assert (after.num_adapters, after.leased_bytes, after.held_bytes) == (0, 0, memory.held_bytes)


def test_names_at_work_begin_with_those_of_most_sequences_and_the_latest(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    harness, (a, b, c) = engine_with(tiny_base, tiny_adapter, 3)
    for ref in (a, b, c, b):
        harness.add(random_prompt(5), LONG, ref)
    assert harness.engine.stats().waiting_adapters == ("a1", "a2", "a0")
    harness.step()
    assert harness.engine.stats().running_adapters == ("a1", "a2", "a0")


# ---------------------------------------------------------------------- steps
@pytest.mark.parametrize(
    ("num", "bucket"),
    [(0, "0"), (1, "1"), (2, "2-8"), (8, "2-8"), (9, "9-32"), (32, "9-32"), (64, "33-64"), (65, "65+")],
)
def test_buckets_of_distinct_adapters(num: int, bucket: str) -> None:
    assert DISTINCT_BUCKETS[distinct_bucket(num)] == bucket


def test_histogram_counts_up_to_and_with_its_bounds() -> None:
    counter = HistogramCounter((1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 1), (9.0, 3)):
        counter.add(value, times)
    assert counter.read() == Histogram((1.0, 2.0), (3, 1, 3), 31.0)


def test_steps_and_tokens_are_counted_by_distinct_adapters(tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    harness, refs = engine_with(tiny_base, tiny_adapter, 3)
    harness.answer(random_prompt(5), LONG)
    for ref in refs:
        harness.add(random_prompt(5), LONG, ref)
    harness.run()
    stats = harness.engine.stats()
    steps = dict(stats.steps_by_distinct)
    assert sum(steps.values()) == stats.num_steps
    assert steps["0"] == 6
    assert steps["2-8"] > 0
    tokens = {bucket: num_counted(histogram) for bucket, histogram in stats.token_s_by_distinct}
    assert tokens["0"] == 5, "the first token of a sequence is none that follows another"
    assert sum(tokens.values()) == 4 * 5
    assert stats.step_ranks > stats.step_adapters > 0


# ---------------------------------------------------------------------- adapters
def test_residency_tells_what_is_only_on_disk(tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path) -> None:
    packed_files, other_stamp = (PackedFiles(tmp_path, 2**24, stamp) for stamp in ("stamp", "other stamp"))
    harness, refs = engine_with(tiny_base, tiny_adapter, 2)
    harness.engine.shelf._files = packed_files
    kept, gone = (ref.digest for ref in refs)
    for digest in (kept, gone):
        harness.engine.store_adapter(digest)
    other_stamp.store(AdapterDigest("f" * 64), harness.engine.shelf.packed[kept])
    harness.engine.retire_adapter(gone)
    harness.engine.shelf.sweep()
    found = {one.digest: one for one in harness.engine.residency()}
    assert list(found) == sorted([kept, gone])
    assert (found[kept].in_host_memory, found[gone].in_host_memory) == (True, False)
    assert (found[gone].state, found[gone].num_pages, found[gone].num_bytes) == ("absent", 0, 0)
    sizes = {path.name[:64]: path.stat().st_size for path in tmp_path.iterdir()}
    assert {digest: one.packed_bytes for digest, one in found.items()} == {d: sizes[d] for d in (kept, gone)}
    packed_files.remove(gone)
    assert [one.digest for one in harness.engine.residency()] == [kept]


def test_residency_tells_where_adapters_are(tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    harness, refs = engine_with(tiny_base, tiny_adapter, 2)
    used, unused = refs
    harness.add(random_prompt(5), LONG, used)
    harness.step()
    harness.step()
    found = {item.digest: item for item in harness.engine.residency()}
    assert list(found) == sorted([used.digest, unused.digest])
    running, absent = found[used.digest], found[unused.digest]
    assert (running.state, running.in_host_memory, running.num_running) == ("resident", True, 1)
    assert running.idle_s == pytest.approx(0.0, abs=0.02)
    assert running.popularity == pytest.approx(1.0, rel=0.01)
    assert (absent.state, absent.num_running, absent.idle_s) == ("absent", 0, None)
    page_bytes = harness.engine.scheduler.geometry.page_bytes
    assert all(item.num_bytes == item.num_pages * page_bytes > 0 for item in found.values())
    (most,) = harness.engine.stats().popular_adapters
    assert (most.digest, most.num_running) == (used.digest, 1)
    assert harness.engine.stats().loaded_adapters == (
        LoadedAdapter(used.digest, in_pool=True),
        LoadedAdapter(unused.digest, in_pool=False),
    )
    harness.engine.pin_adapter(unused.digest)
    harness.run()
    while not harness.engine.scheduler.residency.is_resident(unused.digest):
        harness.step()
    assert harness.engine.stats().loaded_adapters == (
        LoadedAdapter(used.digest, in_pool=True),
        LoadedAdapter(unused.digest, in_pool=True, is_pinned=True),
    )
    assert len(harness.engine.stats().popular_adapters) == 1, "one that was never used is not popular"
    harness.run()


def test_figures_are_read_while_the_engine_steps(tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    """From another thread, with adapters that come and go: nothing breaks, and counts are plausible."""
    harness, refs = engine_with(tiny_base, tiny_adapter, 6, kv_pages=24, max_num_seqs=4)
    over, errors, seen = threading.Event(), [], 0

    def read() -> None:
        nonlocal seen
        while not over.is_set():
            try:
                stats = harness.engine.stats()
                assert len(harness.engine.residency()) >= len(refs)
                assert len(stats.popular_adapters) <= NUM_POPULAR_ADAPTERS
                seen += 1
            except Exception as error:
                errors.append(error)
            time.sleep(0.0005)  # without which it may keep the interpreter from the steps for most of the time

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for round_number in range(4):
            for i, ref in enumerate(refs):
                harness.add(random_prompt(5, seed=10 * round_number + i), LONG, ref)
            harness.run()
    finally:
        over.set()
        reader.join()
    assert errors == []
    assert seen > 10
