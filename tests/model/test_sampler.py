"""The sampler draws from exactly the distribution the parameters describe."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from loraplex.core import SamplingParams
from loraplex.model import Sampled, SamplingRow, sample
from loraplex.model.sampler import _block_sums, _draw_from_all, _kept_ids, _mass_before, _weights

NUM_DRAWS = 2500


def row(
    *,
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    seed: int = 0,
    forbidden: Sequence[int] = (),
    **params: Any,
) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), [*prompt, *output], len(prompt), seed, frozenset(forbidden))


def random_logits(vocab: int = 40, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def draw_one(logits: torch.Tensor, one: SamplingRow) -> Sampled:
    return sample(logits[None].clone(), [one])[0]


def exact_probabilities(
    logits: torch.Tensor, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> torch.Tensor:
    """The distribution by its definition: float64, whole vocabulary sorted, each filter renormalised."""
    probabilities = (logits.double() / temperature).softmax(-1)
    keep = probabilities >= min_p * probabilities.max()
    order = probabilities.argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    if top_k > 0:
        keep &= rank < top_k
    kept = torch.where(keep, probabilities, 0.0)
    kept = kept / kept.sum()
    before = kept[order].cumsum(-1) - kept[order]  # mass of the likelier ones
    nucleus = torch.zeros_like(keep)
    nucleus[order] = before < top_p - 1e-9
    kept = torch.where(nucleus, kept, 0.0)
    return kept / kept.sum()


def frequencies(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    """Counts of NUM_DRAWS draws with different seeds."""
    rows = [row(seed=seed, **params) for seed in range(NUM_DRAWS)]
    counts = Counter(one.token_id for one in sample(logits.repeat(NUM_DRAWS, 1), rows))
    return torch.tensor([counts[token] for token in range(len(logits))], dtype=torch.float64)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_p": 0.7},
        {"top_p": 1e-6},
        {"top_k": 5},
        {"top_k": 1},
        {"top_k": -1, "top_p": 0.9},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 10, "top_p": 0.6},
        {"min_p": 0.05, "top_p": 0.8, "temperature": 1.5},
        {"min_p": 0.02, "top_p": 0.9, "top_k": 7, "temperature": 0.8},
    ],
    ids=repr,
)
def test_draws_follow_the_exact_distribution(params: dict[str, Any]) -> None:
    logits = random_logits()
    expected = exact_probabilities(logits, **params)
    counts = frequencies(logits, **params)
    assert not counts[expected == 0].any(), "a token was drawn that the filters exclude"
    used = expected * NUM_DRAWS > 5
    chi_square = ((counts - expected * NUM_DRAWS)[used] ** 2 / (expected * NUM_DRAWS)[used]).sum()
    freedom = max(int(used.sum()) - 1, 1)
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)  # 5 standard deviations, with these seeds


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.9},
        {"top_p": 0.5},
        {"top_p": 0.05},
        {"top_p": 0.999999},
        {"top_k": 3000, "top_p": 0.5},
        {"top_k": 1500},
        {"top_k": 1024},
        {"top_k": 1024, "top_p": 0.9},
        {"min_p": 0.3},
        {"min_p": 0.3, "top_p": 0.5},
        {"min_p": 0.05, "top_p": 0.4},
        {"min_p": 1e-9, "top_p": 0.9999},
        {"min_p": 1e-3, "top_p": 0.3},
        {"min_p": 0.2, "top_p": 0.6, "top_k": 2000},
    ],
    ids=repr,
)
@pytest.mark.parametrize("spread", [0.0, 0.3, 1.5, 4.0])
def test_filters_keep_exactly_the_tokens_they_should(spread: float, params: dict[str, Any]) -> None:
    logits = random_logits(6000, seed=1, spread=spread)
    expected = exact_probabilities(logits, **params)
    kept = kept_mask(logits, **params)
    count = int((expected > 0).sum())
    if not spread:  # equal logits may be cut anywhere
        assert abs(int(kept.sum()) - count) <= 1
        return
    probabilities = logits.double().softmax(-1)
    wrong = probabilities[kept != (expected > 0)]
    assert len(wrong) <= 1 or float(wrong.sum()) < 1e-6  # float32 weights round, at most one token decides


def kept_mask(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    """Which tokens the filters leave, bool [vocab]."""
    weights = _weights(logits[None], logits.amax(-1, keepdim=True), [1.0])[0, : len(logits)]
    kept = _kept_ids(logits, weights, float(weights.double().sum()), SamplingParams(**params))
    assert len(set(kept.tolist())) == len(kept)
    mask = torch.zeros(len(logits), dtype=torch.bool)
    mask[kept] = True
    return mask


@pytest.mark.parametrize("params", [{}, {"top_p": 0.6}, {"top_k": 700}, {"min_p": 0.3}], ids=repr)
@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 1000])
def test_every_part_of_the_vocabulary_is_drawn_as_often_as_it_should(vocab: int, params: dict[str, Any]) -> None:
    """Vocabularies around the size of a block, and the draw's buckets of tokens compared with the distribution."""
    logits = random_logits(vocab, seed=2, spread=1.0)
    expected = exact_probabilities(logits, **params)
    counts = frequencies(logits, **params)
    assert not counts[expected == 0].any()
    bucket = torch.arange(vocab) * 20 // vocab
    share = torch.zeros(20, dtype=torch.float64).index_add_(0, bucket, expected) * NUM_DRAWS
    seen = torch.zeros(20, dtype=torch.float64).index_add_(0, bucket, counts)
    used = share > 5
    freedom = max(int(used.sum()) - 1, 1)
    assert ((seen - share)[used] ** 2 / share[used]).sum() < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("vocab", [1, 300, 5000])
