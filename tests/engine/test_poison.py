"""One poisoned adapter: refused where its file shows it, and else the failure of its own requests and of nobody's else.

Every comparison is of bits. In float32 the rows of a step share products whose bits depend on how many rows there are;
so a quiet adapter of the same shape asks in the poisoned one's place.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.core import AdapterRef, AdapterRefused, NonFiniteOutput, RefusalReason, SamplingParams
from loraplex.engine import runner
from loraplex.kernels import LoraDelta, TorchOps
from loraplex.model import sample
from loraplex.scheduler import StepPlan

from ..conftest import MakeAdapter, MakeBase
from ..oracle import GREEDY, Harness, Trace, native_note, poison_free_pages, random_prompt

DTYPES = ("float32", "bfloat16")
ONCE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, seed=11, ignore_eos=True)

Change = Callable[[str, torch.Tensor], torch.Tensor]


def rewrite(source: Path, target: Path, change: Change) -> Path:
    """A copy of an adapter with other values in its tensors."""
    target.mkdir(exist_ok=True)
    (target / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    tensors = load_file(source / "adapter_model.safetensors")
    save_file(
        {name: change(name, value).contiguous() for name, value in tensors.items()},
        target / "adapter_model.safetensors",
    )
    return target


def at(part: str, size: float, value: float | None = None) -> Change:
    """Huge values of both signs in the tensors whose name has `part`."""

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.sign() * (size if value is None else value) if part in name else tensor

    return change


# Finite in the file and in bfloat16; what they compute is not.
RUNTIME_POISONS: Mapping[str, Change] = {
    "everything at the end of the range": at("lora_", 3e38),
    "products overflow": at("lora_", 1e25),
    "only v, so that keys are sound and values infinite": at("v_proj", 1e30),
    "only q, so that scores are infinite": at("q_proj", 1e30),
    "only the last down": at("layers.2.mlp.down_proj", 1e30),
    "one row of one B": lambda name, tensor: (
        torch.cat((tensor[:1].sign() * 3e38, tensor[1:])) if "layers.0.self_attn.k_proj.lora_B" in name else tensor
    ),
}


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    note = native_note() if request.param == "bfloat16" else None
    if note is not None:
        pytest.skip(note)
    name: str = request.param
    return name


# ---------------------------------------------------------------------- before: what the file shows
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_values_that_are_not_finite_are_refused_while_others_run(
    half: str, stored: torch.dtype, value: float, tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path
) -> None:
    base = tiny_base("llama")

    def one_value(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(stored)
        if name.endswith(f"layers.1.mlp.up_proj.{half}.weight"):
            tensor.view(-1)[-1] = value
        return tensor

    harness = Harness(base)
    prompt = random_prompt(9)
    alone = Harness(base).answer(prompt)
    request_id = harness.add(prompt)
    harness.step()
    with pytest.raises(AdapterRefused) as caught:
        harness.load("poison", rewrite(tiny_adapter(base), tmp_path / "poison", one_value))
    assert caught.value.reason is RefusalReason.NONFINITE
    harness.run()
    assert_same_bits(harness.trace(request_id), alone)
    assert not harness.engine.shelf.packed


# ---------------------------------------------------------------------- during: a mixed batch
def assert_same_bits(one: Trace, other: Trace) -> None:
    assert one.tokens == other.tokens
    assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))
    assert one.last.finish_reason == other.last.finish_reason


class MixedRun:
    """Requests on the base and two adapters, between which one on a third adapter comes, several times."""

    def __init__(self, base: Path, dtype: str, third: Path, tiny_adapter: MakeAdapter) -> None:
        self.harness = harness = Harness(base, poison_free_pages, dtype=dtype, kv_pages=220)
        refs: list[AdapterRef | None] = [None]
        refs += [harness.load(f"good{i}", tiny_adapter(base, rank=4 + 13 * i, seed=20 + i)) for i in range(2)]
        self.third = harness.load("third", third)
        self.others: list[str] = []
        self.asked: list[str] = []
        for wave in range(3):
            for i in range(4):
                params = SAMPLED if i % 2 else GREEDY
                self.others.append(harness.add(random_prompt(3 + 7 * i, seed=10 * wave + i), params, refs[i % 3]))
            for length in (1, 12):
                self.asked.append(harness.add(random_prompt(length, seed=wave), ONCE, self.third))
            for _ in range(3):
                harness.step()
        harness.run()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("kind", RUNTIME_POISONS)
def test_overflow_at_run_time_changes_no_bit_of_others_in_the_batch(
    kind: str, family: str, dtype: str, tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path
) -> None:
    base = tiny_base(family)
    sound = tiny_adapter(base, rank=8, seed=3)
    quiet = MixedRun(base, dtype, sound, tiny_adapter)
    mixed = MixedRun(base, dtype, rewrite(sound, tmp_path / "poison", RUNTIME_POISONS[kind]), tiny_adapter)
    assert not quiet.harness.failures
    # Gemma's norm and caps after each part can bring an infinite product back to finite answers, but not all of them.
    assert set(mixed.harness.failures) <= set(mixed.asked)
    assert mixed.harness.failures, "nothing was poisoned"
    for failure in mixed.harness.failures.values():
        assert isinstance(failure.error, NonFiniteOutput)
        assert failure.error.model == "third@1"
    for one, other in zip(quiet.others, mixed.others, strict=True):
        assert_same_bits(quiet.harness.trace(one), mixed.harness.trace(other))
    mixed.harness.check_all_free()


# ---------------------------------------------------------------------- after: its pages in other hands
class PageWatch:
    """Which pages held KV and which adapters, over all steps."""

    def __init__(self, harness: Harness) -> None:
        self.kv: set[int] = set()
        self.adapters: dict[str, set[int]] = {}
        schedule = harness.engine.scheduler.schedule

        def watched(now: float) -> StepPlan | None:
            plan = schedule(now)
            for chunk in plan.chunks if plan else ():
                self.kv.update(chunk.pages)
            for digest, pages in plan.adapters if plan else ():
                self.adapters.setdefault(digest, set()).update(pages)
            return plan

        harness.engine.scheduler.schedule = watched  # type: ignore[method-assign]


def aftermath(harness: Harness, refs: list[AdapterRef]) -> list[Trace]:
    """Answers one by one, over so many adapters that all pages change hands."""
    traces = []
    for i, ref in enumerate([None, *refs, None, *refs]):
        traces.append(harness.answer(random_prompt(100, seed=i), SAMPLED, ref))
    return traces


@pytest.mark.parametrize("is_unloaded", [False, True])
@pytest.mark.parametrize(
    "kind", ["everything at the end of the range", "only v, so that keys are sound and values infinite"]
)
def test_pages_of_a_poisoned_adapter_are_clean_for_whoever_gets_them(
    kind: str, is_unloaded: bool, dtype: str, tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path
) -> None:
    base = tiny_base("llama")
    good = [tiny_adapter(base, rank=8, seed=30 + i) for i in range(3)]
    poison_path = rewrite(tiny_adapter(base, rank=8, seed=3), tmp_path / "poison", RUNTIME_POISONS[kind])
    settings = {"dtype": dtype, "kv_pages": 16}

    clean = Harness(base, **settings)
    wanted = aftermath(clean, [clean.load(f"g{i}", path) for i, path in enumerate(good)])

    harness = Harness(base, **settings)
    watch = PageWatch(harness)
    refs = [harness.load(f"g{i}", path) for i, path in enumerate(good)]
    poison = harness.load("poison", poison_path)
    doomed = [harness.add(random_prompt(30, seed=i), GREEDY, poison) for i in range(2)]
    harness.run()
    assert set(harness.failures) == set(doomed)
    held = watch.adapters[poison.digest] | watch.kv
    watch.kv.clear()
    if is_unloaded:
        harness.models.unload("poison")
        harness.step()
        assert poison.digest not in harness.engine.stats().resident_adapters
    got = aftermath(harness, refs)
    assert harness.engine.stats().num_adapter_evictions > 0
    assert held & watch.kv, "no page of the poisoned one came to hold KV"
    assert any(held & pages for digest, pages in watch.adapters.items() if digest != poison.digest), "nor an adapter"
    for one, other in zip(wanted, got, strict=True):
        assert_same_bits(one, other)
    harness.check_all_free()


# ---------------------------------------------------------------------- these tests can fail
def test_without_the_check_of_logits_the_poisoned_request_would_be_answered(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_base("llama")
    path = rewrite(tiny_adapter(base, rank=8), tmp_path / "poison", RUNTIME_POISONS["products overflow"])
    monkeypatch.setattr(
        runner, "sample", lambda *args: [dataclasses.replace(one, is_finite=True) for one in sample(*args)]
    )
    harness = Harness(base, kv_pages=220)
    harness.answer((1, 2, 3), ONCE, harness.load("poison", path))
    assert not harness.failures


def test_a_leak_between_rows_would_be_seen(
    tiny_base: MakeBase, tiny_adapter: MakeAdapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_base("llama")
    path = rewrite(tiny_adapter(base, rank=8), tmp_path / "poison", RUNTIME_POISONS["products overflow"])
    silu_and_mul = TorchOps.silu_and_mul

    def leaking(self: TorchOps, gate_up: torch.Tensor, out: torch.Tensor, delta: LoraDelta | None = None) -> None:
        silu_and_mul(self, gate_up, out, delta)
        out += 0.0 * out.sum()

    monkeypatch.setattr(TorchOps, "silu_and_mul", leaking)
    mixed = MixedRun(base, "float32", path, tiny_adapter)
    assert set(mixed.harness.failures) & set(mixed.others), "rows that share a step with the poison"
