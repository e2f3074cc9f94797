"""When sequences end, and the text, log probabilities and reasons that are handed out."""

from pathlib import Path

import pytest
import torch

from loraplex.core import FinishReason, SamplingParams

from ..conftest import MakeBase
from ..oracle import Harness, Trace, edit_config, make_base, random_prompt

PROMPT = random_prompt(6, seed=1)
EOS = 11


@pytest.fixture(scope="module")
def harness(tiny_base: MakeBase) -> Harness:
    """One engine for all tests here; each leaves it idle."""
    return Harness(tiny_base("llama"))


@pytest.fixture(scope="module")
def free(harness: Harness) -> Trace:
    """What greedy decoding gives when nothing stops it."""
    return harness.answer(PROMPT, SamplingParams(max_tokens=24, temperature=0.0))


def words(tokens: list[int]) -> str:
    return "".join(f" t{token}" for token in tokens)


def first_use(free: Trace, at_least: int) -> int:
    """A position of a token that did not occur before it."""
    return next(i for i in range(at_least, 24) if free.tokens[i] not in free.tokens[:i])


def test_text_is_the_decoding_of_the_tokens(free: Trace) -> None:
    assert free.text == words(free.tokens)
    assert all(len(delta.token_ids) == 1 for delta in free.deltas)
    assert [delta.finish_reason for delta in free.deltas[:-1]] == [None] * 23


def test_length_limit_ends_with_length(harness: Harness) -> None:
    for count in (1, 5):
        trace = harness.answer(PROMPT, SamplingParams(max_tokens=count, temperature=0.0))
        assert (len(trace.tokens), trace.last.finish_reason) == (count, FinishReason.LENGTH)
        assert trace.last.stop_reason is None


@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_context_ends_with_length(tiny_base: MakeBase, max_tokens: int | None) -> None:
    harness = Harness(tiny_base("llama"), max_model_len=40)
    trace = harness.answer(PROMPT, SamplingParams(max_tokens=max_tokens, temperature=0.0))
    assert (len(PROMPT) + len(trace.tokens), trace.last.finish_reason) == (40, FinishReason.LENGTH)


def test_pool_bounds_a_request_without_a_limit(tiny_base: MakeBase) -> None:
    harness = Harness(tiny_base("llama"), kv_pages=2)
    trace = harness.answer(PROMPT, SamplingParams(max_tokens=None, temperature=0.0))
    assert len(PROMPT) + len(trace.tokens) == 32


def test_stop_string_ends_and_is_not_leaked(harness: Harness, free: Trace) -> None:
    at = first_use(free, 5)
    stop = f"t{free.tokens[at]}"
    for include in (False, True):
        params = SamplingParams(max_tokens=24, temperature=0.0, stop=[stop], include_stop_str_in_output=include)
        trace = harness.answer(PROMPT, params)
        whole = free.text[: free.text.index(stop) + len(stop)]
        assert trace.text == (whole if include else whole.removesuffix(stop))
        assert (trace.last.finish_reason, trace.last.stop_reason) == (FinishReason.STOP, stop)
        assert trace.tokens == free.tokens[: len(trace.tokens)]
    harness.check_all_free()


def test_stop_string_over_several_tokens_is_never_shown_in_part(harness: Harness, free: Trace) -> None:
    stop = words(free.tokens[4:7])
    trace = harness.answer(PROMPT, SamplingParams(max_tokens=24, temperature=0.0, stop=[stop, "unseen"]))
    assert trace.text == words(free.tokens[:4])
    assert [delta.text for delta in trace.deltas][-3:] == ["", "", ""]
    assert len(trace.tokens) == 7


def test_held_back_text_is_given_at_the_end(harness: Harness, free: Trace) -> None:
    """The text ends as the stop string begins, so it is held until nothing more can come."""
    stop = words(free.tokens[7:9]) + " never"
    trace = harness.answer(PROMPT, SamplingParams(max_tokens=9, temperature=0.0, stop=[stop]))
    assert trace.text == words(free.tokens[:9])
    assert trace.last.finish_reason is FinishReason.LENGTH
    assert trace.deltas[-2].text == ""


