"""The verification gate on a GPU: its own kernels, graphs and overlapping steps, beside requests that run."""

import dataclasses
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapters import Adapter, AdapterLimits, load_adapter
from loraplex.core import AdapterComparison, AdapterDigest, SamplingParams
from loraplex.engine import AsyncEngine
from loraplex.engine.batch import BatchBuilder
from loraplex.engine.packing import PackedAdapter
from loraplex.kernels import LoraBatch
from loraplex.scheduler import StepPlan
from tests import oracle
from tests.oracle import Harness

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
LONG = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
Served = tuple[Path, list[Path]]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A base in bfloat16 and adapters of several ranks."""
    base = oracle.make_base(tmp_path_factory.mktemp(request.param), request.param, dtype=torch.bfloat16, **SHAPE)
    adapters = [
        oracle.make_adapter(tmp_path_factory.mktemp("adapter"), base, rank=rank, seed=rank, size=0.5)
        for rank in (4, 33, 128)
    ]
    return base, adapters


def make_harness(base: Path, **settings: Any) -> Harness:
    defaults = {"dtype": "bfloat16", "device": "cuda", "kv_pages": 300, "max_num_seqs": 16, "memory_bytes": None}
    return Harness(base, **(defaults | settings))


def read(harness: Harness, path: Path) -> Adapter:
    return load_adapter(path, harness.engine.base, AdapterLimits())


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_exact_adapters_pass_and_wrong_tables_fail(
    enforce_eager: bool, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, paths = served
    harness = make_harness(base, enforce_eager=enforce_eager)
    for path in paths:
        figures = harness.engine.compare(read(harness, path))
        assert figures.passed, figures
        assert figures.effect > 10 * figures.kl
    built = BatchBuilder.lora

    def doubled(self: BatchBuilder, plan: StepPlan, packed: Mapping[AdapterDigest, PackedAdapter]) -> LoraBatch:
        batch = built(self, plan, packed)
        return dataclasses.replace(batch, scale=2 * batch.scale)

    monkeypatch.setattr(BatchBuilder, "lora", doubled)
    fresh = make_harness(base, enforce_eager=enforce_eager)
    for path in paths:
        assert not fresh.engine.compare(read(fresh, path)).passed


def test_requests_that_run_keep_their_own_weights(served: Served) -> None:
    """A comparison in the midst of requests: they go on with what the references compute.

    Not bit for bit: cuBLAS takes other algorithms for a batch of another size, with or without adapters.
    """
    base, paths = served
    harness = make_harness(base)
    refs = [None, harness.load("a", paths[0])]
    prompts = [oracle.random_prompt(7 + 9 * i, seed=i) for i in range(6)]
    asked = [(harness.add(prompt, LONG, refs[i % 2]), prompt, i % 2) for i, prompt in enumerate(prompts)]
    for _ in range(8):
        harness.step()
    assert harness.engine.compare(read(harness, paths[1])).passed
    assert any(len(harness.trace(name).tokens) < LONG.max_tokens for name, _, _ in asked)
    harness.run()
    assert all(len(harness.trace(name).tokens) == LONG.max_tokens for name, _, _ in asked)
    oracle.assert_equal_references(harness, served, asked)
    harness.check_all_free()


def write_overflowing(source: Path, target: Path) -> Path:
    """An adapter whose values are finite and whose products are not."""
    target.mkdir()
    (target / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    tensors = load_file(source / "adapter_model.safetensors")
    save_file({name: value.sign() * 1e38 for name, value in tensors.items()}, target / "adapter_model.safetensors")
    return target


def test_overflow_fails_and_the_engine_goes_on(served: Served, tmp_path: Path) -> None:
    base, paths = served
    broken = write_overflowing(paths[0], tmp_path / "broken")
    harness = make_harness(base)
    figures = harness.engine.compare(read(harness, broken))
    assert figures.max_logit_difference == AdapterComparison.LARGEST
    assert not figures.passed
    assert harness.engine.compare(read(harness, paths[0])).passed


def test_overflow_in_a_mixed_batch_changes_no_bit_of_others(served: Served, tmp_path: Path) -> None:
    base, paths = served
    once = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    broken = write_overflowing(paths[1], tmp_path / "broken")

    def run(third: Path) -> tuple[Harness, list[str], list[str]]:
        harness = make_harness(base)
        refs = [None, harness.load("a", paths[0]), harness.load("third", third)]
        others, asked = [], []
        for wave in range(3):
            others += [
                harness.add(oracle.random_prompt(3 + 7 * i, seed=10 * wave + i), LONG, refs[i % 2]) for i in range(4)
            ]
            asked.append(harness.add(oracle.random_prompt(9, seed=wave), once, refs[2]))
            for _ in range(3):
                harness.step()
        harness.run()
        return harness, others, asked

    (quiet, others, _), (mixed, same, asked) = run(paths[1]), run(broken)
    assert set(mixed.failures) == set(asked)
    for one, other in zip(others, same, strict=True):
        a, b = quiet.trace(one), mixed.trace(other)
        assert a.tokens == b.tokens
        assert torch.equal(torch.stack(a.logits), torch.stack(b.logits))


def test_comparison_from_a_worker_thread(served: Served) -> None:
    base, paths = served
    harness = make_harness(base)
    adapter, found = read(harness, paths[1]), list[AdapterComparison]()
    engine = AsyncEngine(harness.engine)
    engine.start()
    try:
        thread = threading.Thread(target=lambda: found.append(engine.compare(adapter)))
        thread.start()
        thread.join(120)
    finally:
        engine.stop()
    assert [figures.passed for figures in found] == [True]
