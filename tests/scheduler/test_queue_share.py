"""A tenant may hold as much of the queue as it leaves free."""

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from loraplex.core import CallerLimitReached, Request, RequestId, SamplingParams, SequenceId
from loraplex.scheduler import QueueShare, Sequence
from loraplex.scheduler.queue import WaitingQueue
from loraplex.scheduler.sequence import new_sequence


def request(tenant: str | None, prompt_len: int = 1, n: int = 1) -> Request:
    params = SamplingParams(max_tokens=1, n=n, temperature=1.0)
    return Request(RequestId("r"), (1,) * prompt_len, params, None, tenant=tenant)


def queue_of(sequences: Iterable[Sequence]) -> WaitingQueue:
    queue = WaitingQueue(lambda digest: False)
    for seq in sequences:
        queue.add(seq)
    return queue


def fill(share: QueueShare, tenants: tuple[str | None, ...], prompt_len: int = 1) -> Counter[str | None]:
    """What each tenant holds once all ask in turn and nobody gets any more."""
    queue = queue_of(())
    refused: set[str | None] = set()
    while len(refused) < len(tenants) and len(queue) < share.max_waiting:
        for tenant in tenants:
            asked = request(tenant, prompt_len)
            try:
                share.check(queue, asked, 3.0)
            except CallerLimitReached:
                refused.add(tenant)
            else:
                queue.add(new_sequence(SequenceId(len(queue)), asked, 100, frozenset(), 0.0))
    return Counter(seq.tenant for seq in queue)


@pytest.mark.parametrize(
    ("tenants", "held"),
    [(("a",), [50]), (("a", "b"), [33, 33]), (("a", "b", "c"), [25, 25, 25]), (tuple("abcdefghi"), [10] * 9)],
)
def test_tenants_get_equal_parts_and_one_more_is_left_for_who_comes(tenants: tuple[str, ...], held: list[int]) -> None:
    assert sorted(fill(QueueShare(100), tenants).values()) == held


def test_prompt_tokens_are_shared_likewise() -> None:
    assert fill(QueueShare(1000, 600), ("a",), prompt_len=10) == {"a": 30}
    assert fill(QueueShare(1000, 600), ("a", "b"), prompt_len=10) == {"a": 20, "b": 20}


def test_requests_of_no_tenant_may_fill_it() -> None:
    assert fill(QueueShare(20), (None,)) == {None: 20}
    assert fill(QueueShare(20), ("",)) == {"": 20}  # a server without a registry


def test_a_tenant_of_whom_nothing_waits_has_a_place_for_any_request() -> None:
    share = QueueShare(8, 100)
    crowd = queue_of(new_sequence(SequenceId(i), request("a", 40), 100, frozenset(), 0.0) for i in range(2))
    share.check(queue_of(()), request("a", 100, n=8), 1.0)
    share.check(crowd, request("b", 20), 1.0)


def test_the_error_says_who_holds_what_and_of_what() -> None:
    queue = queue_of(new_sequence(SequenceId(i), request("a", 30), 100, frozenset(), 0.0) for i in range(4))
    with pytest.raises(CallerLimitReached) as caught:
        QueueShare(9).check(queue, request("a", n=2), 7.5)
    assert caught.value.message == (
        "The tenant 'a' has 4 sequences in the queue and the request has 2; "
        "a tenant may have as many as it leaves free (--max-waiting 9)."
    )
    assert (caught.value.retry_after_s, caught.value.reason_code) == (7.5, "SHARE")
    with pytest.raises(CallerLimitReached, match=r"120 prompt tokens .* has 20; .* \(--max-waiting-tokens 200\)"):
        QueueShare(100, 200).check(queue, request("a", 20), 1.0)


def test_what_a_tenant_holds_follows_the_queue() -> None:
    crowd = [new_sequence(SequenceId(i), request("ab"[i % 2], 10 + i), 100, frozenset(), 0.0) for i in range(4)]
    queue = queue_of(crowd)
    assert (queue.held_by("a"), queue.held_by("b")) == ((2, 22), (2, 24))
    for seq in crowd[:3]:
        queue.remove(seq)
        queue.check_invariants()
    assert (queue.held_by("a"), queue.held_by("b"), queue.held_by("c")) == ((0, 0), (1, 13), (0, 0))


def test_requests_of_one_call_count_as_one() -> None:
    """So the prompts of one body are not refused for one another's sake."""
    share, queue, ids = QueueShare(10, 100), queue_of(()), itertools.count()

    def ask(tenant: str, call_id: str | None, prompt_len: int = 10) -> None:
        asked = replace(request(tenant, prompt_len), call_id=call_id)
        share.check(queue, asked, 1.0)
        queue.add(new_sequence(SequenceId(next(ids)), asked, 100, frozenset(), 0.0))
        queue.check_invariants()

    for _ in range(8):
        ask("a", "one")
    assert queue.held_by_call("one") == (8, 80)
    with pytest.raises(CallerLimitReached, match="'a' has 8 sequences in the queue and the request has 1;"):
        ask("a", "two", 1)
    with pytest.raises(CallerLimitReached, match="has 8 sequences"):
        ask("a", None, 1)
    ask("b", "three", 1)
    for seq in list(queue)[:6]:
        queue.remove(seq)
    ask("a", "two", 1)
    with pytest.raises(CallerLimitReached, match=r"'a' has 20 prompt tokens in the queue and the request has 41;"):
        ask("a", "two", 40)
    for seq in list(queue):
        queue.remove(seq)
        queue.check_invariants()
    assert queue.held_by_call("two") == (0, 0)
