"""What a request says of itself before it has given a token."""

from loraplex.core import Request, RequestId

from ..conftest import MakeBase
from ..oracle import GREEDY, Harness


def test_request_has_begun_once_a_step_computes_its_prompt_and_not_in_the_queue(tiny_base: MakeBase) -> None:
    harness = Harness(tiny_base("llama"), max_num_batched_tokens=16, max_num_seqs=1)
    first, second = (
        Request(RequestId(name), tuple(range(1, 41)), GREEDY, adapter=None) for name in ("first", "second")
    )
    for request in (first, second):
        harness.engine.add_request(request, harness.now)
        assert not request.progress.has_begun
    harness.step()
    assert (first.progress.has_begun, second.progress.has_begun) == (True, False)
    assert not harness.outputs, "40 tokens take three steps of 16"
    harness.engine.abort(first.request_id)
    harness.step()
    assert second.progress.has_begun


def test_requests_are_equal_whatever_became_of_them() -> None:
    one, two = (Request(RequestId("r"), (1,), GREEDY, None) for _ in range(2))
    one.progress.has_begun = True
    assert one == two
    assert not two.progress.has_begun
