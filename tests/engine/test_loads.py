"""Loads beside steps: pieces, failures that stay with their own requests, and answers that never change."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from loraplex.core import (
    AdapterDigest,
    AdapterRef,
    Overloaded,
    OverloadReason,
    PageId,
    Request,
    RequestId,
    SamplingParams,
)
from loraplex.engine import loads
from loraplex.engine.host_arena import HostPages
from loraplex.engine.loads import LONGEST_BACKOFF_S, AdapterLoader
from loraplex.engine.runner import LoadMark, Step, StepInFlight

from ..conftest import MakeAdapter, MakeBase
from ..oracle import GREEDY, Harness, poison_free_pages, random_prompt

A, B = (AdapterDigest(name * 64) for name in "ab")
PAGE_BYTES = 2**20


class Mark:
    def __init__(self, runner: "FakeRunner") -> None:
        self._runner, self._count = runner, len(runner.copied)

    @property
    def is_held_up(self) -> bool:
        return self._runner.is_held_up

    def is_done(self) -> bool:
        return self._runner.num_arrived >= self._count


class FakeRunner:
    """Copies that arrive when the test says so."""

    overlaps = False

    def __init__(self, *, copies_aside: bool) -> None:
        self.copies_aside = copies_aside
        self.copied: list[tuple[PageId, float]] = []
        self.num_arrived = 0
        self.is_held_up = False
        self.followed: list[LoadMark] = []
        self.error: Exception | None = None

    def load(self, pages: Sequence[PageId], image: HostPages) -> None:
        if self.error is not None:
            raise self.error
        self.copied += zip(pages, (float(page[0]) for page in image), strict=True)

    def load_mark(self) -> Mark:
        if not self.copies_aside:
            self.num_arrived = len(self.copied)
        return Mark(self)

    def copy_s(self, num_bytes: int) -> float:
        return 1e-3 * num_bytes / PAGE_BYTES if self.copies_aside else 0.0

    def follow(self, mark: LoadMark) -> None:
        self.followed.append(mark)

    def launch(self, step: Step) -> StepInFlight:
        raise AssertionError("no step is run here")


def pages_and_image(first: int, count: int) -> tuple[list[PageId], HostPages]:
    return [PageId(first + i) for i in range(count)], HostPages((torch.arange(float(count))[:, None],))


def make_loader(*, copies_aside: bool) -> tuple[FakeRunner, AdapterLoader]:
    runner, clock = FakeRunner(copies_aside=copies_aside), iter(range(1000))
    return runner, AdapterLoader(runner, PAGE_BYTES, lambda: float(next(clock)))


# ---------------------------------------------------------------------- the loader
@pytest.mark.parametrize(("is_idle", "a_step"), [(False, 16), (True, 64)])
def test_cpu_copies_a_bounded_piece_between_two_steps(is_idle: bool, a_step: int) -> None:
    runner, loader = make_loader(copies_aside=False)
    loader.begin(A, *pages_and_image(100, 70))
    loader.begin(B, *pages_and_image(200, 30))
    ended, sizes = [], []
    while loader:
        before = len(runner.copied)
        ended += [load.digest for load in loader.advance(is_idle=is_idle)]
        sizes.append(len(runner.copied) - before)
    assert max(sizes) == a_step
    assert sum(sizes) == 100
    assert ended == [A, B]
    assert runner.copied == [(100 + i, float(i)) for i in range(70)] + [(200 + i, float(i)) for i in range(30)]


def test_device_copies_by_itself_and_is_polled_never_waited_for() -> None:
    runner, loader = make_loader(copies_aside=True)
    loader.begin(A, *pages_and_image(0, 500))
    loader.begin(B, *pages_and_image(500, 2))
    assert loader.advance(is_idle=False) == []
    assert len(runner.copied) == 502, "all is on its way at once"
    runner.num_arrived = 499
    assert loader.advance(is_idle=False) == []
    runner.num_arrived = 500
    assert [load.digest for load in loader.advance(is_idle=False)] == [A]
    runner.num_arrived = 502
    (ended,) = loader.advance(is_idle=False)
    assert (ended.digest, ended.error) == (B, None)
    assert ended.seconds > 0
    assert not loader


def test_load_that_arrives_before_the_next_step_begins_is_ready_and_the_step_follows_it() -> None:
    runner, loader = make_loader(copies_aside=True)
    loader.begin(A, *pages_and_image(0, 3))
    loader.begin(B, *pages_and_image(10, 3))
    assert loader.advance(is_idle=False, lead_s=2e-3) == []
    assert [load.digest for load in loader.advance(is_idle=False, lead_s=4e-3)] == [A], "B arrives after both"
    assert len(runner.followed) == 1
    assert loader.is_reading(A)
    runner.num_arrived = 3
    assert not loader.is_reading(A)
    assert [load.digest for load in loader.advance(is_idle=False, lead_s=4e-3)] == [B]
    assert loader.is_reading(B)
    assert not loader


def test_while_nothing_runs_a_step_waits_for_the_first_load_only() -> None:
    runner, loader = make_loader(copies_aside=True)
    loader.begin(A, *pages_and_image(0, 300))
    loader.begin(B, *pages_and_image(300, 1))
    assert [load.digest for load in loader.advance(is_idle=True)] == [A]
    assert loader.advance(is_idle=False) == []
    runner.num_arrived = 301
    assert [load.digest for load in loader.advance(is_idle=False)] == [B]


def test_copies_that_wait_for_steps_are_followed_by_none_that_is_next() -> None:
    """Nor are those called after them, as copies keep their order."""
    runner, loader = make_loader(copies_aside=True)
    runner.is_held_up = True
    loader.begin(A, *pages_and_image(0, 1))
    assert loader.advance(is_idle=False, lead_s=1.0) == []
    runner.is_held_up = False
    loader.begin(B, *pages_and_image(1, 1))
    assert [load.digest for load in loader.advance(is_idle=False, lead_s=1.0)] == [A, B]
    runner, loader = make_loader(copies_aside=True)
    loader.begin(A, *pages_and_image(0, 1))
    loader.begin(B, *pages_and_image(1, 1))
    runner.is_held_up = True
    assert loader.advance(is_idle=True, lead_s=1.0) == []


def test_failed_copy_is_not_followed() -> None:
    runner, loader = make_loader(copies_aside=True)
    loader.begin(A, *pages_and_image(0, 4))
    loader.advance(is_idle=False)
    runner.error = MemoryError("no room")
    loader.begin(B, *pages_and_image(4, 4))
    assert [load.digest for load in loader.advance(is_idle=False, lead_s=1.0)] == [A]
    runner.num_arrived = 4
    assert [load.error for load in loader.advance(is_idle=False, lead_s=1.0)] == [runner.error]


def test_failed_copy_ends_when_the_pieces_before_it_have_arrived() -> None:
    """Its pages go to others then, so nothing may still be written to them."""
    runner, loader = make_loader(copies_aside=True)
    loader.begin(A, *pages_and_image(0, 4))
    loader.advance(is_idle=False)
    runner.error = MemoryError("no room")
    loader.begin(B, *pages_and_image(4, 4))
    assert loader.advance(is_idle=False) == []
    runner.num_arrived = 4
    ended = loader.advance(is_idle=False)
    assert [(load.digest, load.error) for load in ended] == [(A, None), (B, runner.error)]


def test_backoff_doubles_up_to_a_limit_and_ends_with_a_load() -> None:
    _, loader = make_loader(copies_aside=False)
    waits = [loader.back_off(A, 100.0) - 100.0 for _ in range(40)]
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert max(waits) == waits[-1] == LONGEST_BACKOFF_S
    assert loader.retry_in_s(A, 110.0) == LONGEST_BACKOFF_S - 10.0
    assert loader.retry_in_s(B, 110.0) == loader.retry_in_s(A, 1000.0) == 0.0
    loader.forget(A)
    assert loader.retry_in_s(A, 110.0) == 0.0
    assert loader.back_off(A, 0.0) == 0.5


# ---------------------------------------------------------------------- the engine
def test_running_requests_go_on_while_an_adapter_comes_in_pieces(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_base("llama")
    harness = Harness(base, poison_free_pages)
    ref = harness.load("a", tiny_adapter(base, rank=16))
    prompt = random_prompt(9)
    wanted = harness.answer(prompt, GREEDY, ref)
    harness = Harness(base, poison_free_pages)
    ref = harness.load("a", tiny_adapter(base, rank=16))
    num_pages = harness.engine.shelf.packed[ref.digest].num_pages
    monkeypatch.setattr(loads, "PIECE_BYTES", 1)  # a page a step
    running = harness.add(random_prompt(5), SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
    harness.step()
    cold = harness.add(prompt, GREEDY, ref)
    tokens_before, num_steps = len(harness.trace(running).tokens), 0
    while cold not in harness.outputs:
        assert harness.engine.stats().num_loading_adapters == (num_steps > 0)
        harness.step()
        num_steps += 1
    assert num_steps == num_pages > 3
    assert len(harness.trace(running).tokens) == tokens_before + num_steps, "it had a token in every step"
    served = harness.outputs[cold][0].served_by
    assert (served.cold, served.adapter) == (True, ref)
    assert served.load_s > 0
    harness.run()
    trace = harness.trace(cold)
    assert trace.tokens == wanted.tokens
    stats = harness.engine.stats()
    assert (stats.num_cold_starts, stats.num_warm_starts, stats.num_adapter_loads) == (1, 0, 1)


def failing(harness: Harness, ref: AdapterRef, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Make loads of one adapter fail while the list has an entry."""
    load, image, switch = harness.engine._runner.load, harness.engine.shelf.packed[ref.digest].image, [True]

    def broken(pages: Sequence[PageId], piece: HostPages) -> None:
        if switch and piece[0].data_ptr() == image[0].data_ptr():
            raise RuntimeError("the artifact cannot be read")
        load(pages, piece)

    monkeypatch.setattr(harness.engine._runner, "load", broken)
    return switch