def test_extreme_numbers_draw_a_token_that_has_weight(vocab: int) -> None:
    logits = random_logits(vocab, seed=3, spread=6.0)
    logits[vocab // 2 + 1 :] = float("-inf")
    weights = _weights(logits[None], logits.amax(-1, keepdim=True), [1.0])
    sums = _block_sums(weights)
    for uniform in (0.0, 2.0**-52, 0.5, 1 - 2.0**-51, 1 - 2.0**-52):
        (token,) = _draw_from_all(weights, sums, [uniform])
        assert weights[0, token] > 0


def test_rare_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_should() -> None:
    """One token has half the mass, 150,000 share the rest: float32 sums over all of them would be too coarse."""
    vocab, draws = 150_001, 300
    logits = torch.zeros(vocab)
    logits[70_000] = math.log(vocab - 1)
    tokens = [draw_one(logits, row(seed=seed)).token_id for seed in range(draws)]
    rare = [token for token in tokens if token != 70_000]
    assert abs(len(rare) - draws / 2) < 5 * math.sqrt(draws / 4)
    below = sum(token < 70_000 for token in rare)
    assert abs(below / len(rare) - 70_000 / vocab) < 5 * math.sqrt(0.25 / len(rare))
    assert len(set(rare)) > 0.9 * len(rare)


def test_wide_nucleus_is_drawn_from_as_a_whole() -> None:
    logits = torch.zeros(5000)
    tokens = {one.token_id for one in sample(logits.repeat(600, 1), [row(seed=s, top_p=0.9) for s in range(600)])}
    assert len(tokens) > 500


# ---------------------------------------------------------------------- seeds
def test_same_seed_and_position_draw_the_same_whatever_the_neighbours() -> None:
    logits = random_logits(200, spread=0.5)
    rows = [
        row(seed=11, top_p=0.95),
        row(temperature=0.0),
        row(seed=3, top_k=20, repetition_penalty=1.3),
        row(seed=-5, min_p=0.01, logprobs=3),
        row(seed=2**63 - 1, logit_bias={7: 3.0}),
    ]
    alone = [draw_one(logits, one).token_id for one in rows]
    together = [one.token_id for one in sample(logits.repeat(5, 1), rows)]
    backwards = [one.token_id for one in sample(logits.repeat(5, 1), rows[::-1])]
    assert together == alone
    assert backwards == alone[::-1]
    torch.manual_seed(123)  # the global generator has no say
    assert [draw_one(logits, one).token_id for one in rows] == alone


def test_every_row_of_a_large_batch_draws_as_it_does_alone() -> None:
    """No row's sums may depend on where in the batch it stands."""
    logits = torch.randn(24, 1000, generator=torch.Generator().manual_seed(5)) * 3
    forms: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 40}, {"min_p": 0.1}]
    rows = [row(seed=i, **forms[i % len(forms)]) for i in range(24)]
    for size in (1, 2, 7, 24):
        drawn = [one.token_id for one in sample(logits[:size].clone(), rows[:size])]
        assert drawn == [draw_one(logits[i], rows[i]).token_id for i in range(size)]


