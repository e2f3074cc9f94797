"""Random arrivals, cancellations and steps on tiny pools (T19): pages, budgets, order, and answers as if run alone."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loraplex.core import AdapterDigest, ContextTooLong, FinishReason, Request
from loraplex.scheduler import Sequence, SequenceStatus

from ..idle import num_idle_pages
from .helpers import VOCAB_SIZE, A, B, C, D, Driver, make_request, make_scheduler, run_alone

ADAPTER_PAGES = {A: 1, B: 2, C: 3, D: 5}


@dataclass(slots=True)
class Submitted:
    """A sequence and the request it came from."""

    request: Request
    seq: Sequence
    ended_by: FinishReason | None = None  # from outside


class World:
    """A scheduler, its driver and everything that was submitted."""

    def __init__(self, num_pages: int, page_tokens: int, **config: float) -> None:
        self.scheduler = make_scheduler(num_pages, page_tokens, **config)
        self.driver = Driver(self.scheduler)
        self.submitted: list[Submitted] = []

    @property
    def alive(self) -> list[Submitted]:
        return [entry for entry in self.submitted if entry.seq.status is not SequenceStatus.FINISHED]

    def expected_max_len(self, request: Request) -> int | None:
        """Length the request may reach, or None if it can never run; worked out apart from the scheduler."""
        pages = ADAPTER_PAGES[request.adapter.digest] if request.adapter else 0
        capacity = (self.scheduler.geometry.num_pages - pages) * self.scheduler.geometry.page_tokens
        prompt_len, limit = len(request.prompt_token_ids), self.scheduler.config.max_model_len
        wanted = limit if request.params.max_tokens is None else prompt_len + request.params.max_tokens
        max_len = min(wanted, limit)
        if request.params.max_tokens is None:
            max_len = min(max_len, capacity)
        return max_len if prompt_len < limit and prompt_len < max_len <= capacity else None

    def submit(self, request: Request) -> None:
        max_len = self.expected_max_len(request)
        pages = ADAPTER_PAGES[request.adapter.digest] if request.adapter else 0
        if max_len is None:
            before = len(self.scheduler.sequences)
            with pytest.raises(ContextTooLong):
                self.driver.add(request, pages)
            assert len(self.scheduler.sequences) == before
            return
        seqs = self.driver.add(request, pages)
        assert len(seqs) == request.params.n
        assert all(seq.max_len == max_len for seq in seqs)
        self.submitted += [Submitted(request, seq) for seq in seqs]

    def end(self, entry: Submitted, reason: FinishReason) -> None:
        self.scheduler.finish(entry.seq.seq_id, reason)
        self.scheduler.check_invariants()
        entry.ended_by = reason

    def check_answers(self) -> None:
        """Whatever has ended is what it would have been alone; whatever runs is a part of that."""
        for entry in self.submitted:
            tokens, reason = run_alone(entry.request, entry.seq.max_len)
            if entry.seq.finish_reason is None or entry.ended_by is not None:
                assert entry.seq.token_ids == tokens[: entry.seq.num_tokens]
                assert entry.seq.finish_reason == entry.ended_by
            else:
                assert (entry.seq.token_ids, entry.seq.finish_reason) == (tokens, reason)
                assert self.driver.finished[entry.seq.seq_id].finish_reason == reason

    def finish(self) -> None:
        """Every request ends, and only idle adapters stay in the pool."""
        self.driver.drain()
        self.check_answers()
        scheduler = self.scheduler
        assert not self.alive
        assert scheduler.pool.num_free + num_idle_pages(scheduler.residency) == scheduler.pool.num_pages
        assert scheduler.num_preemptions == sum(entry.seq.num_preemptions for entry in self.submitted)
        assert scheduler.num_preemptions == sum(plan.num_preempted for plan in self.driver.plans)


def valid_request(min_tokens: int, max_tokens: int | None, **fields: Any) -> Request:
    return make_request(min_tokens=min(min_tokens, max_tokens or min_tokens), max_tokens=max_tokens, **fields)


requests = st.builds(
    valid_request,
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=14),
    adapter=st.sampled_from([None, A, B, C, D]),
    max_tokens=st.none() | st.integers(1, 12),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=1),
    min_tokens=st.sampled_from([0, 0, 1, 3]),
    n=st.sampled_from([1, 1, 1, 2]),
    priority=st.sampled_from([0, 0, 0, 1, 2]),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Steps are split in plan and commit, so that things happen while a step runs."""

    @initialize(
        num_pages=st.integers(4, 14),
        page_tokens=st.integers(1, 4),
        max_model_len=st.integers(6, 24),
        max_num_seqs=st.integers(1, 5),
        spare_tokens=st.integers(0, 8),
        max_loras=st.integers(1, 3),
        patience_s=st.sampled_from([0.0, 0.5, 3.0]),
        aging_s=st.sampled_from([0.0, 2.0, 10.0]),
    )
    def start(
        self,
        num_pages: int,
        page_tokens: int,
        max_model_len: int,
        max_num_seqs: int,
        spare_tokens: int,
        max_loras: int,
        patience_s: float,
        aging_s: float,
    ) -> None:
        self.world = World(
            num_pages,
            page_tokens,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_num_seqs + spare_tokens,
            max_loras=max_loras,
            adapter_patience_s=patience_s,
            aging_s=aging_s,
        )

    @rule(request=requests, seconds=st.sampled_from([0.0, 0.3]))
    def add(self, request: Request, seconds: float) -> None:
        self.world.driver.now += seconds
        self.world.submit(request)

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    def end(self, data: st.DataObject, reason: FinishReason) -> None:
        self.world.end(data.draw(st.sampled_from(self.world.alive)), reason)

    @rule(count=st.integers(1, 4), seconds=st.sampled_from([0.1, 1.0]))
    def step(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.world.driver.step(seconds)

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data(), request=requests)
    def step_with_events_while_it_runs(self, data: st.DataObject, request: Request) -> None:
        plan = self.world.driver.plan()
        assert plan is not None
        self.world.end(data.draw(st.sampled_from(self.world.alive)), FinishReason.ABORT)
        self.world.submit(request)
        self.world.driver.commit(plan)

    @invariant()
    def answers_are_right(self) -> None:
        if hasattr(self, "world"):
            self.world.check_answers()

    def teardown(self) -> None:
        if hasattr(self, "world") and not self.world.driver.has_failed:
            self.world.finish()


