"""What a step costs the host: it must not grow with the queue or with the adapters in the pool.

Bytecodes are counted, not seconds, so that the same is measured everywhere.
"""

import random
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from loraplex.core import AdapterDigest, AdapterRef, Request, RequestId, SamplingParams
from loraplex.scheduler import Calibrator, CostModel, Scheduler, WaitReason

from .helpers import make_scheduler
from .world import digest_of

FEW, MANY = (20, 60), (1000, 2000)  # waiting sequences, resident adapters
PAGES = 2
COSTS = CostModel(fixed_ms=100.0, token_ms=0.0, kv_token_ms=0.0, rank_ms=1.0)
RANKS_FULL = {"max_num_seqs": 32, "max_loras": 32, "tpot_target_ms": 230.0}  # for 130 ranks: 16 adapters of rank 8


def count_bytecodes(call: Callable[[], object]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def busy_scheduler(num_waiting: int, num_resident: int, num_running: int = 16, **settings: Any) -> Scheduler:
    """Every adapter is in the pool, and `num_running` of twenty tenants' sequences run."""
    options = {"num_pages": 20_000, "max_num_seqs": num_running, "max_step_tokens": 512, "max_loras": 16}
    options |= {"max_model_len": 256, "max_waiting_tokens": 10**6} | settings
    scheduler = make_scheduler(page_tokens=16, load_ahead=True, **options)
    scheduler.costs = Calibrator(COSTS, is_measured=True)
    for number in range(num_resident):
        assert scheduler.residency.begin_load(digest_of(number), PAGES, (), 0.0)
        scheduler.adapter_ready(digest_of(number))
    rng = random.Random(0)
    for number in range(num_running + num_waiting):
        digest = digest_of(number if number < num_running else rng.randrange(num_running, num_resident))
        scheduler.add(request(number, digest), PAGES, frozenset(), 0.0, adapter_rank=8.0)
    return scheduler


def request(number: int, digest: AdapterDigest) -> Request:
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    return Request(RequestId(str(number)), (1,) * 9, params, AdapterRef("a", 1, digest), f"t{number % 20}")


def step(scheduler: Scheduler, now: float) -> None:
    """All that the engine asks of the scheduler in a step, and a request that is looked at meanwhile."""
    scheduler.check_queue(5)
    assert scheduler.start_loads(now) == ()
    plan = scheduler.schedule(now)
    assert plan is not None
    scheduler.advance(plan)
    scheduler.commit(plan, {chunk.seq_id: 1 for chunk in plan.chunks})
    scheduler.observe(plan, 1.0)
    assert not scheduler.uses_adapter(digest_of(10**6))
    scheduler.waiting.num_by_reason()


def steady_bytecodes(scheduler: Scheduler) -> int:
    """Of a decode step after some others."""
    for number in range(4):
        step(scheduler, 0.1 * number)
    assert all(seq.num_tokens - seq.num_computed == 1 for seq in scheduler.running)
    return count_bytecodes(lambda: step(scheduler, 0.4))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({}, WaitReason.BUDGET), ({"max_num_seqs": 32}, WaitReason.SLOT), (RANKS_FULL, WaitReason.RANKS)],
    ids=["no seat is free", "no slot is free", "the target leaves no ranks"],
)
def test_cost_does_not_grow_with_the_queue_or_the_pool(settings: dict[str, Any], reason: WaitReason) -> None:
    few, many = (busy_scheduler(*size, **settings) for size in (FEW, MANY))
    bytecodes = [steady_bytecodes(scheduler) for scheduler in (few, many)]
    assert (len(few.running), len(many.running), len(many.waiting)) == (16, 16, 1000)
    assert many.waiting.num_by_reason()[reason] == 1000
    assert bytecodes[1] <= 1.02 * bytecodes[0]


def test_cost_of_arrivals_while_no_slot_is_free_does_not_grow() -> None:
    bytecodes = []
    for size in (FEW, MANY):
        scheduler = busy_scheduler(*size, max_num_seqs=32)
        steady_bytecodes(scheduler)
        scheduler.add(request(10**6, digest_of(50)), PAGES, frozenset(), 0.5, adapter_rank=8.0)
        bytecodes.append(count_bytecodes(partial(step, scheduler, 0.5)))
        assert scheduler.waiting[-1].wait is WaitReason.SLOT
    assert bytecodes[1] <= 1.02 * bytecodes[0]


def test_cost_of_holding_back_what_could_run_does_not_grow() -> None:
    """One that waits for a slot is out of patience, so none behind it starts on an adapter that runs."""
    bytecodes = []
    for size in (FEW, MANY):
        scheduler = busy_scheduler(*size, max_num_seqs=32, adapter_patience_s=0.2)
        steady_bytecodes(scheduler)
        for number in range(10):
            scheduler.add(request(number, digest_of(number)), PAGES, frozenset(), 0.5, adapter_rank=8.0)
        step(scheduler, 0.5)
        bytecodes.append(count_bytecodes(partial(step, scheduler, 0.6)))
        assert len(scheduler.running) == 16
    assert bytecodes[1] <= 1.02 * bytecodes[0]


def test_cost_of_a_running_sequence_does_not_grow_with_its_length() -> None:
    short, long = busy_scheduler(*FEW), busy_scheduler(*FEW)
    for number in range(112):  # of a page, and of the steps after which the cost model is fitted
        step(long, 0.01 * number)
    assert min(seq.num_tokens for seq in long.running) > 120
    assert steady_bytecodes(long) <= 1.02 * steady_bytecodes(short)
