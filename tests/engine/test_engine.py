"""The step loop: what a request gets never depends on what shares its batch, its pool or its moment."""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.core import (
    AdapterRef,
    AdapterRefused,
    ContextTooLong,
    InvalidRequest,
    ModelNotFound,
    NonFiniteOutput,
    Overloaded,
    RefusalReason,
    Request,
    RequestId,
    SamplingParams,
)
from loraplex.engine import Engine

from ..conftest import MakeAdapter, MakeBase
from ..oracle import GREEDY, PROJECTIONS, Harness, native_note, poison_free_pages, random_prompt

RANKS = (1, 2, 3, 4, 5, 8, 12, 16, 16, 17, 24, 32, 33, 48, 64, 64)
TARGETS = (PROJECTIONS, ("q_proj", "v_proj"), ("down_proj", "up_proj"), ("k_proj", "o_proj", "gate_proj"))
SMALL_POOL = {"kv_pages": 38, "max_num_batched_tokens": 40, "max_num_seqs": 32}


@dataclass(frozen=True)
class Ask:
    """One request of the mix; `adapter` is an index into the adapters, None the base."""

    prompt: tuple[int, ...]
    params: SamplingParams
    adapter: int | None


def make_asks() -> list[Ask]:
    """32 requests over 16 adapters and the base, greedy and seeded, short and long."""
    rng = random.Random(7)
    asks = []
    for i in range(32):
        sampled = {"temperature": 0.8, "top_p": 0.9, "seed": i} if i % 3 == 0 else {"temperature": 0.0}
        params = SamplingParams(max_tokens=rng.randint(4, 36), ignore_eos=True, **sampled)
        adapter = i % 17 if i % 17 < 16 else None
        asks.append(Ask(random_prompt(rng.choice((1, 2, 7, 15, 16, 40)), seed=i), params, adapter))
    return asks


ASKS = make_asks()


@dataclass(frozen=True)
class Mix:
    """A base with its adapters, and what every request gives alone."""

    base: Path
    adapters: list[Path]
    dtype: str
    tokens: list[list[int]]
    logits: list[torch.Tensor]

    def check(self, harness: Harness, ids: list[str]) -> None:
        """Token for token in float32; with native operations, bit for bit in every logit."""
        assert not harness.failures
        for number, request_id in enumerate(ids):
            trace = harness.trace(request_id)
            assert trace.tokens == self.tokens[number], f"request {number} differs from itself alone"
            if self.dtype == "bfloat16":
                assert torch.equal(torch.stack(trace.logits), self.logits[number]), f"request {number}: other bits"
        harness.check_all_free()


