"""Prefixes computed once: the same bits, never another tenant's, never the whole prompt."""

import random
from dataclasses import replace

import pytest
import torch

from loraplex.core import AdapterRef, Request, RequestId, SamplingParams

from ..conftest import MakeAdapter, MakeBase
from ..oracle import GREEDY, VOCAB, Harness, native_note, poison_free_pages, random_prompt

PAGE = 16


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    note = native_note() if request.param == "bfloat16" else None
    if note is not None:
        pytest.skip(note)
    name: str = request.param
    return name


def ask(
    harness: Harness,
    prompt: tuple[int, ...],
    ref: AdapterRef | None = None,
    tenant: str | None = "x",
    params: SamplingParams = GREEDY,
) -> str:
    harness._count += 1
    request_id = RequestId(f"r{harness._count}")
    harness.engine.add_request(Request(request_id, prompt, params, ref, tenant), harness.now)
    return request_id


def cached(harness: Harness, request_id: str) -> int:
    return harness.outputs[request_id][-1].num_cached_tokens


def test_second_request_computes_only_what_is_new(tiny_base: MakeBase, tiny_adapter: MakeAdapter, dtype: str) -> None:
    base = tiny_base("llama")
    harness, plain = (Harness(base, poison_free_pages, dtype=dtype, prefix_caching=on) for on in (True, False))
    adapters = tiny_adapter(base, rank=8)
    system = random_prompt(40)
    for tail in (random_prompt(5, seed=1), random_prompt(9, seed=2)):
        ids = []
        for one in (harness, plain):
            ref = one.load(f"a{tail[0]}", adapters)
            ids.append(ask(one, system + tail, ref))
            one.run()
        mine, wanted = harness.trace(ids[0]), plain.trace(ids[1])
        assert mine.tokens == wanted.tokens
        if dtype == "bfloat16":
            assert torch.equal(torch.stack(mine.logits), torch.stack(wanted.logits)), "other bits"
    assert [cached(harness, f"r{i}") for i in (1, 2)] == [0, 2 * PAGE]
    assert [cached(plain, f"r{i}") for i in (1, 2)] == [0, 0]
    assert harness.engine.stats().num_prompt_tokens == plain.engine.stats().num_prompt_tokens - 2 * PAGE


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1])
def test_at_least_one_token_of_a_prompt_is_computed(tiny_base: MakeBase, length: int) -> None:
    harness = Harness(tiny_base("llama"))
    prompt = random_prompt(length)
    first = ask(harness, prompt)
    harness.run()
    second = ask(harness, prompt)
    harness.run()
    assert cached(harness, second) == (length - 1) // PAGE * PAGE
    assert harness.trace(second).tokens == harness.trace(first).tokens


def test_answer_is_part_of_the_next_prompt(tiny_base: MakeBase) -> None:
    harness = Harness(tiny_base("llama"))
    first = ask(harness, random_prompt(20), params=replace(GREEDY, max_tokens=30))
    harness.run()
    dialogue = (*random_prompt(20), *harness.trace(first).tokens, 5, 6, 7)
    second = ask(harness, dialogue)
    harness.run()
    assert cached(harness, second) == 48, "50 tokens less the last, which was drawn and never computed: three pages"


def test_nothing_is_taken_from_another_tenant_version_or_the_base(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    """Paired, as T17 wants it: the same tenant on the same weights must hit, all others must not."""
    base = tiny_base("llama")
    harness = Harness(base)
    one, other = (harness.load(f"a{i}", tiny_adapter(base, seed=i)) for i in range(2))
    prompt = random_prompt(50)
    ask(harness, prompt, one, "x")
    harness.run()
    for ref, tenant in ((one, "y"), (one, None), (other, "x"), (None, "x"), (None, None), (one, None)):
        request_id = ask(harness, prompt, ref, tenant)
        harness.run()
        assert cached(harness, request_id) == 0, (ref, tenant)
    for ref, tenant in ((one, "x"), (one, "y"), (other, "x"), (None, "x")):
        request_id = ask(harness, prompt, ref, tenant)
        harness.run()
        assert cached(harness, request_id) == 48, (ref, tenant)


def test_choices_of_one_request_share_after_the_first(tiny_base: MakeBase) -> None:
    harness = Harness(tiny_base("llama"), max_num_seqs=1)
    request_id = ask(harness, random_prompt(40), params=replace(GREEDY, n=2))
    harness.run()
    assert harness.engine.stats().num_cached_tokens == 32
    assert cached(harness, request_id) == 0, "the first choice computed all of the prompt"
    assert harness.trace(request_id, 0).tokens == harness.trace(request_id, 1).tokens


def test_retired_adapter_takes_its_prefixes_along(tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    base = tiny_base("llama")
    harness = Harness(base)
    ref = harness.load("a", tiny_adapter(base))
    ask(harness, random_prompt(40), ref)
    ask(harness, random_prompt(40), None)
    harness.run()
    assert harness.engine.stats().num_cached_pages == 2 * (47 // PAGE)
    harness.models.unload("a")
    harness.step()
    assert harness.engine.stats().num_cached_pages == 47 // PAGE, "those of the base stay"
    assert harness.engine.scheduler.residency.num_pages == 0


@pytest.mark.parametrize("seed", [0, 1])
def test_pressure_eviction_and_preemption_change_no_bit(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter, dtype: str, seed: int
) -> None:
    base = tiny_base("llama")
    rng = random.Random(seed)
    paths = [tiny_adapter(base, rank=rank, seed=rank) for rank in (4, 8, 16)]
    asks = []
    for number in range(36):
        topic = random_prompt(rng.choice((16, 33, 48)), seed=number % 2)
        tail = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 20)))
        sampled = {"temperature": 0.8, "seed": number} if number % 3 else {"temperature": 0.0}
        params = SamplingParams(max_tokens=rng.randint(2, 40), ignore_eos=True, **sampled)
        asks.append((topic + tail, rng.choice((None, 0, 0, 1, 2)), rng.choice("xxxy"), params))
    traces = []
    for on, pages in ((True, 34), (False, 400)):
        harness = Harness(
            base, poison_free_pages, dtype=dtype, prefix_caching=on, kv_pages=pages, max_num_batched_tokens=40,
            max_num_seqs=12,
        )  # fmt: skip
        refs = [harness.load(f"a{i}", path) for i, path in enumerate(paths)]
        ids = []
        for prompt, index, tenant, params in asks:
            ids.append(ask(harness, prompt, None if index is None else refs[index], tenant, params))
            harness.step()
        harness.run()
        assert not harness.failures
        traces.append([harness.trace(request_id) for request_id in ids])
        stats = harness.engine.stats()
        if on:
            assert stats.num_cached_tokens > 0
            assert stats.num_prefix_evictions > 0
    for number, (mine, wanted) in enumerate(zip(*traces, strict=True)):
        assert mine.tokens == wanted.tokens, number
        if dtype == "bfloat16":
            assert torch.equal(torch.stack(mine.logits), torch.stack(wanted.logits)), number
