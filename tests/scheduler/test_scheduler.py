"""Budgets, order, admission, preemption and endings of single steps."""

from dataclasses import replace
from typing import Any

import pytest

from loraplex.core import AdapterDigest, ContextTooLong, FinishReason, SequenceId
from loraplex.scheduler import Committed, Scheduler, StepPlan

from .helpers import EOS, A, B, C, Driver, make_request, make_scheduler, next_token, run_alone

FOREVER = {"max_tokens": None, "ignore_eos": True}


def make_driver(num_pages: int = 64, page_tokens: int = 4, **config: Any) -> Driver:
    return Driver(make_scheduler(num_pages, page_tokens, **config))


def parts(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    """(sequence, start, tokens) of each chunk."""
    assert plan is not None
    return [(chunk.seq_id, chunk.start, chunk.num_tokens) for chunk in plan.chunks]


def load_digests(plan: StepPlan | None) -> list[AdapterDigest]:
    assert plan is not None
    return [load.digest for load in plan.loads]


def feed(scheduler: Scheduler, token: int) -> Committed:
    """One step of a scheduler with one sequence, which draws `token`."""
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.advance(plan)
    (committed,) = scheduler.commit(plan, {chunk.seq_id: token for chunk in plan.chunks})
    return committed


# ---------------------------------------------------------------------- budget and chunked prefill
def test_idle_scheduler_plans_nothing() -> None:
    driver = make_driver()
    assert driver.step() is None
    driver.add_one(max_tokens=1)
    assert driver.step() is not None
    assert driver.step() is None


def test_long_prompt_is_computed_in_chunks_and_samples_at_its_end() -> None:
    driver = make_driver(max_step_tokens=8)
    seq = driver.add_one(19, **FOREVER)
    plans = [driver.step() for _ in range(4)]
    assert [parts(plan) for plan in plans] == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 3)], [(0, 19, 1)]]
    assert [plan.chunks[0].samples for plan in plans if plan] == [False, False, True, True]
    assert seq.num_output_tokens == 2


def test_prompt_of_exactly_the_budget_samples_at_once() -> None:
    driver = make_driver(max_step_tokens=8)
    driver.add_one(8, **FOREVER)
    driver.add_one(9, **FOREVER)
    assert parts(driver.step()) == [(0, 0, 8)]
    assert parts(driver.step()) == [(0, 8, 1), (1, 0, 7)]
    assert parts(driver.step()) == [(0, 9, 1), (1, 7, 2)]


def test_decodes_come_before_prefills_even_of_older_sequences() -> None:
    driver = make_driver(max_step_tokens=8)
    driver.add_one(20, **FOREVER)
    driver.step()
    driver.step()
    driver.add_one(2, **FOREVER)
    assert parts(driver.step()) == [(0, 16, 4), (1, 0, 2)]
    driver.add_one(12, **FOREVER)
    driver.add_one(1, **FOREVER)
    assert parts(driver.step()) == [(0, 20, 1), (1, 2, 1), (2, 0, 6)]
    assert parts(driver.step()) == [(0, 21, 1), (1, 3, 1), (2, 6, 6)]
    assert parts(driver.step()) == [(0, 22, 1), (1, 4, 1), (2, 12, 1), (3, 0, 1)]


def test_prompts_beside_decodes_keep_to_the_smaller_budget() -> None:
    driver = make_driver(max_num_seqs=2, max_mixed_tokens=5)
    driver.add_one(14, **FOREVER)
    assert parts(driver.step()) == [(0, 0, 14)]
    driver.add_one(7, **FOREVER)
    assert parts(driver.step()) == [(0, 14, 1), (1, 0, 4)]
    assert parts(driver.step()) == [(0, 15, 1), (1, 4, 3)]
    assert parts(driver.step()) == [(0, 16, 1), (1, 7, 1)]


def test_first_come_is_first_served() -> None:
    driver = make_driver(max_num_seqs=2)
    for _ in range(4):
        driver.add_one(2, max_tokens=1)
        driver.now += 1
    assert [seq_id for seq_id, _, _ in parts(driver.step())] == [0, 1]
    assert [seq_id for seq_id, _, _ in parts(driver.step())] == [2, 3]