@pytest.mark.parametrize("vocab", [200, 1000, 49152, 151_936])
def test_sums_are_the_same_to_the_last_bit_wherever_the_row_stands(vocab: int) -> None:
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(6)) * 3
    weights = _weights(logits, logits.amax(-1), [0.7] * 5)
    drawn = torch.full((5, 1), vocab // 3)
    for i in range(5):
        alone = _weights(logits[i : i + 1], logits[i : i + 1].amax(-1), [0.7])
        assert torch.equal(alone[0], weights[i])
        assert torch.equal(_block_sums(alone)[0], _block_sums(weights)[i])
        assert torch.equal(_mass_before(alone, drawn[:1])[0], _mass_before(weights, drawn)[i])


def test_draws_differ_between_seeds_and_positions() -> None:
    logits = torch.zeros(1000)
    by_seed = [draw_one(logits, row(seed=seed)).token_id for seed in range(50)]
    by_position = [draw_one(logits, row(seed=1, output=[0] * count)).token_id for count in range(50)]
    assert len(set(by_seed)) > 45
    assert len(set(by_position)) > 45
    assert sum(a == b for a, b in zip(by_seed, by_position, strict=True)) < 3


def test_greedy_takes_the_largest_and_ignores_filters() -> None:
    logits = random_logits()
    assert draw_one(logits, row(temperature=0.0, top_p=0.1, top_k=3, seed=9)).token_id == int(logits.argmax())


# ---------------------------------------------------------------------- adjustments
def adjusted(logits: torch.Tensor, one: SamplingRow) -> torch.Tensor:
    """Logits after bias, penalties and forbidden tokens, which `sample` leaves in place."""
    batch = logits[None].clone()
    sample(batch, [one])
    return batch[0]


def test_penalties_follow_their_formulas() -> None:
    logits = random_logits()
    prompt, output = [3, 4, 4], [5, 6, 6, 6, 3]
    options = {"temperature": 0.0, "prompt": prompt, "output": output}

    repeated = logits.clone()
    for token in {*prompt, *output}:
        repeated[token] = repeated[token] / 1.7 if repeated[token] > 0 else repeated[token] * 1.7
    torch.testing.assert_close(adjusted(logits, row(repetition_penalty=1.7, **options)), repeated)

    present, frequent = logits.clone(), logits.clone()
    for token in set(output):
        present[token] -= 0.9
        frequent[token] -= 0.4 * output.count(token)
    torch.testing.assert_close(adjusted(logits, row(presence_penalty=0.9, **options)), present)
    torch.testing.assert_close(adjusted(logits, row(frequency_penalty=0.4, **options)), frequent)

    both = logits.clone()
    for token in set(output):
        both[token] -= -1.5 + 2.0 * output.count(token)
    combined = row(presence_penalty=-1.5, frequency_penalty=2.0, **options)
    torch.testing.assert_close(adjusted(logits, combined), both)


def test_repetition_penalty_counts_a_token_once_however_often_it_stands() -> None:
    logits = random_logits()
    options = {"temperature": 0.0, "repetition_penalty": 2.0}
    often = adjusted(logits, row(prompt=[3, 5] * 1500, output=[5] * 500, **options))
    assert torch.equal(often, adjusted(logits, row(prompt=[3], output=[5], **options)))


def test_penalties_without_output_change_nothing() -> None:
    logits = random_logits()
    one = row(temperature=0.0, prompt=[1, 2], presence_penalty=2.0, frequency_penalty=2.0)
    assert torch.equal(adjusted(logits, one), logits)


def test_logit_bias_is_added_before_penalties() -> None:
    logits = torch.zeros(10)
    one = row(temperature=0.0, prompt=[2], logit_bias={2: 4.0, 5: -100.0}, repetition_penalty=2.0)
    expected = torch.tensor([0.0, 0.0, 2.0, 0.0, 0.0, -100.0, 0.0, 0.0, 0.0, 0.0])
    assert torch.equal(adjusted(logits, one), expected)
    assert draw_one(logits, one).token_id == 2


def test_bias_of_a_hundred_forces_and_bans_a_token() -> None:
    logits = random_logits()
    favourite = int(logits.argmax())
    assert {draw_one(logits, row(seed=s, logit_bias={9: 100})).token_id for s in range(50)} == {9}
    assert favourite not in {draw_one(logits, row(seed=s, logit_bias={favourite: -100})).token_id for s in range(200)}


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.tensor([5.0, 6.0, 0.0, 0.0])
    assert draw_one(logits, row(temperature=0.0, forbidden=[0, 1])).token_id == 2
    assert {draw_one(logits, row(seed=s, forbidden=[0, 1])).token_id for s in range(100)} == {2, 3}
    assert draw_one(logits, row(temperature=0.0, forbidden=[0, 1], logit_bias={1: 100})).token_id == 2


# ---------------------------------------------------------------------- log probabilities
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs_are_the_log_softmax_of_the_unmodified_logits(num_top: int) -> None:
    logits = random_logits()
    params = {"temperature": 1.7, "top_k": 4, "logit_bias": {3: 5.0}, "repetition_penalty": 1.5}
    exact = logits.double().log_softmax(-1)
    one = draw_one(logits, row(logprobs=num_top, prompt=[3, 4], seed=2, **params))
    assert one.logprob == pytest.approx(float(exact[one.token_id]), abs=1e-5)
    values, ids = exact.topk(num_top)
    assert [token for token, _ in one.top] == ids.tolist()
    assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_are_left_out_unless_asked_for() -> None:
    assert draw_one(random_logits(), row()).logprob is None


def test_more_logprobs_than_tokens_gives_all_tokens() -> None:
    assert len(draw_one(random_logits(7), row(logprobs=20)).top) == 7


# ---------------------------------------------------------------------- not finite
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_row_without_a_finite_maximum_is_flagged_and_touches_no_other(bad: float | None) -> None:
    logits = random_logits().repeat(4, 1)
    rows = [row(temperature=0.0), row(seed=1, logprobs=2, top_p=0.5), row(seed=2, logprobs=2), row(seed=3)]
    expected = sample(logits.clone(), rows)
    broken = logits.clone()
    for index in (1, 3):
        if bad is None:
            broken[index] = float("-inf")
        else:
            broken[index, 17] = bad
    got = sample(broken, rows)
    assert [one.is_finite for one in got] == [True, False, True, False]
    assert (got[0], got[2]) == (expected[0], expected[2])


def test_minus_infinity_beside_finite_logits_is_fine() -> None:
    logits = torch.full((20,), float("-inf"))
    logits[[4, 9]] = torch.tensor([1.0, 2.0])
    for params in ({}, {"top_p": 0.99}, {"top_k": 10}, {"min_p": 0.01}):
        drawn = [draw_one(logits, row(seed=s, **params)) for s in range(60)]
        assert {one.token_id for one in drawn} == {4, 9}
        assert all(one.is_finite for one in drawn)


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 10), []) == []
