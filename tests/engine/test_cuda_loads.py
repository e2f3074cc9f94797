"""Loads beside steps on a GPU: the same bits as without, pages never torn, and copies that nobody waits for."""

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.core import AdapterRef, PageId, SamplingParams
from loraplex.engine.batch import PageBuffer
from loraplex.engine.host_arena import HostArena, HostPages
from loraplex.scheduler import Scheduler
from tests import oracle
from tests.oracle import Harness

from .test_cuda_engine import SHAPE, poison

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LONG = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
RANKS = (4, 8, 33, 64, 16, 128)
Served = tuple[Path, list[Path]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    base = oracle.make_base(tmp_path_factory.mktemp("loads"), "llama", dtype=torch.bfloat16, **SHAPE)
    adapters = [
        oracle.make_adapter(tmp_path_factory.mktemp(f"loads-{i}"), base, rank=rank, seed=i, size=0.5)
        for i, rank in enumerate(RANKS)
    ]
    return base, adapters


def make_harness(served: Served, *, poisons: bool = True, **settings: Any) -> tuple[Harness, list[AdapterRef]]:
    base, adapters = served
    defaults = {"dtype": "bfloat16", "device": "cuda", "kv_pages": 600, "max_num_seqs": 8, "memory_bytes": None}
    harness = Harness(base, poison if poisons else None, **(defaults | settings))
    return harness, [harness.load(f"a{i}", path) for i, path in enumerate(adapters)]


def make_resident(harness: Harness, refs: Sequence[AdapterRef]) -> None:
    for ref in refs:
        harness.answer((1, 2), SamplingParams(max_tokens=1, temperature=0.0), ref)
    assert set(harness.engine.stats().resident_adapters) == {ref.digest for ref in refs}


def evict(harness: Harness, ref: AdapterRef) -> None:
    residency = harness.engine.scheduler.residency
    if residency.is_resident(ref.digest):
        residency.evict(ref.digest)


def one_by_one(harness: Harness, refs: Sequence[AdapterRef]) -> list[oracle.Trace]:
    return [harness.answer(oracle.random_prompt(9 + i, i), LONG, ref) for i, ref in enumerate(refs)]


def test_cold_answers_have_the_bits_of_warm_ones(served: Served) -> None:
    """Each request alone: its steps are the same, whether its adapter was there or came while it waited."""
    warm, refs = make_harness(served)
    make_resident(warm, refs)
    wanted = one_by_one(warm, refs)
    cold, refs = make_harness(served)
    got = one_by_one(cold, refs)
    assert cold.engine.stats().num_cold_starts == len(refs)
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.tokens == theirs.tokens
        assert all(torch.equal(a, b) for a, b in zip(mine.logits, theirs.logits, strict=True))


def test_loads_beside_running_steps_change_no_bit_of_them(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request runs while the others' adapters come and go; its steps are those of the same mix without loads."""
    monkeypatch.setattr(Scheduler, "check_invariants", lambda self: None)  # the pages loaded to are the test's
    harness, refs = make_harness(served)
    prompt = oracle.random_prompt(17)
    alone = harness.answer(prompt, LONG, refs[0])
    name = harness.add(prompt, LONG, refs[0])
    runner, buffer = harness.engine._runner, harness.engine._buffer
    lease = harness.engine.scheduler.pool.allocate(200, "test")
    assert lease is not None
    while harness.engine.has_work:
        for ref in refs[1:]:
            image = harness.engine.shelf.packed[ref.digest].image
            runner.load(lease.pages[: len(image)], image)
        harness.step()
    trace = harness.trace(name)
    assert trace.tokens == alone.tokens
    assert all(torch.equal(a, b) for a, b in zip(trace.logits, alone.logits, strict=True))
    torch.cuda.synchronize()
    image = harness.engine.shelf.packed[refs[-1].digest].image
    held = buffer.rows[list(lease.pages[: len(image)])].cpu()
    assert torch.equal(held.view(torch.int16), image.stacked().view(torch.int16))


def test_pages_reused_by_a_load_are_never_seen_torn(served: Served) -> None:
    """A pool for few adapters: pages of one that steps in flight still read are given to the next load at once."""
    harness, refs = make_harness(served, kv_pages=110, poisons=False)
    rng, asked = random.Random(3), []
    for turn in range(60):
        which = rng.randrange(len(refs))
        prompt = oracle.random_prompt(rng.randint(2, 20), turn)
        params = SamplingParams(max_tokens=rng.randint(1, 6), temperature=0.0, ignore_eos=True)
        asked.append((harness.add(prompt, params, refs[which]), prompt, which + 1))
        for _ in range(rng.randint(0, 2)):
            harness.step()
    harness.run()
    harness.check_all_free()
    assert harness.engine.stats().num_adapter_evictions > len(refs)
    oracle.assert_equal_references(harness, served, asked)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_churn_of_loads_and_evictions_with_poisoned_pages(served: Served, enforce_eager: bool) -> None:
    harness, refs = make_harness(served, kv_pages=160, enforce_eager=enforce_eager, max_loras=3)
    rng, asked = random.Random(5), []
    for turn in range(40):
        which = rng.randrange(len(refs))
        prompt = oracle.random_prompt(rng.randint(2, 30), turn)
        asked.append((harness.add(prompt, LONG, refs[which]), prompt, which + 1))
        if turn % 4 == 0:
            harness.engine.abort(asked.pop()[0])
        for _ in range(rng.randint(0, 3)):
            if not harness.engine.scheduler.running:
                evict(harness, rng.choice(refs))
            harness.step()
    harness.run()
    harness.check_all_free()
    assert harness.engine.arena.num_leased == sum(len(one.image) for one in harness.engine.shelf.packed.values())
    oracle.assert_equal_references(harness, served, asked)


def test_failing_copy_fails_its_own_requests_alone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    harness, refs = make_harness(served)
    load, image = harness.engine._runner.load, harness.engine.shelf.packed[refs[1].digest].image

    def broken(pages: Sequence[PageId], piece: HostPages) -> None:
        if piece[0].data_ptr() == image[0].data_ptr():
            raise RuntimeError("CUDA error")
        load(pages, piece)

    monkeypatch.setattr(harness.engine._runner, "load", broken)
    prompt = oracle.random_prompt(11)
    names = [harness.add(prompt, LONG, ref) for ref in refs[:3]]
    harness.run()
    assert set(harness.failures) == {names[1]}
    oracle.assert_equal_references(harness, served, [(names[0], prompt, 1), (names[2], prompt, 3)])
    monkeypatch.undo()
    harness.now += 1.0
    harness.answer(prompt, LONG, refs[1])
    harness.check_all_free()


def test_host_pages_are_pinned_and_stay_until_their_copy_has_ended(served: Served) -> None:
    harness, refs = make_harness(served, poisons=False)  # poisoning waits for all copies
    packed = harness.engine.shelf.packed[refs[-1].digest]
    assert all(run.is_pinned() for run in packed.image.runs)
    assert all(run.is_pinned() for run in harness.engine.arena.allocate(300).runs)
    harness.engine._on_logits = None  # reading logits waits for the step
    harness.add((1, 2, 3), LONG, refs[-1])
    harness.engine._runner._load_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(harness.engine._runner._load_stream):
        torch.cuda._sleep(2_000_000_000)  # the load's copies stand behind a second of nothing
    harness.step()  # launched, and waits on the device
    leased = harness.engine.arena.num_leased
    harness.models.unload(f"a{len(refs) - 1}")
    for name in list(harness.engine._requests):
        harness.engine.abort(name)
    harness.engine.shelf.sweep()
    assert harness.engine.arena.num_leased == leased, "its pages are still being copied"
    harness.run()
    harness.step()
    assert harness.engine.arena.num_leased == leased - len(packed.image)


def big_pages(harness: Harness, num_pages: int) -> tuple[PageBuffer, HostPages]:
    """Pages of 2 MiB, as an 8B model has them, beside the engine's pool, and as many in pinned memory."""
    buffer = PageBuffer.__new__(PageBuffer)
    buffer.rows = torch.empty(num_pages, 2**20, dtype=torch.bfloat16, device=harness.engine._decoder.device)
    image = HostArena(2**20, torch.bfloat16, pin_memory=True).allocate(num_pages)
    for number, page in enumerate(image):
        page.fill_(number % 200)
    return buffer, image


def test_host_spends_little_on_a_load(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """84 MB that lie together on both sides are one copy; scattered over the pool they are some dozens."""
    harness, _ = make_harness(served)
    runner = harness.engine._runner
    buffer, image = big_pages(harness, 64)
    monkeypatch.setattr(runner, "_buffer", buffer)
    seconds = {}
    for name, places in (("together", range(42)), ("scattered", [(7 * i) % 64 for i in range(42)])):
        pages, times = [PageId(page) for page in places], []
        for _ in range(20):
            torch.cuda.synchronize()
            started = time.perf_counter()
            runner.load(pages, image[:42])
            times.append(time.perf_counter() - started)
        seconds[name] = sorted(times)[len(times) // 2]
        torch.cuda.synchronize()
        assert torch.equal(buffer.rows[list(places), 0].cpu(), image[:42].stacked()[:, 0])
    print({name: f"{1e6 * value:.0f} us" for name, value in seconds.items()})
    assert seconds["together"] < 2e-4
    assert seconds["scattered"] < 1e-3