def test_running_sequences_are_capped() -> None:
    driver = make_driver(max_num_seqs=2)
    for _ in range(3):
        driver.add_one(2, **FOREVER)
    assert parts(driver.step()) == [(0, 0, 2), (1, 0, 2)]
    driver.scheduler.finish(SequenceId(0), FinishReason.ABORT)
    assert parts(driver.step()) == [(1, 2, 1), (2, 0, 2)]


# ---------------------------------------------------------------------- adapters in a step
def test_rows_are_ordered_by_adapter_with_the_base_first() -> None:
    driver = make_driver()
    for adapter in (A, None, B, A, None):
        driver.add_one(2, adapter, **FOREVER)
    plan = driver.step()
    assert plan is not None
    assert [chunk.adapter for chunk in plan.chunks] == [None, None, A, A, B]
    assert [digest for digest, _ in plan.adapters] == [A, B]
    assert [seq_id for seq_id, _, _ in parts(plan)] == [1, 4, 0, 3, 2]


def test_cold_adapter_is_loaded_exactly_once() -> None:
    driver = make_driver()
    driver.add_one(2, A, adapter_pages=3, **FOREVER)
    driver.add_one(2, A, adapter_pages=3, **FOREVER)
    first = driver.step()
    assert load_digests(first) == [A]
    assert first is not None
    assert first.adapters == ((A, first.loads[0].pages),)
    assert len(first.loads[0].pages) == 3
    driver.add_one(2, A, adapter_pages=3, **FOREVER)
    assert load_digests(driver.step()) == []


def test_idle_adapter_is_warm_when_it_returns_and_cold_after_eviction() -> None:
    driver = make_driver(num_pages=4)
    driver.add_one(2, A, max_tokens=1)
    assert load_digests(driver.step()) == [A]
    driver.add_one(2, A, max_tokens=1)
    assert load_digests(driver.step()) == []
    driver.add_one(2, B, adapter_pages=3, max_tokens=1)
    assert load_digests(driver.step()) == [B]
    assert driver.scheduler.residency.resident == (B,)
    driver.add_one(2, A, max_tokens=1)
    assert load_digests(driver.step()) == [A]


def test_own_idle_adapter_is_not_evicted_for_the_prompt() -> None:
    driver = make_driver(num_pages=4)
    driver.add_one(2, A, adapter_pages=2, max_tokens=1)
    driver.step()
    driver.add_one(2, B, adapter_pages=1, max_tokens=1)
    driver.step()
    driver.add_one(7, A, adapter_pages=2, max_tokens=1)  # A is the least recently used, and two pages are needed
    assert load_digests(driver.step()) == []
    assert driver.scheduler.residency.resident == (A,)


def test_distinct_adapters_are_capped() -> None:
    driver = make_driver(max_loras=2, adapter_patience_s=100.0)
    for adapter in (A, B, C, None, A):
        driver.add_one(2, adapter, max_tokens=5, ignore_eos=True)
    plan = driver.step()
    assert plan is not None
    assert [digest for digest, _ in plan.adapters] == [A, B]
    assert [seq_id for seq_id, _, _ in parts(plan)] == [3, 0, 4, 1], "the base and a running adapter overtake C"
    while driver.scheduler.uses_adapter(A) and driver.scheduler.uses_adapter(B):
        driver.step()
    plan = driver.step()
    assert plan is not None
    assert [digest for digest, _ in plan.adapters] == [C]


def test_overtaking_ends_with_patience() -> None:
    driver = make_driver(max_loras=1, adapter_patience_s=2.0)
    driver.add_one(2, A, **FOREVER)
    driver.step()
    driver.add_one(2, B, **FOREVER)
    admitted = []
    for _ in range(4):  # B first meets the cap at 1 s, so it may be overtaken at 1 s and 2 s, not at 3 s
        seq = driver.add_one(2, A, **FOREVER)
        driver.step()
        admitted.append(seq.lease is not None)
    assert admitted == [True, True, False, False]
    for seq in driver.scheduler.running.copy():
        driver.scheduler.finish(seq.seq_id, FinishReason.ABORT)
    plan = driver.step()
    assert plan is not None
    assert [digest for digest, _ in plan.adapters] == [B], "its turn comes before those behind it"


