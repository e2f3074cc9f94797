"""The engine on a GPU against float32 references: graphs under changing mixes, chunks, preemption, poisoned pages."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.core import AdapterRef, SamplingParams
from loraplex.engine import Engine
from tests import oracle
from tests.oracle import Harness, Reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
}
RANKS = (4, 8, 33, 128)
LONG = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
Served = tuple[Path, list[Path]]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "mistral"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A base in bfloat16 and adapters of several ranks, the second of two projections only."""
    family = request.param
    extra = {"sliding_window": 24} if family == "mistral" else {}
    base = oracle.make_base(tmp_path_factory.mktemp(family), family, dtype=torch.bfloat16, **SHAPE, **extra)
    adapters = []
    for i, rank in enumerate(RANKS):
        targets = ("q_proj", "down_proj") if i == 1 else oracle.PROJECTIONS
        directory = tmp_path_factory.mktemp(f"{family}-{rank}")
        adapters.append(oracle.make_adapter(directory, base, rank=rank, seed=i, targets=targets, size=0.5))
    return base, adapters


def poison(engine: Engine) -> None:
    torch.cuda.synchronize()
    oracle.poison_free_pages(engine)
    torch.cuda.synchronize()


def make_harness(served: Served, **settings: Any) -> tuple[Harness, list[AdapterRef | None]]:
    base, adapters = served
    defaults = {"dtype": "bfloat16", "device": "cuda", "kv_pages": 200, "max_num_seqs": 8, "memory_bytes": None}
    harness = Harness(base, poison, **(defaults | settings))
    return harness, [None, *(harness.load(f"a{i}", path) for i, path in enumerate(adapters))]


def make_warm_harness(served: Served) -> tuple[Harness, list[AdapterRef | None]]:
    """With every adapter in the pool, so that requests start in the step they are queued for, whatever loads take."""
    harness, refs = make_harness(served, kv_pages=600)
    for ref in refs:
        harness.answer((1, 2), SamplingParams(max_tokens=1, temperature=0.0), ref)
    assert set(harness.engine.stats().resident_adapters) == {ref.digest for ref in refs if ref is not None}
    return harness, refs