@pytest.fixture(scope="module", params=["float32", "bfloat16", "bfloat16-gemma2"])
def mix(request: pytest.FixtureRequest, tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> Mix:
    dtype, _, family = request.param.partition("-")
    note = native_note() if dtype == "bfloat16" else None
    if note is not None:
        pytest.skip(note)
    base = tiny_base(family or "qwen3", num_hidden_layers=2)
    adapters = [
        tiny_adapter(base, rank=rank, targets=TARGETS[i % 4], seed=i, use_rslora=i % 5 == 0)
        for i, rank in enumerate(RANKS)
    ]
    harness = Harness(base, dtype=dtype)
    refs = [harness.load(f"a{i}", path) for i, path in enumerate(adapters)]
    alone = [harness.answer(ask.prompt, ask.params, ref_of(refs, ask)) for ask in ASKS]
    logits = [torch.stack(trace.logits) for trace in alone]
    return Mix(base, adapters, dtype, [trace.tokens for trace in alone], logits)


def ref_of(refs: list[AdapterRef], ask: Ask) -> AdapterRef | None:
    return None if ask.adapter is None else refs[ask.adapter]


def test_adapters_of_the_mix_all_answer_differently(mix: Mix) -> None:
    greedy = {tuple(tokens[:4]) for tokens, ask in zip(mix.tokens, ASKS, strict=True) if ask.params.greedy}
    assert len(greedy) > 18


def test_one_batch_of_all_equals_each_alone(mix: Mix) -> None:
    harness = Harness(mix.base, dtype=mix.dtype)
    refs = [harness.load(f"a{i}", path) for i, path in enumerate(mix.adapters)]
    ids = [harness.add(ask.prompt, ask.params, ref_of(refs, ask)) for ask in ASKS]
    harness.step()
    assert harness.engine.stats().num_running == 32
    assert harness.engine.stats().num_distinct_adapters == 16
    harness.run()
    mix.check(harness, ids)


def test_preemption_eviction_and_chunked_prefill_change_nothing(mix: Mix) -> None:
    harness = Harness(mix.base, poison_free_pages, dtype=mix.dtype, **SMALL_POOL)
    refs = [harness.load(f"a{i}", path) for i, path in enumerate(mix.adapters)]
    ids = [harness.add(ask.prompt, ask.params, ref_of(refs, ask)) for ask in ASKS]
    harness.run()
    stats = harness.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_adapter_evictions > 0
    mix.check(harness, ids)


@pytest.mark.parametrize("max_loras", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_few_adapters_a_step_change_nothing(mix: Mix, max_loras: int) -> None:
    harness = Harness(mix.base, dtype=mix.dtype, max_loras=max_loras)
    refs = [harness.load(f"a{i}", path) for i, path in enumerate(mix.adapters)]
    ids = [harness.add(ask.prompt, ask.params, ref_of(refs, ask)) for ask in ASKS]
    most = 0
    while harness.engine.has_work:
        harness.step()
        most = max(most, harness.engine.stats().num_distinct_adapters)
    assert most == max_loras
    mix.check(harness, ids)


@pytest.mark.parametrize("seed", [0, 1])
def test_adapters_arriving_and_leaving_between_steps_change_nothing(mix: Mix, seed: int) -> None:
    """Names are loaded just before a request and taken away or replaced right after it."""
    rng = random.Random(seed)
    harness = Harness(mix.base, poison_free_pages, dtype=mix.dtype, **SMALL_POOL)
    models = harness.models
    ids = []
    for number, ask in enumerate(ASKS):
        ref = None
        if ask.adapter is not None:
            name = f"name{rng.randrange(4)}"
            ref = models.load(name, mix.adapters[ask.adapter], created=0.0, replace=True)
        ids.append(harness.add(ask.prompt, ask.params, ref))
        if ref is not None and number % 2:
            models.unload(ref.name)
        for _ in range(rng.randrange(3)):
            harness.step()
    for entry in models.catalog.list():
        models.unload(entry.ref.name)
    harness.run()
    assert harness.engine.stats().num_adapter_loads > len(mix.adapters)
    mix.check(harness, ids)
    harness.step()
    assert harness.engine.scheduler.residency.resident == ()
    assert harness.engine.scheduler.pool.num_free == SMALL_POOL["kv_pages"]


# ---------------------------------------------------------------------- identity
def test_answer_names_the_weights_that_ran(tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    base = tiny_base("llama")
    harness = Harness(base)
    ref = harness.load("customer", tiny_adapter(base, rank=4))
    first, plain = harness.add((1, 2), adapter=ref), harness.add((1, 2))
    harness.run()
    second = harness.add((1, 2), adapter=ref)
    harness.run()
    cold, warm, none = (harness.outputs[i][0].served_by for i in (first, second, plain))
    assert (cold.adapter, warm.adapter, none.adapter) == (ref, ref, None)
    assert (cold.cold, warm.cold, none.cold) == (True, False, False)
    assert cold.load_s > 0
    assert (warm.load_s, none.load_s) == (0.0, 0.0)
    assert none.base_fingerprint == harness.engine.base.fingerprint
    assert cold.model == "customer@1"
    assert cold.system_fingerprint == f"base-{harness.engine.base.fingerprint[:12]}.lora-{ref.digest[:12]}"
    assert none.model == "base"


def test_request_keeps_its_version_while_the_name_moves_on(tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    base = tiny_base("llama")
    harness = Harness(base)
    old, new = tiny_adapter(base, rank=4, seed=1), tiny_adapter(base, rank=4, seed=2)
    first = harness.load("a", old)
    expected = harness.answer((5, 6, 7), adapter=first).tokens
    running = harness.add((5, 6, 7), adapter=first)
    harness.step()
    second = harness.models.load("a", new, created=1.0, replace=True)
    assert (second.version, second.digest != first.digest) == (2, True)
    other = harness.add((5, 6, 7), adapter=second)
    harness.run()
    assert harness.trace(running).tokens == expected
    assert harness.outputs[running][-1].served_by.model == "a@1"
    assert harness.outputs[other][0].served_by.model == "a@2"
    assert harness.trace(other).tokens != expected
    with pytest.raises(ModelNotFound):
        harness.add((5,), adapter=first)


def test_unloaded_adapter_is_not_found_and_its_memory_goes(tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    base = tiny_base("llama")
    harness = Harness(base)
    ref = harness.load("a", tiny_adapter(base, rank=4))
    harness.answer((1,), adapter=ref)
    harness.models.unload("a")
    for _ in range(2):  # at once, and after its memory went
        with pytest.raises(ModelNotFound) as caught:
            harness.add((1,), adapter=ref)
        assert caught.value.model == "a"
        harness.step()
    assert harness.engine.stats().resident_adapters == ()
    assert not harness.engine.shelf.packed
    again = harness.load("a", tiny_adapter(base, rank=4))
    assert (again.version, again.digest) == (2, ref.digest)
    harness.answer((1,), adapter=again)


def test_adapter_never_registered_is_not_found(tiny_base: MakeBase) -> None:
    harness = Harness(tiny_base("llama"))
    with pytest.raises(ModelNotFound):
        harness.add((1,), adapter=AdapterRef("ghost", 1, "0" * 64))  # type: ignore[arg-type]
    assert not harness.engine.has_work


def test_figures_count_what_ran(tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    base = tiny_base("llama")
    harness = Harness(base, max_num_batched_tokens=8)
    ref = harness.load("a", tiny_adapter(base, rank=4))
    harness.add(random_prompt(21), SamplingParams(max_tokens=5, ignore_eos=True), ref)
    harness.add(random_prompt(3), SamplingParams(max_tokens=2, ignore_eos=True))
    assert (harness.engine.stats().num_waiting, harness.engine.stats().waiting_adapters) == (2, ("a",))
    harness.step()
    assert harness.engine.stats().running_adapters == ("a",)
    harness.run()
    stats = harness.engine.stats()
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (24, 7)
    assert (stats.num_adapter_loads, stats.num_running, stats.num_waiting) == (1, 0, 0)
    assert stats.adapter_load_s > 0
    assert stats.resident_adapters == (ref.digest,)
    assert stats.num_free_pages == stats.num_pages - stats.num_adapter_pages


# ---------------------------------------------------------------------- cancelling and refusing
def test_abort_frees_everything_at_any_moment(tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    base = tiny_base("llama")
    harness = Harness(base, kv_pages=60, max_num_batched_tokens=16, max_num_seqs=4)
    ref = harness.load("a", tiny_adapter(base, rank=8))
    params = SamplingParams(max_tokens=30, n=3, temperature=1.0, seed=1, ignore_eos=True)
    for steps in (0, 1, 2, 3, 7, 20):
        ids = [harness.add(random_prompt(30, seed=i), params, ref if i % 2 else None) for i in range(3)]
        for _ in range(steps):
            harness.step()
        survivor = ids.pop()
        for request_id in ids:
            harness.engine.abort(RequestId(request_id))
            harness.engine.abort(RequestId(request_id))  # again: ignored
            harness.engine.scheduler.check_invariants()
        harness.run()
        assert harness.outputs[survivor][-1].finished
        assert not any(output.finished for i in ids for output in harness.outputs.get(i, []))
        harness.check_all_free()
        assert not harness.engine._requests
        assert not harness.engine._owner
        assert not harness.engine._seeds


def test_full_queue_is_overload_and_queues_nothing(tiny_base: MakeBase) -> None:
    harness = Harness(tiny_base("llama"), max_waiting=3)
    harness.add((1,), SamplingParams(n=2))
    with pytest.raises(Overloaded) as caught:
        harness.add((1,), SamplingParams(n=2))
    assert caught.value.retry_after_s > 0
    assert "--max-waiting" in caught.value.message
    harness.add((1,))
    with pytest.raises(Overloaded):
        harness.add((1,))
    harness.step()
    harness.add((1,))
    harness.run()


@pytest.mark.parametrize("token", [-1, 160, 2**40])
def test_prompt_token_outside_the_vocabulary_is_refused(tiny_base: MakeBase, token: int) -> None:
    harness = Harness(tiny_base("llama"))
    with pytest.raises(InvalidRequest) as caught:
        harness.add((1, token))
    assert caught.value.param == "prompt"
    assert "160" in caught.value.message


@pytest.mark.parametrize("params", [{"stop_token_ids": [160]}, {"logit_bias": {160: 1.0}}])
def test_parameter_token_outside_the_vocabulary_is_refused(tiny_base: MakeBase, params: dict) -> None:  # type: ignore[type-arg]
    harness = Harness(tiny_base("llama"))
    with pytest.raises(InvalidRequest):
        harness.add((1,), SamplingParams(**params))


def test_lengths_that_cannot_be_served_are_refused(tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    base = tiny_base("llama")
    harness = Harness(base, kv_pages=12)
    ref = harness.load("a", tiny_adapter(base, rank=8))
    for prompt in ((), random_prompt(192)):  # 12 pages of 16, one token of which is for the answer
        with pytest.raises(ContextTooLong):
            harness.add(prompt, GREEDY)
    with pytest.raises(ContextTooLong) as caught:
        harness.add(random_prompt(100), SamplingParams(max_tokens=50), ref)
    assert "--kv-pages" in caught.value.message
    assert not harness.engine.has_work


def test_running_request_id_is_refused(tiny_base: MakeBase) -> None:
    harness = Harness(tiny_base("llama"))
    request = Request(RequestId("same"), (1,), GREEDY, None)
    harness.engine.add_request(request, 0.0)
    with pytest.raises(InvalidRequest):
        harness.engine.add_request(request, 0.0)
    harness.run()
    assert len(harness.trace("same").tokens) == GREEDY.max_tokens


def test_adapter_larger_than_the_pool_is_refused_and_changes_nothing(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    base = tiny_base("llama")
    harness = Harness(base, kv_pages=20)
    with pytest.raises(AdapterRefused) as caught:
        harness.load("big", tiny_adapter(base, rank=64))
    assert caught.value.reason is RefusalReason.TOO_LARGE
    assert harness.models.catalog.list() == ()
    harness.load("small", tiny_adapter(base, rank=4))


# ---------------------------------------------------------------------- broken weights
def overflowing(source: Path, target: Path) -> Path:
    """An adapter whose values are finite and whose products are not."""
    target.mkdir()
    (target / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    tensors = load_file(source / "adapter_model.safetensors")
    save_file({name: value.sign() * 6e4 for name, value in tensors.items()}, target / "adapter_model.safetensors")
    return target


def make_broken(harness: Harness, tiny_adapter: MakeAdapter, base: Path, tmp_path: Path) -> AdapterRef:
    """Values near the end of float16's range; in wider dtypes, scaled on until float32 overflows."""
    path = overflowing(tiny_adapter(base, rank=8), tmp_path / "broken")
    if harness.engine._decoder.dtype is not torch.float16:
        tensors = load_file(path / "adapter_model.safetensors")
        save_file({name: value.sign() * 1e38 for name, value in tensors.items()}, path / "adapter_model.safetensors")
    return harness.load("broken", path)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_overflowing_adapter_fails_its_own_requests_only(
    dtype: str, tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path
) -> None:
    base = tiny_base("llama")
    is_exact = dtype == "bfloat16" and native_note() is None

    def run(with_broken: bool) -> tuple[Harness, list[str], list[str]]:
        harness = Harness(base, dtype=dtype, kv_pages=200)
        good = harness.load("good", tiny_adapter(base, rank=4))
        neighbours = [harness.add(random_prompt(9, seed=i), adapter=ref) for i, ref in enumerate((good, None, good))]
        doomed = []
        if with_broken:
            broken = make_broken(harness, tiny_adapter, base, tmp_path)
            doomed = [harness.add((3, 4), adapter=broken), harness.add((3,), SamplingParams(n=3, seed=1), broken)]
        harness.run()
        return harness, neighbours, doomed

    (quiet, neighbours, _), (mixed, same, doomed) = run(False), run(True)
    assert set(mixed.failures) == set(doomed)
    for request_id in doomed:
        error = mixed.failures[request_id].error
        assert isinstance(error, NonFiniteOutput)
        assert error.model == "broken@1"
        assert error.served_by is not None
        assert error.served_by.model == "broken@1"
        assert request_id not in mixed.outputs
    for one, other in zip(neighbours, same, strict=True):
        a, b = quiet.trace(one), mixed.trace(other)
        assert a.tokens == b.tokens
        if is_exact:
            assert torch.equal(torch.stack(a.logits), torch.stack(b.logits))
    mixed.check_all_free()
    assert not mixed.engine._owner
    late = mixed.add((1, 2, 3))  # its pages held NaN a moment ago
    mixed.run()
    assert mixed.trace(late).tokens == quiet.answer((1, 2, 3)).tokens


def test_poisoned_pages_are_never_read(tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    base = tiny_base("mistral", sliding_window=8)
    for dtype in ("float32", "bfloat16"):
        clean, poisoned = Harness(base, dtype=dtype), Harness(base, poison_free_pages, dtype=dtype)
        for harness in (clean, poisoned):
            ref = harness.load("a", tiny_adapter(base, rank=17))
            for i in range(6):
                harness.add(
                    random_prompt(5 * i + 1, seed=i), SamplingParams(max_tokens=20, seed=i), ref if i % 2 else None
                )
            harness.run()
        assert not poisoned.failures
        for key, trace in clean.traces.items():
            assert torch.equal(torch.stack(trace.logits), torch.stack(poisoned.traces[key].logits))


def test_idle_engine_steps_without_work(tiny_base: MakeBase) -> None:
    harness = Harness(tiny_base("llama"))
    assert isinstance(harness.engine, Engine)
    harness.step()
    assert harness.engine.stats().num_steps == 0


def test_adapter_whose_load_was_interrupted_is_loaded_before_it_runs(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_base("llama")
    harness = Harness(base)
    refs = [harness.load(f"a{i}", tiny_adapter(base, seed=i)) for i in range(2)]
    prompt = random_prompt(6)
    wanted = [Harness(base), Harness(base)]
    alone = [
        other.answer(prompt, GREEDY, other.load("a", tiny_adapter(base, seed=i))).tokens
        for i, other in enumerate(wanted)
    ]
    load, calls = harness.engine._runner.load, list[object]()

    def interrupted(pages: list[int], image: torch.Tensor) -> None:
        calls.append(pages)
        if len(calls) == 2:
            raise KeyboardInterrupt
        load(pages, image)

    monkeypatch.setattr(harness.engine._runner, "load", interrupted)
    ids = [harness.add(prompt, GREEDY, ref) for ref in refs]
    with pytest.raises(KeyboardInterrupt):
        harness.step()
    for request_id in ids:
        harness.engine.abort(RequestId(request_id))
    assert [harness.answer(prompt, GREEDY, ref).tokens for ref in refs] == alone
    assert len(calls) == 3, "only what was not filled is loaded again"