def test_those_that_waited_for_an_adapter_start_together_when_its_turn_comes() -> None:
    """With many out of patience each turn of an adapter serves all that wait for it, not one."""
    driver = make_driver(num_pages=256, max_num_seqs=16, max_step_tokens=64, max_loras=1, adapter_patience_s=3.0)
    for _ in range(8):
        for adapter in (A, B, C):
            driver.add_one(2, adapter, max_tokens=5, ignore_eos=True)
    assert driver.drain() == 3 * 5


def test_an_adapter_s_turn_ends_though_more_come_for_it() -> None:
    """All others are out of patience: who comes a patience after a turn began waits for the next."""
    driver = make_driver(num_pages=256, max_num_seqs=64, max_step_tokens=64, max_loras=1, adapter_patience_s=2.0)
    for adapter in (A, B, C):
        driver.add_one(2, adapter, max_tokens=4, ignore_eos=True)
    began: list[AdapterDigest] = []
    for _ in range(40):
        for adapter in (A, B, C):
            driver.add_one(2, adapter, max_tokens=4, ignore_eos=True)
        plan = driver.step()
        assert plan is not None
        ((digest, _),) = plan.adapters
        if not began or began[-1] is not digest:
            began.append(digest)
    assert began[:6] == [A, B, C, A, B, C]
    assert len(began) >= 40 // (4 + 3), "a turn takes as long as it takes those that came in its first two seconds"


def test_without_patience_only_the_base_overtakes() -> None:
    driver = make_driver(max_loras=1, adapter_patience_s=0.0)
    for adapter in (A, B, A, None):
        driver.add_one(2, adapter, **FOREVER)
    assert parts(driver.step()) == [(3, 0, 2), (0, 0, 2)]


@pytest.mark.parametrize(("num_pages", "max_num_seqs"), [(64, 8), (64, 2), (11, 8), (11, 2)])
def test_base_goes_on_while_an_aged_request_waits_and_does_not_starve_it(num_pages: int, max_num_seqs: int) -> None:
    """A long request holds the only slot, another adapter waits, the base arrives without end."""
    driver = make_driver(num_pages=num_pages, max_num_seqs=max_num_seqs, max_loras=1, adapter_patience_s=1.0)
    holder = driver.add_one(2, A, max_tokens=10, ignore_eos=True)
    driver.step()
    waiting = driver.add_one(6, B, adapter_pages=2, max_tokens=2, ignore_eos=True)
    started: list[int] = []
    while waiting.finish_reason is None:
        if not started or driver.scheduler.sequences.get(SequenceId(started[-1])) is None:
            started.append(driver.add_one(2, None, max_tokens=2, ignore_eos=True).seq_id)
        for _ in range(2):
            driver.add_one(2, A, max_tokens=2, ignore_eos=True)  # would hold the slot for ever
        driver.step()
        assert len(driver.plans) <= 10 + 2, "it did not start as soon as the slot came free"
    assert holder.finish_reason is not None
    served = [seq_id for seq_id in started if SequenceId(seq_id) in driver.finished]
    assert len(served) >= 3, "the base waited for the slot"


def test_base_leaves_the_pages_that_an_aged_request_needs() -> None:
    driver = make_driver(num_pages=9, max_loras=1, adapter_patience_s=0.0)
    driver.add_one(1, A, max_tokens=3, ignore_eos=True)  # a page and one for A
    driver.add_one(8, B, adapter_pages=2, max_tokens=1)  # needs two and two
    for _ in range(5):
        driver.add_one(1, None, max_tokens=4, ignore_eos=True)
    assert [seq_id for seq_id, _, _ in parts(driver.step())] == [2, 3, 4, 0]
    assert driver.scheduler.pool.num_free == 4
    driver.step()
    driver.step()
    plan = driver.step()
    assert load_digests(plan) == [B], "the slot came free, and so had the pages stayed"