def test_stop_string_at_the_length_limit_is_a_stop(harness: Harness, free: Trace) -> None:
    at = first_use(free, 3)
    stop = f" t{free.tokens[at]}"
    trace = harness.answer(PROMPT, SamplingParams(max_tokens=at + 1, temperature=0.0, stop=[stop]))
    if stop not in words(free.tokens[:at]):
        assert (trace.last.finish_reason, trace.last.stop_reason) == (FinishReason.STOP, stop)
        assert trace.text == words(free.tokens[:at])


def test_stop_token_ends_and_shows_only_when_asked(harness: Harness, free: Trace) -> None:
    at = first_use(free, 4)
    token = free.tokens[at]
    for include in (False, True):
        params = SamplingParams(
            max_tokens=24, temperature=0.0, stop_token_ids=[token], include_stop_str_in_output=include
        )
        trace = harness.answer(PROMPT, params)
        assert trace.tokens == free.tokens[: at + 1]
        assert trace.text == words(free.tokens[: at + include])
        assert (trace.last.finish_reason, trace.last.stop_reason) == (FinishReason.STOP, token)


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory, free: Trace) -> Harness:
    """The same model with an end token: the one that `free` draws fifth or later, new there."""
    base = make_base(tmp_path_factory.mktemp("ending"), "llama")
    edit_config(base, lambda raw: raw.update(eos_token_id=[free.tokens[first_use(free, 4)], 159]))
    (base / "generation_config.json").unlink(missing_ok=True)
    return Harness(base)


def test_end_token_ends_and_is_not_shown(ending: Harness, free: Trace) -> None:
    at = first_use(free, 4)
    trace = ending.answer(PROMPT, SamplingParams(max_tokens=24, temperature=0.0))
    assert trace.tokens == free.tokens[: at + 1]
    assert trace.text == words(free.tokens[:at])
    assert (trace.last.finish_reason, trace.last.stop_reason) == (FinishReason.STOP, None)


