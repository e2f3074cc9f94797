"""The verification gate: what is served right passes, what is served wrong fails, and nobody else notices."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from platformdirs import user_cache_path
from safetensors.torch import load_file, save_file

import loraplex.engine.engine as engine_module
import loraplex.engine.verification as verification
from loraplex.adapters import Adapter, AdapterLimits, AdapterModule, load_adapter
from loraplex.core import (
    AdapterComparison,
    AdapterDigest,
    AdapterRefused,
    ConfigError,
    EngineDead,
    RefusalReason,
    Request,
    RequestId,
    SamplingParams,
)
from loraplex.engine import AsyncEngine, Engine
from loraplex.engine.batch import BatchBuilder
from loraplex.engine.packing import PackedAdapter, find_packing_fault, pack_adapter
from loraplex.engine.probes import PROMPT_LENGTHS, make_probes
from loraplex.engine.site_check import SiteCheck
from loraplex.kernels import LoraBatch
from loraplex.model.gguf_import import ensure_demo_base
from loraplex.scheduler import StepPlan

from ..conftest import MakeAdapter, MakeBase
from ..oracle import CONFIGS, GREEDY, Harness, Reference, native_note, poison_free_pages, random_prompt

DTYPES = ("float32", "bfloat16")
LARGEST = AdapterComparison.LARGEST


def adapter_of(harness: Harness, directory: Path) -> Adapter:
    return load_adapter(directory, harness.engine.base, AdapterLimits())


def edit_tensors(
    source: Path, target: Path, change: Callable[[str, torch.Tensor], torch.Tensor], alpha: float | None = None
) -> Path:
    """A copy of an adapter with other values."""
    target.mkdir()
    config = (source / "adapter_config.json").read_text()
    (target / "adapter_config.json").write_text(config)
    tensors = {name: change(name, value) for name, value in load_file(source / "adapter_model.safetensors").items()}
    save_file(tensors, target / "adapter_model.safetensors")
    return target


def overflowing(source: Path, target: Path) -> Path:
    """Finite values in every type but float16 whose products are not."""
    return edit_tensors(source, target, lambda _, value: value.sign() * 1e38)


# ---------------------------------------------------------------------- what is served right
@pytest.mark.parametrize("dtype", (*DTYPES, "float16"))
@pytest.mark.parametrize("family", CONFIGS)
def test_exact_adapters_of_all_families_pass(
    family: str, dtype: str, tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    base = tiny_base(family)
    harness = Harness(base, dtype=dtype)
    for rank, options in ((1, {}), (8, {}), (33, {"use_rslora": True, "lora_alpha": 12}), (4, {"size": 0.1})):
        figures = harness.engine.compare(adapter_of(harness, tiny_adapter(base, rank=rank, seed=rank, **options)))
        assert figures.passed, (family, dtype, rank, figures)
        assert figures.effect > 0.03
        assert 0 <= figures.kl < 0.02
        assert figures.tolerance < (1e-3 if dtype == "float32" else 3.0)


def test_effect_and_difference_are_those_of_transformers_and_peft(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    base = tiny_base("qwen3")
    directory = tiny_adapter(base, rank=8)
    harness = Harness(base)
    figures = harness.engine.compare(adapter_of(harness, directory))
    plain, adapted = Reference(base), Reference(base, directory, merged=True)
    effect = 0.0
    for probe in make_probes(harness.engine.base.vocab_size, frozenset(), 256):
        rows = slice(len(probe.prompt) - 1, None)
        change = adapted.logits(probe.computed)[rows] - plain.logits(probe.computed)[rows]
        effect = max(effect, float(change.abs().max()))
    assert figures.effect == pytest.approx(effect, rel=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_adapter_without_effect_passes_and_is_seen(
    dtype: str, tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path
) -> None:
    base = tiny_base("llama")
    path = edit_tensors(tiny_adapter(base), tmp_path / "noop", lambda name, value: value * ("lora_A" in name))
    harness = Harness(base, dtype=dtype)
    figures = harness.engine.compare(adapter_of(harness, path))
    assert figures.passed
    assert figures.effect == 0.0


def test_figures_are_the_same_each_time(tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    base = tiny_base("mistral")
    harness = Harness(base)
    adapter = adapter_of(harness, tiny_adapter(base))
    assert harness.engine.compare(adapter) == harness.engine.compare(adapter)


def test_probes_cover_prefill_over_several_chunks_and_decoding(tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    base = tiny_base("llama")
    harness = Harness(base, max_num_batched_tokens=32)
    plans: list[StepPlan] = []
    launch = harness.engine._runner.launch
    harness.engine._runner.launch = lambda step: plans.append(step.plan) or launch(step)  # type: ignore[method-assign, func-returns-value]
    assert harness.engine.compare(adapter_of(harness, tiny_adapter(base))).passed
    chunks = [chunk for plan in plans for chunk in plan.chunks]
    assert any(chunk.start > 0 and chunk.num_tokens > 1 for chunk in chunks), "no prompt came in pieces"
    assert sum(chunk.num_tokens == 1 and chunk.start > 0 for chunk in chunks) >= 2 * 5 * len(PROMPT_LENGTHS)
    assert all(chunk.num_tokens for chunk in chunks)


@pytest.mark.parametrize("settings", [{"max_model_len": 8}, {"max_model_len": 2}, {"kv_pages": 24}])
def test_probes_fit_into_small_engines(
    settings: dict[str, int], tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    base = tiny_base("llama")
    harness = Harness(base, **settings)
    assert harness.engine.compare(adapter_of(harness, tiny_adapter(base, rank=1))).passed


def test_probes_avoid_special_tokens_and_stay_in_the_vocabulary() -> None:
    special = frozenset(range(0, 160, 2))
    tokens = {token for probe in make_probes(160, special, 200) for token in (*probe.prompt, *probe.answer)}
    assert len(tokens) > 40
    assert not tokens & special
    assert max(tokens) < 160


# ---------------------------------------------------------------------- what is served wrong
def change_all(**fields: Callable[[AdapterModule], object]) -> Callable[[Adapter], Adapter]:
    """Every module with these fields changed."""

    def mutate(adapter: Adapter) -> Adapter:
        modules = (
            dataclasses.replace(module, **{name: change(module) for name, change in fields.items()})  # type: ignore[arg-type]
            for module in adapter.modules
        )
        return dataclasses.replace(adapter, modules=tuple(modules))

    return mutate


def without(index: int) -> Callable[[Adapter], Adapter]:
    def mutate(adapter: Adapter) -> Adapter:
        modules = list(adapter.modules)
        del modules[index]
        return dataclasses.replace(adapter, modules=tuple(modules))

    return mutate


def swap_layers(module: str) -> Callable[[Adapter], Adapter]:
    """The pairs of one module in the first and the last layer change places."""

    def mutate(adapter: Adapter) -> Adapter:
        modules = list(adapter.modules)
        first, *_, last = (i for i, one in enumerate(modules) if one.site.module == module)
        one, other = modules[first], modules[last]
        modules[first] = dataclasses.replace(other, site=one.site)
        modules[last] = dataclasses.replace(one, site=other.site)
        return dataclasses.replace(adapter, modules=tuple(modules))

    return mutate


def transpose_a(adapter: Adapter) -> Adapter:
    """A of every module read as if it lay column by column."""

    def turned(module: AdapterModule) -> object:
        values = torch.frombuffer(bytearray(module.a.data), dtype=torch.float32).view(module.a.shape)
        data = values.T.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return dataclasses.replace(module.a, data=memoryview(data))

    return change_all(a=turned)(adapter)


MUTANTS: Mapping[str, Callable[[Adapter], Adapter]] = {
    "scale doubled": change_all(scale=lambda module: 2 * module.scale),
    "scale forgotten": change_all(scale=lambda module: 1.0),
    "scale with another rank": change_all(scale=lambda module: module.scale * module.rank**0.5),
    "first site left out": without(0),
    "last site left out": without(-1),
    "sites of two layers swapped": swap_layers("o_proj"),
    "A transposed": transpose_a,
}


def only_logits_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off the comparison of packed values and that of single linears."""
    monkeypatch.setattr(verification, "find_packing_fault", lambda *_: None)
    monkeypatch.setattr(SiteCheck, "find_fault", lambda *_: None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_weights_fail_by_their_logits(
    mutant: str,
    family: str,
    dtype: str,
    tiny_base: MakeBase,
    tiny_adapter: MakeAdapter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The logits alone tell: the comparison of packed values is switched off."""
    base = tiny_base(family)
    harness = Harness(base, dtype=dtype)
    adapter = adapter_of(harness, tiny_adapter(base, rank=8, lora_alpha=20))
    only_logits_tell(monkeypatch)
    monkeypatch.setattr(
        engine_module, "pack_adapter", lambda adapter, *args, **kw: pack_adapter(MUTANTS[mutant](adapter), *args, **kw)
    )
    figures = harness.engine.compare(adapter)
    assert not figures.passed, figures
    assert figures.max_logit_difference < LARGEST


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_weights_fail_by_their_values_too(
    mutant: str, tiny_base: MakeBase, tiny_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a deep base in bfloat16 one wrong site can hide in rounding; its values cannot."""
    base = tiny_base("llama")
    harness = Harness(base, dtype="bfloat16")
    adapter = adapter_of(harness, tiny_adapter(base, rank=8, lora_alpha=20, size=0.01))
    assert harness.engine.compare(adapter).passed
    harness.engine.step(1.0)
    monkeypatch.setattr(
        engine_module, "pack_adapter", lambda adapter, *args, **kw: pack_adapter(MUTANTS[mutant](adapter), *args, **kw)
    )
    figures = harness.engine.compare(adapter)
    assert not figures.passed
    assert figures.failure is not None
    assert "model.layers." in figures.failure
    assert figures.max_logit_difference < LARGEST, "the logits' own figures stay true"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", ["scale", "chunks", "rows"])
def test_wrong_tables_fail(
    what: str, dtype: str, tiny_base: MakeBase, tiny_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right weights, wrongly used."""
    base = tiny_base("llama")
    monkeypatch.setattr(SiteCheck, "find_fault", lambda *_: None)
    harness = Harness(base, dtype=dtype)
    built = BatchBuilder.lora

    def wrong(self: BatchBuilder, plan: StepPlan, packed: Mapping[AdapterDigest, PackedAdapter]) -> LoraBatch:
        batch = built(self, plan, packed)
        if what == "scale":
            return dataclasses.replace(batch, scale=2 * batch.scale)
        if what == "chunks":  # B of each site's neighbour in the table
            return dataclasses.replace(batch, chunk_b=batch.chunk_b.roll(7))
        return dataclasses.replace(batch, seg_slot=torch.full_like(batch.seg_slot, -1))

    adapter = adapter_of(harness, tiny_adapter(base, rank=8))
    assert harness.engine.compare(adapter).passed
    monkeypatch.setattr(BatchBuilder, "lora", wrong)
    figures = harness.engine.compare(adapter)
    assert not figures.passed, figures


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "qwen2"])
@pytest.mark.parametrize("mutant", [*MUTANTS, "one site twice", "B of two sites swapped"])
def test_single_linears_tell_where_logits_cannot(
    mutant: str,
    family: str,
    dtype: str,
    tiny_base: MakeBase,
    tiny_adapter: MakeAdapter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A weak adapter, served wrongly by tables or kernels while its packed values are right."""
    base = tiny_base(family)
    harness = Harness(base, dtype=dtype)
    adapter = adapter_of(harness, tiny_adapter(base, rank=8, lora_alpha=20, size=0.15))
    assert harness.engine.compare(adapter).passed
    built = BatchBuilder.lora

    def wrong(self: BatchBuilder, plan: StepPlan, packed: Mapping[AdapterDigest, PackedAdapter]) -> LoraBatch:
        if mutant in MUTANTS:
            geometry, sites = harness.engine._geometry, harness.engine.base.sites
            served = pack_adapter(MUTANTS[mutant](adapter), sites, geometry, harness.engine.arena.allocate)
            self._buffer.fill(plan.adapters[0][1][: served.num_pages], served.image)
            return built(self, plan, {digest: served for digest, _ in plan.adapters})
        batch = built(self, plan, packed)
        if mutant == "one site twice":
            scale = batch.scale.clone()
            scale[:, -1] *= 2
            return dataclasses.replace(batch, scale=scale)
        last = batch.chunk_b.clone()
        sites_per_layer = len(harness.engine.base.sites) // 3
        last[[0, sites_per_layer]] = last[[sites_per_layer, 0]]
        return dataclasses.replace(batch, chunk_b=last)

    monkeypatch.setattr(BatchBuilder, "lora", wrong)
    assert not harness.engine.compare(adapter).passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_adapter_passes_on_a_base_that_is_served_wrongly(
    dtype: str, tiny_base: MakeBase, tiny_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's error on the base is no excuse without limit."""
    base = tiny_base("llama")
    harness = Harness(base, dtype=dtype)
    ops = harness.engine._decoder.ops
    monkeypatch.setattr(ops, "silu_and_mul", lambda gate_up, out, delta=None: out.fill_(0.5))
    assert not harness.engine.compare(adapter_of(harness, tiny_adapter(base, rank=8))).passed


def test_values_are_compared_one_by_one(tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    base = tiny_base("llama")
    harness = Harness(base)
    adapter = adapter_of(harness, tiny_adapter(base, rank=17))
    sites = harness.engine.base.sites
    packed = pack_adapter(adapter, sites, harness.engine._geometry, harness.engine.arena.allocate)
    assert find_packing_fault(packed, adapter, sites) is None
    page, offset = int(packed.piece_page[1, -1]), int(packed.piece_offset[1, -1])
    packed.image[page][offset] += 1e-3
    fault = find_packing_fault(packed, adapter, sites)
    assert fault is not None
    assert sites[-1].name in fault


# ---------------------------------------------------------------------- overflow
@pytest.mark.parametrize("dtype", DTYPES)
def test_adapter_that_overflows_fails_with_the_largest_figure(
    dtype: str, tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path
) -> None:
    base = tiny_base("llama")
    harness = Harness(base, dtype=dtype, kv_pages=200)
    good, broken = tiny_adapter(base, rank=8), overflowing(tiny_adapter(base, rank=8), tmp_path / "broken")
    alone = harness.answer((1, 2, 3)).tokens
    figures = harness.engine.compare(adapter_of(harness, broken))
    assert figures.max_logit_difference == figures.kl == LARGEST
    assert not figures.passed
    assert harness.engine.compare(adapter_of(harness, good)).passed
    assert harness.answer((1, 2, 3)).tokens == alone
    harness.check_all_free()


def test_values_beyond_the_served_type_are_refused_by_code(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path
) -> None:
    base = tiny_base("llama")
    harness = Harness(base, dtype="float16", kv_pages=200)
    broken = overflowing(tiny_adapter(base, rank=8), tmp_path / "broken")
    with pytest.raises(AdapterRefused) as caught:
        harness.engine.compare(adapter_of(harness, broken))
    assert caught.value.reason is RefusalReason.NONFINITE
    assert harness.engine.compare(adapter_of(harness, tiny_adapter(base, rank=8))).passed


# ---------------------------------------------------------------------- a live engine
def test_adapter_is_there_afterwards_only_if_it_was_before(tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    base = tiny_base("llama")
    harness = Harness(base)
    known, unknown = tiny_adapter(base, seed=1), tiny_adapter(base, seed=2)
    ref = harness.load("known", known)
    for path in (known, unknown):
        assert harness.engine.compare(adapter_of(harness, path)).passed
    harness.step()
    assert set(harness.engine.shelf.packed) == {ref.digest}
    assert set(harness.engine.stats().resident_adapters) <= {ref.digest}
    assert not harness.engine.shelf.held
    assert len(harness.answer((1, 2), GREEDY, ref).tokens) == GREEDY.max_tokens


def test_adapter_added_during_a_comparison_stays_and_one_retired_goes(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    base = tiny_base("llama")
    harness = Harness(base)
    added, retired = (adapter_of(harness, tiny_adapter(base, seed=seed)) for seed in (1, 2))
    harness.engine.add_adapter(retired)
    for adapter in (added, retired):
        harness.engine.hold_adapter(adapter)
    harness.engine.add_adapter(added)
    harness.engine.retire_adapter(retired.digest)
    harness.step()
    assert set(harness.engine.shelf.packed) == {added.digest, retired.digest}, "held for the comparison"
    for adapter in (added, retired):
        harness.engine.release_adapter(adapter.digest)
    harness.step()
    assert set(harness.engine.shelf.packed) == {added.digest}


@pytest.mark.parametrize("is_broken", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_requests_go_on_and_keep_every_bit(
    dtype: str, is_broken: bool, tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path
) -> None:
    base = tiny_base("llama")
    is_exact = dtype == "float32" or native_note() is None
    path = tiny_adapter(base, rank=8, seed=5)
    candidate_path = overflowing(path, tmp_path / "broken") if is_broken else path

    def run(compares: bool) -> Harness:
        harness = Harness(base, poison_free_pages, dtype=dtype, kv_pages=200)
        ref = harness.load("served", tiny_adapter(base, rank=4, seed=6))
        params = SamplingParams(max_tokens=30, temperature=0.9, seed=3, ignore_eos=True)
        for i in range(4):
            harness.add(random_prompt(5 + 9 * i, seed=i), params, ref if i % 2 else None)
        for _ in range(5):
            harness.step()
        if compares:
            assert harness.engine.compare(adapter_of(harness, candidate_path)).passed is not is_broken
        harness.run()
        return harness

    quiet, busy = run(False), run(True)
    assert set(quiet.traces) == set(busy.traces)
    assert not busy.failures
    for key, trace in quiet.traces.items():
        assert busy.traces[key].tokens == trace.tokens
        assert busy.traces[key].last.finish_reason is not None
        if is_exact and dtype == "bfloat16":
            assert torch.equal(torch.stack(trace.logits), torch.stack(busy.traces[key].logits))
    busy.check_all_free()


def test_probes_are_not_counted_among_the_names_that_run(tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    base = tiny_base("llama")
    harness = Harness(base)
    adapter = adapter_of(harness, tiny_adapter(base))
    harness.engine.hold_adapter(adapter)
    harness.engine.start_probes(make_probes(160, frozenset(), 60), adapter)
    harness.step()
    stats = harness.engine.stats()
    assert stats.num_running > 0
    assert stats.running_adapters == stats.waiting_adapters == ()
    assert not harness.outputs


@pytest.fixture
def live(tiny_base: MakeBase) -> AsyncEngine:
    harness = Harness(tiny_base("llama"))
    return AsyncEngine(harness.engine)


def test_comparison_from_worker_threads(live: AsyncEngine, tiny_base: MakeBase, tiny_adapter: MakeAdapter) -> None:
    base = tiny_base("llama")
    adapters = [load_adapter(tiny_adapter(base, seed=seed), live.base, AdapterLimits()) for seed in (1, 2)]
    found: list[AdapterComparison] = []
    live.start()
    try:
        threads = [threading.Thread(target=lambda one=one: found.append(live.compare(one))) for one in adapters * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert live.is_alive
    finally:
        live.stop()
    assert len(found) == 4
    assert all(figures.passed for figures in found)
    assert len(set(found)) == 2


def test_answers_stream_on_while_a_comparison_runs(
    live: AsyncEngine, tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    base = tiny_base("llama")
    adapter = load_adapter(tiny_adapter(base, rank=8), live.base, AdapterLimits())
    params = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
    prompts = [random_prompt(5 + i, seed=i) for i in range(4)]
    alone = [Harness(base).answer(prompt, params).tokens for prompt in prompts]

    async def stream(number: int) -> list[int]:
        request = Request(RequestId(f"r{number}"), prompts[number], params, None)
        outputs = [output async for output in live.generate(request)]
        return [token for output in outputs for delta in output.deltas for token in delta.token_ids]

    async def run() -> tuple[list[list[int]], AdapterComparison]:
        comparing = asyncio.create_task(asyncio.to_thread(live.compare, adapter))
        answers = await asyncio.gather(*(stream(number) for number in range(4)))
        return answers, await comparing

    live.start()
    try:
        answers, figures = asyncio.run(asyncio.wait_for(run(), 120))
    finally:
        live.stop()
    assert answers == alone
    assert figures.passed
    assert not live.engine._requests


def test_comparison_of_a_stopped_engine_raises(
    live: AsyncEngine, tiny_base: MakeBase, tiny_adapter: MakeAdapter
) -> None:
    adapter = load_adapter(tiny_adapter(tiny_base("llama")), live.base, AdapterLimits())
    live.start()
    live.stop()
    with pytest.raises(EngineDead):
        live.compare(adapter)
    assert not live.engine.shelf.held


def test_what_fails_inside_a_comparison_is_for_its_caller_only(
    live: AsyncEngine, tiny_base: MakeBase, tiny_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = load_adapter(tiny_adapter(tiny_base("llama")), live.base, AdapterLimits())

    def broken(*_: object) -> bool:
        raise RuntimeError("out of memory")

    live.start()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(SiteCheck, "find_fault", broken)
            with pytest.raises(RuntimeError, match="out of memory"):
                live.compare(adapter)
        assert live.is_alive
        assert live.compare(adapter).passed
        assert not live.engine.shelf.held
    finally:
        live.stop()


def test_comparison_ends_when_the_engine_dies_meanwhile(
    live: AsyncEngine, tiny_base: MakeBase, tiny_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = load_adapter(tiny_adapter(tiny_base("llama")), live.base, AdapterLimits())

    def broken(self: Engine, now: float) -> None:
        if self.has_work:
            raise RuntimeError("the device is gone")

    monkeypatch.setattr(Engine, "step", broken)
    live.start()
    with pytest.raises(EngineDead):
        live.compare(adapter)
    live.stop()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_example_adapters_of_the_demo_base_pass_and_mutants_fail(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        base = ensure_demo_base(user_cache_path("loraplex") / "smollm2-135m-instruct")
    except ConfigError as error:
        pytest.skip(error.message)
    examples = sorted(path for path in (Path(__file__).parents[2] / "examples" / "adapters").iterdir() if path.is_dir())
    assert len(examples) > 3
    harness = Harness(base, dtype=dtype, memory_bytes=256 * 2**20, num_threads=2)
    adapters = [adapter_of(harness, path) for path in examples]
    for adapter in adapters:
        figures = harness.engine.compare(adapter)
        assert figures.passed, figures
        assert figures.effect > 1
    doubled = MUTANTS["scale doubled"]
    only_logits_tell(monkeypatch)
    monkeypatch.setattr(
        engine_module, "pack_adapter", lambda adapter, *args, **kw: pack_adapter(doubled(adapter), *args, **kw)
    )
    harness.step()
    for adapter in adapters:
        assert not harness.engine.compare(adapter).passed