def test_waiting_request_that_does_not_fit_is_not_overtaken_once_its_slot_is_free() -> None:
    driver = make_driver(num_pages=6, max_loras=1, adapter_patience_s=100.0)
    driver.add_one(1, A, max_tokens=2, ignore_eos=True)
    first = driver.add_one(8, B, adapter_pages=2, max_tokens=1)
    driver.add_one(8, None, max_tokens=6, ignore_eos=True)  # overtakes it, and takes pages that it needs
    driver.step()
    driver.step()
    late = driver.add_one(1, None, max_tokens=1)
    num_steps = 0
    while late.finish_reason is None:
        driver.step()
        num_steps += 1
        assert (late.finish_reason is None) == (first.finish_reason is None)
    assert num_steps == 5, "both start when the one that overtook has ended"


def test_request_that_does_not_fit_now_is_not_overtaken() -> None:
    driver = make_driver(num_pages=4)
    driver.add_one(9, max_tokens=3, ignore_eos=True)
    driver.add_one(9, max_tokens=1)
    driver.add_one(1, max_tokens=1)
    assert parts(driver.step()) == [(0, 0, 9)]
    assert driver.scheduler.pool.num_free == 1, "the refusal left no trace"
    driver.step()
    driver.step()
    assert parts(driver.step()) == [(1, 0, 9), (2, 0, 1)]


def test_adapter_and_prompt_are_admitted_together_or_not_at_all() -> None:
    driver = make_driver(num_pages=5)
    driver.add_one(8, max_tokens=1)
    driver.add_one(8, A, adapter_pages=2, max_tokens=1)  # 2 + 2 pages, 3 are free
    assert parts(driver.step()) == [(0, 0, 8)]
    assert driver.scheduler.residency.resident == ()
    plan = driver.step()
    assert (parts(plan), load_digests(plan)) == ([(1, 0, 8)], [A])


# ---------------------------------------------------------------------- preemption
def test_start_leaves_a_page_for_each_running_sequence_that_may_grow() -> None:
    driver = make_driver(num_pages=5, max_step_tokens=32)
    driver.add_one(4, max_tokens=6, ignore_eos=True)  # a page now, two more later
    driver.add_one(8, max_tokens=1)  # never needs a third page
    driver.add_one(8, max_tokens=1)
    assert parts(driver.step()) == [(0, 0, 4), (1, 0, 8)], "two are free, and one of them is spared"
    assert parts(driver.step()) == [(0, 4, 1), (2, 0, 8)]
    driver.drain()
    assert driver.scheduler.num_preemptions == 0


def test_sequences_that_need_no_more_pages_leave_the_last_one_to_others() -> None:
    driver = make_driver(num_pages=5)
    for prompt in (7, 7, 1):
        driver.add_one(prompt, max_tokens=2, ignore_eos=True)
    assert parts(driver.step()) == [(0, 0, 7), (1, 0, 7), (2, 0, 1)]
    assert driver.scheduler.pool.num_free == 0


def test_alone_a_sequence_may_start_on_the_last_page() -> None:
    driver = make_driver(num_pages=2, max_model_len=100)
    driver.add_one(7, max_tokens=1)
    driver.add_one(7, max_tokens=1)
    assert parts(driver.step()) == [(0, 0, 7)]
    assert parts(driver.step()) == [(1, 0, 7)]


def preempting_driver() -> Driver:
    """Three sequences that will need nine pages together, in a pool of eight."""
    driver = make_driver(num_pages=8, max_step_tokens=24)
    for prompt in (range(1, 8), range(2, 9), range(3, 10)):
        driver.add_one(prompt, None, max_tokens=6, ignore_eos=True)
    driver.step()
    assert driver.scheduler.pool.num_free == 2
    return driver