def test_end_token_is_ignored_on_request(ending: Harness, free: Trace) -> None:
    trace = ending.answer(PROMPT, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    assert trace.tokens == free.tokens
    assert trace.text == free.text


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_forbids_end_and_stop_tokens_until_reached(ending: Harness, free: Trace, ignore_eos: bool) -> None:
    end, other = free.tokens[first_use(free, 4)], free.tokens[0]
    params = SamplingParams(
        max_tokens=40, min_tokens=12, temperature=0.0, stop_token_ids=[other], ignore_eos=ignore_eos
    )
    trace = ending.answer(PROMPT, params)
    assert len(trace.tokens) >= 12
    assert other not in trace.tokens[:11]
    assert ignore_eos or end not in trace.tokens[:11]


def test_min_tokens_holds_under_any_seed(ending: Harness) -> None:
    forbid = list(range(64))
    ids = [
        ending.add(PROMPT, SamplingParams(max_tokens=12, min_tokens=6, seed=seed, stop_token_ids=forbid))
        for seed in range(20)
    ]
    ending.run()
    lengths = [len(ending.trace(i).tokens) for i in ids]
    assert min(lengths) == 6
    assert all(token >= 64 for i in ids for token in ending.trace(i).tokens[:5])


def test_stop_string_before_min_tokens_does_not_end(harness: Harness, free: Trace) -> None:
    stop = f" t{free.tokens[1]}"
    params = SamplingParams(max_tokens=12, min_tokens=6, temperature=0.0, stop=[stop])
    trace = harness.answer(PROMPT, params)
    assert len(trace.tokens) >= 6
    assert trace.text.startswith(words(free.tokens[:5]))


def test_n_sequences_draw_with_their_own_seeds(harness: Harness) -> None:
    params = SamplingParams(max_tokens=10, n=4, seed=100, temperature=1.0)
    together = harness.add(PROMPT, params)
    harness.run()
    for index in range(4):
        alone = harness.answer(PROMPT, SamplingParams(max_tokens=10, seed=100 + index, temperature=1.0))
        assert harness.trace(together, index).tokens == alone.tokens
    assert len({tuple(harness.trace(together, index).tokens) for index in range(4)}) == 4
    last = harness.outputs[together][-1]
    assert (last.finished, last.num_output_tokens, last.num_prompt_tokens) == (True, 40, 6)
    assert [output.finished for output in harness.outputs[together][:-1]] == [False] * (
        len(harness.outputs[together]) - 1
    )


def test_sequences_of_a_request_end_on_their_own(harness: Harness) -> None:
    params = SamplingParams(max_tokens=30, n=4, seed=5, stop_token_ids=list(range(20)))
    request_id = harness.add(PROMPT, params)
    harness.run()
    reasons = [[d.finish_reason for d in harness.trace(request_id, i).deltas if d.finish_reason] for i in range(4)]
    assert all(len(found) == 1 for found in reasons)
    lengths = [len(harness.trace(request_id, i).tokens) for i in range(4)]
    assert len(set(lengths)) > 1
    assert harness.outputs[request_id][-1].num_output_tokens == sum(lengths)
    harness.check_all_free()


def test_without_a_seed_requests_differ(harness: Harness) -> None:
    params = SamplingParams(max_tokens=12, temperature=2.0)
    assert harness.answer(PROMPT, params).tokens != harness.answer(PROMPT, params).tokens


def test_logprobs_are_the_log_softmax_of_the_logits(harness: Harness) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.5, seed=4, logprobs=3, frequency_penalty=1.0, top_k=9)
    trace = harness.answer(PROMPT, params)
    for delta, token, logits in zip(trace.deltas, trace.tokens, trace.logits, strict=True):
        (entry,) = delta.logprobs
        exact = logits.log_softmax(-1)
        assert (entry.token_id, entry.text) == (token, f" t{token}")
        assert entry.logprob == pytest.approx(float(exact[token]), abs=1e-6)
        values, ids = exact.topk(3)
        assert [top.token_id for top in entry.top] == ids.tolist()
        assert [top.text for top in entry.top] == [f" t{i}" for i in ids.tolist()]
        assert [top.logprob for top in entry.top] == pytest.approx(values.tolist(), abs=1e-6)


def test_zero_logprobs_give_the_drawn_token_only(harness: Harness) -> None:
    trace = harness.answer(PROMPT, SamplingParams(max_tokens=2, logprobs=0))
    assert all(delta.logprobs is not None and delta.logprobs[0].top == () for delta in trace.deltas)
    plain = harness.answer(PROMPT, SamplingParams(max_tokens=2))
    assert all(delta.logprobs is None for delta in plain.deltas)


def test_logit_bias_and_penalties_reach_the_sampler(harness: Harness, free: Trace) -> None:
    forced = harness.answer(PROMPT, SamplingParams(max_tokens=4, temperature=0.0, logit_bias={9: 100.0}))
    assert forced.tokens == [9] * 4
    banned = harness.answer(PROMPT, SamplingParams(max_tokens=1, temperature=0.0, logit_bias={free.tokens[0]: -100}))
    assert banned.tokens[0] == int(free.logits[0].topk(2).indices[1])
    penalised = harness.answer(
        PROMPT, SamplingParams(max_tokens=4, temperature=0.0, logit_bias={9: 50.0}, presence_penalty=2.0)
    )
    expected = penalised.logits[1].clone()
    expected[9] += 48.0
    assert penalised.tokens[1] == int(expected.argmax())
    assert torch.equal(forced.logits[0], free.logits[0])


def test_padded_vocabulary_gives_empty_text(tmp_path: Path) -> None:
    from ..oracle import write_tokenizer

    base = make_base(tmp_path, "llama")
    write_tokenizer(base, {f"t{i}": i for i in range(100)})
    trace = Harness(base).answer(
        PROMPT, SamplingParams(max_tokens=3, temperature=0.0, logit_bias={150: 100.0}, logprobs=1)
    )
    assert trace.tokens == [150] * 3
    assert trace.text.strip() == ""
