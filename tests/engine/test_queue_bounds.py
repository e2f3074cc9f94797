"""The queue's bounds, for requests and for those that are about to be: all that is refused says why."""

import pytest

from loraplex.core import CallerLimitReached, InvalidRequest, Overloaded, OverloadReason, Request, RequestId

from ..conftest import MakeBase
from ..oracle import GREEDY, Harness, random_prompt


def add(harness: Harness, name: str, tenant: str | None = None) -> None:
    harness.engine.add_request(Request(RequestId(name), random_prompt(4), GREEDY, None, tenant), harness.now)


def test_sequences_that_are_about_to_be_queued_count_as_if_they_were(tiny_base: MakeBase) -> None:
    harness = Harness(tiny_base("llama"), max_waiting=4)
    bounds = harness.engine.queue_bounds
    bounds.check_sequences("a", 4, 0, 0)
    bounds.check_sequences("a", 1, 3, 0)
    with pytest.raises(Overloaded, match=r"queue of 4 .* is full") as caught:
        bounds.check_sequences("a", 2, 3, 0)
    assert caught.value.reason is OverloadReason.QUEUE_FULL
    add(harness, "one")
    with pytest.raises(Overloaded, match="--max-waiting"):
        bounds.check_sequences("a", 1, 3, 0)
    with pytest.raises(InvalidRequest, match=r"5 sequences .* holds 4"):
        bounds.check_sequences("a", 5, 0, 0)


def test_a_tenants_part_counts_what_it_is_about_to_queue(tiny_base: MakeBase) -> None:
    harness = Harness(tiny_base("llama"), max_waiting=8)
    bounds = harness.engine.queue_bounds
    add(harness, "one", "a")
    bounds.check_sequences("a", 1, 2, 2)  # 3 held then 4 of 8, and 4 left
    with pytest.raises(CallerLimitReached, match="'a' has 4 sequences"):
        bounds.check_sequences("a", 1, 3, 3)
    bounds.check_sequences("b", 1, 3, 0)


def test_when_to_come_back_counts_what_is_about_to_be_queued_too(tiny_base: MakeBase) -> None:
    harness = Harness(tiny_base("llama"), max_waiting=20)
    bounds, scheduler = harness.engine.queue_bounds, harness.engine.scheduler
    for second in range(9):
        scheduler._start_rate.note(1, float(second), is_waiting=True)
    with pytest.raises(Overloaded) as full:
        bounds.check_sequences("a", 1, 20, 0)
    with pytest.raises(CallerLimitReached) as over_share:
        bounds.check_sequences("a", 1, 10, 10)
    assert full.value.retry_after_s == pytest.approx(20.0, rel=0.1), "one starts in a second"
    assert over_share.value.retry_after_s == pytest.approx(10.0, rel=0.1)
    assert scheduler.retry_after_s == 1.0


def test_prompt_tokens_of_the_queue_are_looked_at_too(tiny_base: MakeBase) -> None:
    harness = Harness(tiny_base("llama"), max_waiting_tokens=4)
    add(harness, "one")
    with pytest.raises(Overloaded) as caught:
        harness.engine.queue_bounds.check_sequences("a", 1, 0, 0)
    assert caught.value.reason is OverloadReason.QUEUE_TOKENS


def test_the_prompts_of_one_call_have_the_queue_that_one_prompt_would_have(tiny_base: MakeBase) -> None:
    harness = Harness(tiny_base("llama"), max_waiting=8, max_waiting_tokens=20)
    for number in range(8):  # 32 tokens, as one prompt of 32 might wait alone
        request = Request(RequestId(f"r{number}"), random_prompt(4), GREEDY, None, "a", call_id="body")
        harness.engine.add_request(request, harness.now)
    with pytest.raises(Overloaded, match="queue of 8"):
        add(harness, "more", "b")
    harness.engine.abort(RequestId("r0"))
    with pytest.raises(Overloaded, match="28 prompt tokens wait"):
        add(harness, "more", "b")