def test_youngest_is_preempted_and_nobody_admitted_in_that_step() -> None:
    driver = preempting_driver()
    late = driver.add_one(1, max_tokens=1)
    driver.step()  # all have 8 tokens
    plan = driver.step()  # the ninth needs a page each: the first and the second get the last two
    assert plan is not None
    assert plan.num_preempted == 1
    assert [seq_id for seq_id, _, _ in parts(plan)] == [0, 1]
    assert [seq.seq_id for seq in driver.scheduler.waiting] == [2, late.seq_id], "it keeps its place"
    assert (driver.scheduler.num_preemptions, driver.scheduler.waiting[0].num_preemptions) == (1, 1)


@pytest.mark.parametrize(
    ("priorities", "victim"),
    [((1, 0, 1), 1), ((0, 1, 1), 0), ((0, 0, 1), 1), ((1, 1, 1), 2), ((0, 1, 2), 0)],
)
def test_lowest_priority_is_preempted_first_then_the_youngest(priorities: tuple[int, ...], victim: int) -> None:
    driver = make_driver(num_pages=8, max_step_tokens=24)
    seqs = [driver.add_one(7, None, max_tokens=6, ignore_eos=True, priority=priority) for priority in priorities]
    for _ in range(3):
        driver.step()
    assert [seq.num_preemptions for seq in seqs] == [seq_id == victim for seq_id in range(3)]
    driver.drain()


def test_preemption_takes_who_came_long_ago_for_one_of_the_highest_priority() -> None:
    driver = make_driver(num_pages=8, max_step_tokens=24, aging_s=2.0)
    old = driver.add_one(7, None, max_tokens=6, ignore_eos=True)
    driver.now = 1.0
    young = [driver.add_one(7, None, max_tokens=6, ignore_eos=True, priority=1) for _ in range(2)]
    for _ in range(3):
        driver.step()
    assert [seq.num_preemptions for seq in (old, *young)] == [0, 0, 1]


def test_low_priority_ends_while_higher_ones_arrive_without_end() -> None:
    """It is preempted again and again until it counts as of their priority; then it is the oldest."""
    driver = make_driver(num_pages=8, max_step_tokens=24, aging_s=6.0)
    low = driver.add_one(7, None, max_tokens=8, ignore_eos=True)
    for _ in range(60):
        if low.finish_reason is not None:
            break
        if len(driver.scheduler.sequences) < 5:
            driver.add_one(7, None, max_tokens=6, ignore_eos=True, priority=1)
        driver.step()
    assert low.finish_reason is FinishReason.LENGTH
    assert low.num_preemptions > 0


def test_preempted_sequence_is_recomputed_from_its_start_to_the_same_tokens() -> None:
    driver = preempting_driver()
    third = driver.scheduler.sequences[SequenceId(2)]
    driver.step()
    driver.step()
    tokens = list(third.token_ids)
    assert (third.num_computed, third.lease, len(tokens)) == (0, None, 9)
    driver.drain()
    restarts = [chunk for plan in driver.plans for chunk in plan.chunks if chunk.seq_id == 2 and chunk.start == 0]
    assert [chunk.num_tokens for chunk in restarts] == [7, 9]
    assert third.token_ids[:9] == tokens
    assert third.token_ids == run_alone(make_request(range(3, 10), max_tokens=6, ignore_eos=True), 13)[0]


def test_idle_adapters_go_before_anyone_is_preempted() -> None:
    driver = make_driver(num_pages=4)
    driver.add_one(2, A, adapter_pages=2, max_tokens=1)
    driver.step()
    driver.add_one(7, max_tokens=4, ignore_eos=True)
    driver.drain()
    assert driver.scheduler.num_preemptions == 0
    assert driver.scheduler.residency.resident == ()


def test_preempted_sequence_gives_its_adapter_free() -> None:
    driver = make_driver(num_pages=7)
    driver.add_one(7, max_tokens=9, ignore_eos=True)
    driver.add_one(3, A, adapter_pages=3, max_tokens=9, ignore_eos=True)
    for _ in range(8):
        driver.step()
    assert driver.scheduler.num_preemptions > 0
    driver.drain()
    assert {entry.finish_reason for entry in driver.finished.values()} == {FinishReason.LENGTH}