class LongSchedulerMachine(SchedulerMachine):
    """The same, for longer."""


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)

TestSchedulerLong = pytest.mark.slow(LongSchedulerMachine.TestCase)
TestSchedulerLong.settings = settings(max_examples=600, stateful_step_count=60, deadline=None)


def random_request(rng: random.Random) -> Request:
    adapter: AdapterDigest | None = rng.choice([None, A, B, C, D])
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 14))]
    stops = [rng.randrange(VOCAB_SIZE)] if rng.random() < 0.3 else []
    length, n, priority = rng.randint(1, 16), rng.randint(1, 2), rng.choice((0, 0, 1))
    return make_request(prompt, adapter, max_tokens=length, stop_token_ids=stops, n=n, priority=priority)


def walk(seed: int, num_steps: int) -> World:
    """A long random run under constant pressure: about as much arrives as can be served."""
    rng = random.Random(seed)
    world = World(rng.randint(9, 20), 4, max_num_seqs=6, max_step_tokens=10, max_loras=2, adapter_patience_s=2.0)
    for _ in range(num_steps):
        if len(world.alive) < 12 and rng.random() < 0.5:
            world.submit(random_request(rng))
        if world.alive and rng.random() < 0.05:
            world.end(rng.choice(world.alive), FinishReason.ABORT)
        world.driver.step(rng.choice([0.0, 0.1, 1.0]))
        world.submitted, ended = world.alive, [e for e in world.submitted if e.seq.finish_reason is not None]
        _check_ended(world, ended)
    return world


def _check_ended(world: World, ended: list[Submitted]) -> None:
    for entry in ended:
        tokens, reason = run_alone(entry.request, entry.seq.max_len)
        if entry.ended_by is None:
            assert (entry.seq.token_ids, entry.seq.finish_reason) == (tokens, reason)
        else:
            assert entry.seq.token_ids == tokens[: entry.seq.num_tokens]


@pytest.mark.parametrize("seed", range(4))
def test_walk_under_pressure_meets_every_event(seed: int) -> None:
    world = walk(seed, num_steps=400)
    plans, scheduler = world.driver.plans, world.scheduler
    assert scheduler.num_preemptions > 0
    assert scheduler.residency.num_evictions > 0
    assert any(not chunk.samples for plan in plans for chunk in plan.chunks), "no prompt was cut in chunks"
    world.driver.drain()
    assert not scheduler.sequences


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 104))
def test_long_walk_under_pressure(seed: int) -> None:
    world = walk(seed, num_steps=20_000)
    world.driver.drain()
    assert not world.scheduler.sequences