@pytest.fixture(params=["prompts in graphs", "prompts launch by launch"])
def prompts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways that steps with prompts are run."""
    if request.param == "prompts launch by launch":
        monkeypatch.setattr("loraplex.engine.cuda_runner._PROMPT_TOKENS", (0, 0))


@pytest.mark.usefixtures("prompts")
def test_changing_mixes_equal_the_references(served: Served) -> None:
    """Requests of every adapter and the base come and go, so that graphs replay with ever other lists."""
    harness, refs = make_harness(served)
    rng = random.Random(0)
    asked = []
    for turn in range(24):
        which = rng.randrange(len(refs))
        prompt = oracle.random_prompt(rng.randint(1, 60), turn)
        params = SamplingParams(max_tokens=rng.randint(1, 20), temperature=0.0, ignore_eos=True)
        asked.append((harness.add(prompt, params, refs[which]), prompt, which))
        for _ in range(rng.randint(0, 4)):
            harness.step()
    harness.run()
    harness.check_all_free()
    oracle.assert_equal_references(harness, served, asked)


def test_chunks_preemption_and_eviction_change_nothing(served: Served) -> None:
    harness, refs = make_harness(served, kv_pages=100, max_num_batched_tokens=24, max_num_seqs=6, max_loras=2)
    asked = []
    for turn in range(12):
        which = turn % len(refs)
        prompt = oracle.random_prompt(10 + 9 * (turn % 5), turn)
        asked.append((harness.add(prompt, LONG, refs[which]), prompt, which))
    harness.run()
    harness.check_all_free()
    assert harness.engine.stats().num_adapter_evictions > 0
    oracle.assert_equal_references(harness, served, asked)


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["in graphs", "launch by launch"])
def test_engine_measures_itself_and_leaves_nothing_behind(served: Served, *, enforce_eager: bool) -> None:
    harness, refs = make_harness(served, enforce_eager=enforce_eager)
    engine = harness.engine
    engine.calibrate()
    assert engine.scheduler.costs.is_measured
    model = engine.scheduler.costs.model
    assert 0.0 < model.fixed_ms < 1000.0
    assert min(model.token_ms, model.kv_token_ms, model.rank_ms) >= 0.0
    assert engine.scheduler.residency.cost.page_s > 0.0
    assert not torch.any(engine._buffer.flat)
    harness.check_all_free()
    asked = []
    for turn in range(10):
        prompt, which = oracle.random_prompt(5 + 4 * turn, turn), turn % len(refs)
        asked.append((harness.add(prompt, LONG, refs[which]), prompt, which))
    harness.run()
    harness.check_all_free()
    oracle.assert_equal_references(harness, served, asked)


@pytest.mark.usefixtures("prompts")
@pytest.mark.parametrize("max_num_seqs", [8, 100])
def test_prompts_of_any_length_equal_the_references(served: Served, max_num_seqs: int) -> None:
    """Chunks around the sizes of the graphs, which draw at a row each or at their last rows; longer ones without."""
    harness, refs = make_harness(served, max_num_seqs=max_num_seqs, kv_pages=400)
    asked = []
    for turn, length in enumerate((1, 90, 95, 96, 97, 130, 257, 400, 3, 450, 480)):
        prompt, which = oracle.random_prompt(length, turn), turn % len(refs)
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        asked.append((harness.add(prompt, params, refs[which]), prompt, which))
        if turn % 3:
            harness.step()
    harness.run()
    harness.check_all_free()
    oracle.assert_equal_references(harness, served, asked)


@pytest.mark.usefixtures("prompts")
def test_steps_that_overlap_draw_what_the_references_would(served: Served) -> None:
    """Nobody looks at logits and nothing waits for the device: a step is planned before the one before it has ended."""
    base, adapters = served
    harness, refs = make_harness(served)
    engine = harness.engine
    engine._on_logits = harness._before_step = None
    asked, num_in_flight = [], 0
    for turn in range(20):
        which = turn % len(refs)
        prompt = oracle.random_prompt(5 + 3 * turn, turn)
        params = SamplingParams(max_tokens=4 + turn % 13, temperature=0.0, ignore_eos=True)
        asked.append((harness.add(prompt, params, refs[which]), prompt, which))
        harness.step()
        num_in_flight += engine._started is not None
    while engine.has_work:
        harness.step()
        num_in_flight += engine._started is not None
    harness.check_all_free()
    assert num_in_flight > 20
    for which in range(len(refs)):
        reference = Reference(base, adapters[which - 1] if which else None)
        mine = [(prompt, harness.trace(name).tokens) for name, prompt, other in asked if other == which]
        exact = [reference.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :] for prompt, tokens in mine]
        reference.model.to(torch.bfloat16)
        for (prompt, tokens), logits in zip(mine, exact, strict=True):
            rounded = reference.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
            slack = 2 * float((rounded.double() - logits.double()).abs().max())
            drawn = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert float((logits.max(1).values - drawn).max()) <= slack


def test_tokens_do_not_depend_on_the_adapters_beside_them(served: Served) -> None:
    """The same rows in the same places, other adapters in the other rows: not a bit of a row's logits changes."""
    prompts = [oracle.random_prompt(20, seed) for seed in range(8)]
    seen = []
    for others in ((1, 2, 3), (4, 4, 2), (0, 0, 0)):
        harness, refs = make_warm_harness(served)
        mix = [3, others[0], others[1], others[2], 3, others[0], others[1], others[2]]
        names = [harness.add(prompt, LONG, refs[which]) for prompt, which in zip(prompts, mix, strict=True)]
        harness.run()
        seen.append([torch.stack(harness.trace(names[i]).logits) for i in (0, 4)])
    for other in seen[1:]:
        for mine, theirs in zip(seen[0], other, strict=True):
            assert torch.equal(mine, theirs)


def test_tokens_do_not_depend_on_deeper_adapters_beside_them(served: Served) -> None:
    """A row of one chunk of ranks beside rows of one chunk, and beside rows of eight: graphs of another kind run."""
    prompts = [oracle.random_prompt(20, seed) for seed in range(8)]
    seen = []
    for other in (2, 4):
        harness, refs = make_warm_harness(served)
        mix = [1, other, other, other, 1, other, other, other]
        names = [harness.add(prompt, LONG, refs[which]) for prompt, which in zip(prompts, mix, strict=True)]
        harness.run()
        seen.append([torch.stack(harness.trace(names[i]).logits) for i in (0, 4)])
    for mine, theirs in zip(*seen, strict=True):
        assert torch.equal(mine, theirs)