def test_sequence_that_fills_the_whole_pool_ends() -> None:
    driver = make_driver(num_pages=4, max_model_len=100)
    driver.add_one(1, A, adapter_pages=1, **FOREVER)
    for _ in range(3):
        driver.add_one(5, **FOREVER)
    driver.drain()
    assert len(driver.finished) == 4


# ---------------------------------------------------------------------- endings
def test_same_tokens_alone_and_in_a_mixed_batch() -> None:
    driver = make_driver(num_pages=20, max_loras=2)
    requests = [make_request(range(i, i + 5), adapter, max_tokens=8) for i, adapter in enumerate((A, None, B, C, A))]
    seqs = [driver.add(request)[0] for request in requests]
    driver.drain()
    for request, seq in zip(requests, seqs, strict=True):
        assert (seq.token_ids, seq.finish_reason) == run_alone(request, 13)


@pytest.mark.parametrize(
    ("token", "params", "reason", "stop_token_id"),
    [
        (0, {}, FinishReason.STOP, None),
        (0, {"ignore_eos": True}, None, None),
        (5, {}, None, None),
        (5, {"stop_token_ids": [5]}, FinishReason.STOP, 5),
        (0, {"stop_token_ids": [0]}, FinishReason.STOP, 0),
        (0, {"stop_token_ids": [0], "ignore_eos": True}, FinishReason.STOP, 0),
        (0, {"min_tokens": 1}, FinishReason.STOP, None),
        (0, {"min_tokens": 2}, None, None),
        (5, {"min_tokens": 2, "stop_token_ids": [5]}, None, None),
        (5, {"max_tokens": 1}, FinishReason.LENGTH, None),
        (0, {"max_tokens": 1}, FinishReason.STOP, None),
        (0, {"max_tokens": 1, "min_tokens": 1}, FinishReason.STOP, None),
    ],
)
def test_first_token_ends_the_sequence(
    token: int, params: dict[str, Any], reason: FinishReason | None, stop_token_id: int | None
) -> None:
    scheduler = make_scheduler()
    (seq,) = scheduler.add(make_request(**params), 0, EOS, 0.0)
    assert feed(scheduler, token) == Committed(seq.seq_id, token, reason)
    assert (seq.finish_reason, seq.stop_token_id) == (reason, stop_token_id)
    assert (seq.seq_id in scheduler.sequences) == (reason is None)
    scheduler.check_invariants()


@pytest.mark.parametrize(("max_tokens", "num_output"), [(1, 1), (27, 27), (28, 28), (29, 28), (None, 28)])
def test_length_ends_at_max_tokens_or_the_context(max_tokens: int | None, num_output: int) -> None:
    driver = make_driver(max_model_len=32)
    seq = driver.add_one(4, max_tokens=max_tokens, ignore_eos=True)
    driver.drain()
    assert (seq.num_output_tokens, seq.finish_reason) == (num_output, FinishReason.LENGTH)


def test_min_tokens_counts_output_only() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(4, min_tokens=3), 0, EOS, 0.0)
    assert [feed(scheduler, 0).finish_reason for _ in range(3)] == [None, None, FinishReason.STOP]


def test_ended_sequence_gives_everything_back() -> None:
    driver = make_driver()
    driver.add_one(9, A, max_tokens=1)
    driver.step()
    scheduler = driver.scheduler
    assert scheduler.pool.num_free == scheduler.pool.num_pages - 1, "the idle adapter stays"
    assert scheduler.residency.num_users(A) == 0
    assert not scheduler.uses_adapter(A)