def test_failed_load_fails_its_own_requests_and_no_others(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_base("llama")
    harness = Harness(base, poison_free_pages)
    bad, good = (harness.load(name, tiny_adapter(base, seed=i)) for i, name in enumerate(("bad", "good")))
    switch = failing(harness, bad, monkeypatch)
    doomed = [harness.add(random_prompt(4, seed=i), GREEDY, bad) for i in range(3)]
    fine = [harness.add(random_prompt(4), GREEDY, ref) for ref in (good, None)]
    harness.run()
    assert set(harness.failures) == set(doomed)
    for request_id in doomed:
        error = harness.failures[request_id].error
        assert isinstance(error, Overloaded)
        assert (error.reason_code, error.retry_after_s) == ("ADAPTER_LOAD", 0.5)
        assert "'bad'" in error.message
    assert all(len(harness.trace(request_id).tokens) == GREEDY.max_tokens for request_id in fine)
    harness.check_all_free()
    assert not harness.engine._owner
    stats = harness.engine.stats()
    assert (stats.num_load_failures, len(stats.failed_adapters), stats.num_adapter_loads) == (1, 1, 1)
    with pytest.raises(Overloaded) as caught:
        harness.add((1,), GREEDY, bad)
    assert caught.value.reason is OverloadReason.ADAPTER_LOAD
    (row,) = [one for one in harness.engine.residency() if one.digest == bad.digest]
    assert (row.state, row.error_code) == ("failed", None)
    assert row.retry_after_s is not None
    assert 0.0 < row.retry_after_s <= 0.5
    harness.now += 0.6
    switch.clear()
    assert len(harness.answer((1, 2), GREEDY, bad).tokens) == GREEDY.max_tokens
    assert harness.engine.stats().failed_adapters == ()


def test_adapter_retired_while_it_is_loaded_goes_when_its_pages_are_written(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_base("llama")
    harness = Harness(base)
    ref = harness.load("a", tiny_adapter(base, rank=16))
    monkeypatch.setattr(loads, "PIECE_BYTES", 1)
    harness.add((1, 2, 3), SamplingParams(max_tokens=30, ignore_eos=True))
    harness.step()
    request_id = harness.add((1,), GREEDY, ref)
    harness.step()
    harness.engine.abort(RequestId(request_id))
    harness.models.unload("a")
    harness.step()
    assert ref.digest in harness.engine.shelf.packed, "its image is still being copied"
    harness.run()
    assert harness.engine.shelf.packed == {}
    assert harness.engine.scheduler.residency.num_pages == 0


def test_load_of_a_request_that_left_ends_before_the_engine_rests(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_base("llama")
    harness = Harness(base)
    ref = harness.load("a", tiny_adapter(base, rank=16))
    monkeypatch.setattr(loads, "IDLE_PIECE_BYTES", 1)
    request_id = harness.add((1,), GREEDY, ref)
    harness.step()
    harness.engine.abort(RequestId(request_id))
    assert harness.engine.has_work
    harness.run()
    assert harness.engine.stats().resident_adapters == (ref.digest,)
    warm = harness.add((1,), GREEDY, ref)
    harness.run()
    assert not harness.outputs[warm][0].served_by.cold


# ---------------------------------------------------------------------- deadlines and the queue
def test_request_past_its_deadline_fails_wherever_it_is(tiny_base: MakeBase) -> None:
    harness = Harness(tiny_base("llama"), max_num_seqs=1)
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    for number in range(2):
        request = Request(RequestId(f"late{number}"), (1, 2), long, None, deadline_s=0.05)
        harness.engine.add_request(request, harness.now)
    fine = harness.add((1, 2))
    harness.run()
    assert set(harness.failures) == {"late0", "late1"}
    for failed in harness.failures.values():
        assert isinstance(failed.error, Overloaded)
        assert failed.error.reason is OverloadReason.DEADLINE
    assert "late0" in harness.outputs, "it ran until then"
    assert len(harness.trace(fine).tokens) == GREEDY.max_tokens
    harness.check_all_free()


def test_queue_is_bounded_in_prompt_tokens(tiny_base: MakeBase) -> None:
    harness = Harness(tiny_base("llama"), max_waiting_tokens=20)
    harness.add(random_prompt(15), replace(GREEDY, n=1))
    with pytest.raises(Overloaded) as caught:
        harness.add(random_prompt(6))
    assert caught.value.reason is OverloadReason.QUEUE_TOKENS
    harness.add(random_prompt(5))
    harness.run()
    harness.check_all_free()


def test_tenants_are_served_by_their_weights(tiny_base: MakeBase) -> None:
    harness = Harness(tiny_base("llama"), max_num_seqs=2)
    harness.engine.set_tenant_weight("heavy", 3.0)
    for number in range(60):
        for tenant in ("heavy", "light"):
            request = Request(RequestId(f"{tenant}{number}"), (number, 2, 3), GREEDY, None, tenant)
            harness.engine.add_request(request, harness.now)
    while sum(outputs[-1].finished for outputs in harness.outputs.values()) < 40:
        harness.step()
    heavy = sum(request_id.startswith("heavy") for request_id in harness.outputs)
    assert 2.5 < heavy / (len(harness.outputs) - heavy) < 3.5