def test_random_draws_with_a_seed_repeat(served: Served) -> None:
    harness, refs = make_harness(served)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
    special = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True, logprobs=2)
    prompt = oracle.random_prompt(15, 3)
    alone = harness.answer(prompt, params, refs[2]).tokens
    assert harness.answer(prompt, params, refs[2]).tokens == alone
    assert harness.answer(prompt, special, refs[2]).tokens == alone


def test_penalties_and_stop_tokens_see_every_token(served: Served) -> None:
    harness, refs = make_harness(served)
    prompt = oracle.random_prompt(9, 1)
    greedy = harness.answer(prompt, LONG, refs[1]).tokens
    stop = greedy[5]
    params = SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=(stop,))
    assert harness.answer(prompt, params, refs[1]).tokens == greedy[: greedy.index(stop) + 1]
    banned = SamplingParams(max_tokens=24, temperature=0.0, logit_bias=tuple((t, -100.0) for t in set(greedy)))
    assert not set(harness.answer(prompt, banned, refs[1]).tokens) & set(greedy)
    unique = SamplingParams(
        max_tokens=24, temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0, ignore_eos=True
    )
    trace = harness.answer(prompt, unique, refs[1])
    seen = torch.zeros(trace.logits[0].shape[0])
    for token, logits in zip(trace.tokens, trace.logits, strict=True):
        assert token == int((logits.float().cpu() - 2.0 * seen - 2.0 * (seen > 0)).argmax())
        seen[token] += 1


def test_work_lists_beyond_the_graphs_run_all_the_same(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex.engine import cuda_runner

    harness, refs = make_harness(served)
    monkeypatch.setattr(cuda_runner, "MAX_ITEMS", 4)  # the lists themselves stay as long as they are
    asked = []
    for turn in range(6):
        prompt = oracle.random_prompt(12, turn)
        asked.append((harness.add(prompt, LONG, refs[4]), prompt, 4))
    harness.run()
    oracle.assert_equal_references(harness, served, asked)


def test_poisonous_adapter_fails_its_own_requests_only(served: Served) -> None:
    """Weights whose product overflows bfloat16's reach give NaN or Inf to their own rows alone."""
    harness, refs = make_harness(served)
    prompt = oracle.random_prompt(20, 2)
    clean = harness.answer(prompt, LONG, refs[1])
    ref = refs[3]
    assert ref is not None
    for run in harness.engine.shelf.packed[ref.digest].image.runs:
        run.fill_(3e38)
    bad = harness.add(prompt, LONG, ref)
    good = harness.add(prompt, LONG, refs[1])
    harness.run()
    assert bad in harness.failures
    assert good not in harness.failures
    oracle.assert_equal_references(harness, served, [(good, prompt, 1)])
    assert harness.trace(good).tokens[0] == clean.tokens[0]


def test_filtered_draws_repeat_and_stay_inside(served: Served) -> None:
    """Top-k, top-p and min-p on the device: the tokens are among those that sorting keeps."""
    harness, refs = make_harness(served)
    prompt = oracle.random_prompt(11, 4)
    for options in ({"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}, {"top_k": 20, "top_p": 0.9, "min_p": 0.01}):
        params = SamplingParams(max_tokens=16, temperature=1.3, seed=9, ignore_eos=True, **options)
        alone = harness.answer(prompt, params, refs[1])
        for token, logits in zip(alone.tokens, alone.logits, strict=True):
            weights = torch.softmax(logits.double().cpu() / 1.3, -1)
            order = weights.argsort(descending=True)
            before = int((order == token).nonzero())
            assert before < options.get("top_k", 10**6)
            assert float(weights[order[:before]].sum()) < options.get("top_p", 1.0)
            assert float(weights[token] / weights.max()) >= options.get("min_p", 0.0)
        mine = harness.add(prompt, params, refs[1])
        harness.add(prompt, SamplingParams(max_tokens=16, temperature=0.7, logprobs=1, ignore_eos=True), refs[3])
        harness.run()
        assert harness.trace(mine).tokens[0] == alone.tokens[0]