def test_n_sequences_run_apart_and_end_apart() -> None:
    driver = make_driver()
    seqs = driver.add(make_request(3, n=3, **FOREVER))
    assert [seq.seq_id for seq in seqs] == [0, 1, 2]
    assert {seq.request_id for seq in seqs} == {"r"}
    plan = driver.step()
    assert parts(plan) == [(0, 0, 3), (1, 0, 3), (2, 0, 3)]
    assert plan is not None
    assert len({page for chunk in plan.chunks for page in chunk.pages}) == 3
    driver.scheduler.finish(seqs[1].seq_id, FinishReason.STOP)
    assert [seq_id for seq_id, _, _ in parts(driver.step())] == [0, 2]


# ---------------------------------------------------------------------- endings from outside
def test_waiting_sequence_can_be_cancelled() -> None:
    driver = make_driver(max_num_seqs=1)
    driver.add_one(2, **FOREVER)
    second = driver.add_one(2, A, **FOREVER)
    driver.step()
    driver.scheduler.finish(second.seq_id, FinishReason.ABORT)
    driver.scheduler.check_invariants()
    assert (second.finish_reason, len(driver.scheduler.waiting)) == (FinishReason.ABORT, 0)


def test_finish_between_plan_and_commit_books_nothing_for_it() -> None:
    driver = make_driver()
    first, second = driver.add_one(2, A, **FOREVER), driver.add_one(2, **FOREVER)
    plan = driver.plan()
    assert plan is not None
    driver.scheduler.finish(first.seq_id, FinishReason.ABORT)
    driver.scheduler.advance(plan)
    committed = driver.scheduler.commit(plan, {first.seq_id: 3, second.seq_id: 4})
    assert [entry.seq_id for entry in committed] == [second.seq_id]
    assert (first.num_output_tokens, first.finish_reason) == (0, FinishReason.ABORT)
    driver.scheduler.check_invariants()
    driver.add_one(2, A, **FOREVER)
    assert load_digests(driver.step()) == [], "the load of the cancelled one counts"


def test_finish_of_unknown_or_ended_sequences_is_ignored() -> None:
    driver = make_driver()
    seq = driver.add_one(2, max_tokens=1)
    driver.step()
    reason = seq.finish_reason
    driver.scheduler.finish(seq.seq_id, FinishReason.ABORT)
    driver.scheduler.finish(SequenceId(99), FinishReason.ABORT)
    assert seq.finish_reason is reason
    driver.scheduler.check_invariants()


def test_arrival_between_plan_and_commit_waits_for_the_next_step() -> None:
    driver = make_driver()
    driver.add_one(2, **FOREVER)
    plan = driver.plan()
    driver.add_one(3, **FOREVER)
    assert plan is not None
    driver.commit(plan)
    assert parts(driver.step()) == [(0, 2, 1), (1, 0, 3)]


def test_uses_adapter_while_queued_or_running() -> None:
    driver = make_driver()
    seq = driver.add_one(2, A, **FOREVER)
    assert driver.scheduler.uses_adapter(A)
    driver.step()
    assert driver.scheduler.uses_adapter(A)
    assert not driver.scheduler.uses_adapter(B)
    driver.scheduler.finish(seq.seq_id, FinishReason.ABORT)
    assert not driver.scheduler.uses_adapter(A)


# ---------------------------------------------------------------------- what can never run
@pytest.mark.parametrize(("prompt_len", "max_len"), [(1, 32), (30, 32), (31, 32)])
def test_prompt_below_the_context_fits(prompt_len: int, max_len: int) -> None:
    assert make_scheduler(max_model_len=32).check_fits(prompt_len, None, 0) == max_len


@pytest.mark.parametrize("prompt_len", [32, 33, 1000])
def test_prompt_of_the_context_or_more_is_refused(prompt_len: int) -> None:
    with pytest.raises(ContextTooLong) as caught:
        make_scheduler(max_model_len=32).check_fits(prompt_len, 1, 0)
    assert f"The prompt has {prompt_len} tokens" in caught.value.message
    assert "context is 32 tokens" in caught.value.message
    assert "--max-model-len" in caught.value.message
    assert caught.value.param == "prompt"


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(ContextTooLong, match="prompt is empty"):
        make_scheduler().check_fits(0, 1, 0)


