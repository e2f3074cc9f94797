"""Steps planned before the tokens of the one before are known: every answer is that of the request alone."""

import random
from collections import deque

import pytest

from loraplex.core import FinishReason, Request, SequenceId
from loraplex.pool import KvShape, PoolGeometry
from loraplex.scheduler import UNKNOWN_TOKEN, Committed, Scheduler, SchedulerConfig, Sequence, StepPlan

from .helpers import EOS, A, make_request, next_token, run_alone
from .test_machine import random_request

MAX_LEN = 40


class Device:
    """Runs steps in order, each with what the device itself has drawn; results are read `depth` steps later."""

    def __init__(self, scheduler: Scheduler, depth: int = 1) -> None:
        self.scheduler = scheduler
        self.depth = depth
        self.in_flight: deque[tuple[StepPlan, dict[SequenceId, int]]] = deque()
        self.tokens: dict[SequenceId, list[int]] = {}
        self.requests: dict[SequenceId, Request] = {}
        self.ended: dict[SequenceId, tuple[Sequence, Committed]] = {}
        self.now = 0.0

    def add(self, request: Request) -> tuple[Sequence, ...]:
        added = self.scheduler.add(request, 1 if request.adapter else 0, EOS, self.now)
        for seq in added:
            self.tokens[seq.seq_id] = list(request.prompt_token_ids)
            self.requests[seq.seq_id] = request
        return added

    def step(self) -> bool:
        """Plan and start a step, then read one that is old enough. False when nothing is left."""
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check_invariants()
        if plan is not None:
            self.in_flight.append((plan, self._run(plan)))
            self.scheduler.advance(plan)
            self.scheduler.check_invariants()
        if len(self.in_flight) > (self.depth if plan is not None else 0):
            self._read(*self.in_flight.popleft())
        return bool(self.scheduler.sequences or self.in_flight)

    def _run(self, plan: StepPlan) -> dict[SequenceId, int]:
        drawn = {}
        for chunk in plan.chunks:
            tokens, place = self.tokens[chunk.seq_id], chunk.start + chunk.num_tokens
            assert len(tokens) >= place, "a step was planned on tokens that the device does not have"
            if chunk.samples:
                drawn[chunk.seq_id] = next_token(tokens[:place], chunk.adapter)
                self.tokens[chunk.seq_id] = [*tokens[:place], drawn[chunk.seq_id]]
        return drawn

    def _read(self, plan: StepPlan, drawn: dict[SequenceId, int]) -> None:
        sequences = dict(self.scheduler.sequences)
        for entry in self.scheduler.commit(plan, drawn):
            if entry.finish_reason is not None:
                assert entry.seq_id not in self.ended
                self.ended[entry.seq_id] = (sequences[entry.seq_id], entry)
        self.scheduler.check_invariants()

    def check_answers(self) -> None:
        for seq_id, (seq, entry) in self.ended.items():
            wanted, reason = run_alone(self.requests[seq_id], seq.max_len)
            assert (seq.token_ids, entry.finish_reason) == (wanted, reason)


def make_device(num_pages: int = 12, **settings: int) -> Device:
    config = SchedulerConfig(**({"max_model_len": MAX_LEN, "max_num_seqs": 5, "max_step_tokens": 10} | settings))
    geometry = PoolGeometry(KvShape(1, 1, 4), num_pages, 4, 4, 4)
    return Device(Scheduler(config, geometry))


@pytest.mark.parametrize("seed", range(12))
def test_answers_are_those_of_each_request_alone(seed: int) -> None:
    rng = random.Random(seed)
    device = make_device(rng.randint(9, 14), max_loras=2)
    for _ in range(400):
        if len(device.scheduler.sequences) < 9 and rng.random() < 0.5:
            device.add(random_request(rng))
        if device.scheduler.sequences and rng.random() < 0.05:
            device.scheduler.finish(rng.choice(list(device.scheduler.sequences)), FinishReason.ABORT)
        device.step()
    while device.step():
        pass
    assert device.scheduler.num_preemptions > 0
    assert device.scheduler.pool.num_free == device.scheduler.pool.num_pages - device.scheduler.residency.num_pages
    assert len(device.ended) > 40
    device.check_answers()


def test_no_step_is_planned_beyond_the_last_token() -> None:
    device = make_device()
    (seq,) = device.add(make_request(3, A, max_tokens=2, ignore_eos=True))
    assert device.step()
    assert seq.token_ids[-1] == UNKNOWN_TOKEN
    assert device.step()
    assert device.scheduler.schedule(device.now) is None
    while device.step():
        pass
    assert seq.num_output_tokens == 2
    assert seq.finish_reason is FinishReason.LENGTH


def test_token_drawn_after_the_end_is_dropped() -> None:
    device = make_device()
    (seq,) = device.add(make_request(3, max_tokens=9))
    wanted, _ = run_alone(device.requests[seq.seq_id], seq.max_len)
    stopping = make_request(3, max_tokens=9, stop_token_ids=[wanted[4]])
    (other,) = device.add(stopping)
    while device.step():
        pass
    assert other.token_ids == wanted[:5]
    assert other.finish_reason is FinishReason.STOP
    assert len(device.tokens[other.seq_id]) == 6, "the device went one step further"


def test_unknown_token_is_filled_in_after_preemption() -> None:
    device = make_device(num_pages=4, max_num_seqs=2)
    requests = [
        make_request(6, max_tokens=9, ignore_eos=True),
        make_request([9, 8, 7, 6], max_tokens=9, ignore_eos=True),
    ]
    for request in requests:
        device.add(request)
    while device.step():
        pass
    assert device.scheduler.num_preemptions > 0
    assert len(device.ended) == 2
    device.check_answers()