@pytest.mark.parametrize(("max_tokens", "max_len"), [(1, 5), (28, 32), (29, 32), (2**24, 32), (None, 32)])
def test_max_tokens_is_cut_at_the_context(max_tokens: int | None, max_len: int) -> None:
    assert make_scheduler(max_model_len=32).check_fits(4, max_tokens, 0) == max_len


@pytest.mark.parametrize("max_tokens", [1, 7, 8])
def test_request_within_the_pool_fits(max_tokens: int) -> None:
    scheduler = make_scheduler(num_pages=5, page_tokens=4, max_model_len=100)
    assert scheduler.check_fits(4, max_tokens, adapter_pages=2) == 4 + max_tokens


def test_request_beyond_the_pool_is_refused_with_sizes_and_knobs() -> None:
    scheduler = make_scheduler(num_pages=5, page_tokens=4, max_model_len=100)
    with pytest.raises(ContextTooLong) as caught:
        scheduler.check_fits(4, 9, adapter_pages=2)
    for part in ("13 tokens", "2 pages for its adapter", "pool of 5 pages", "holds 12", "--kv-pages", "--memory"):
        assert part in caught.value.message
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(("prompt_len", "fits"), [(10, True), (11, True), (12, False), (13, False)])
def test_open_ended_request_is_cut_at_the_pool(prompt_len: int, fits: bool) -> None:
    scheduler = make_scheduler(num_pages=5, page_tokens=4, max_model_len=100)
    if fits:
        assert scheduler.check_fits(prompt_len, None, adapter_pages=2) == 12
    else:
        with pytest.raises(ContextTooLong, match=f"needs {prompt_len + 1} tokens"):
            scheduler.check_fits(prompt_len, None, adapter_pages=2)


@pytest.mark.parametrize("adapter_pages", [5, 6])
def test_adapter_that_leaves_no_page_is_refused(adapter_pages: int) -> None:
    with pytest.raises(ContextTooLong, match="holds 0 "):
        make_scheduler(num_pages=5).check_fits(1, None, adapter_pages)


def test_refused_request_queues_nothing() -> None:
    scheduler = make_scheduler()
    with pytest.raises(ContextTooLong):
        scheduler.add(make_request(32, n=3), 0, EOS, 0.0)
    assert (len(scheduler.sequences), len(scheduler.waiting)) == (0, 0)
    (seq,) = scheduler.add(make_request(), 0, EOS, 0.0)
    assert seq.seq_id == 0


# ---------------------------------------------------------------------- invariants
@pytest.mark.parametrize("harm", ["lost page", "lost pin", "lost sequence", "computed while waiting"])
def test_check_invariants_finds(harm: str) -> None:
    driver = make_driver(max_num_seqs=1)
    driver.add_one(2, A, **FOREVER)
    waiting = driver.add_one(2, **FOREVER)
    driver.step()
    scheduler = driver.scheduler
    if harm == "lost page":
        scheduler.pool.allocate(1, "nobody")
    elif harm == "lost pin":
        scheduler.residency.release(A)
    elif harm == "lost sequence":
        scheduler.waiting.remove(waiting)
    else:
        waiting.num_computed = 1
    with pytest.raises(AssertionError):
        scheduler.check_invariants()


def test_fake_sampler_tells_adapters_apart() -> None:
    tokens = [[next_token(range(i), adapter) for i in range(20)] for adapter in (None, A, B)]
    assert tokens[0] != tokens[1] != tokens[2] != tokens[0]


def test_deadlines_of_sequences_that_ended_are_forgotten() -> None:
    scheduler = make_scheduler()
    for number in range(1000):
        request = replace(make_request(name=f"r{number}"), deadline_s=8e4)
        (seq,) = scheduler.add(request, 0, EOS, 0.0)
        scheduler.finish(seq.seq_id, FinishReason.ABORT)
    (last,) = scheduler.add(replace(make_request(name="last"), deadline_s=2.0), 0, EOS, 0.0)
    assert len(scheduler._deadlines) < 100
    assert scheduler.overdue(2.0) == (last,)
