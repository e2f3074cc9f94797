"""Bringing a base up, and the settings that cannot work."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.core import BaseRefused, ConfigError, RefusalReason
from loraplex.engine import EngineConfig, load_base
from loraplex.engine.batch import PageBuffer
from loraplex.engine.loading import _check_gpu_memory
from loraplex.kernels import choose_ops
from loraplex.model import read_config
from loraplex.pool import KvShape, PoolGeometry

from ..conftest import MakeBase
from ..oracle import Harness, edit_config, native_note, random_prompt


def load(base: Path, **settings: Any) -> Any:
    return load_base(base, EngineConfig(**({"num_threads": 1} | settings)))


def test_auto_settings_come_from_the_model(tiny_base: MakeBase) -> None:
    loaded = load(tiny_base("llama"))
    assert loaded.decoder.dtype is torch.float32
    assert loaded.scheduler_config.max_model_len == 256
    assert loaded.description.name == tiny_base("llama").name
    assert loaded.description.num_layers == 3
    assert len(loaded.description.sites) == 21
    assert load(tiny_base("llama"), dtype="float16").decoder.dtype is torch.float16


def test_context_is_bounded_by_the_pool(tiny_base: MakeBase) -> None:
    assert load(tiny_base("llama"), kv_pages=3).scheduler_config.max_model_len == 48
    assert load(tiny_base("llama"), kv_pages=3, max_model_len=48).scheduler_config.max_model_len == 48


def test_length_that_the_pool_cannot_hold_is_refused(tiny_base: MakeBase) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tiny_base("llama"), kv_pages=3, max_model_len=49)
    for part in ("max_model_len 49", "48 tokens", "3 pages of 16", "--max-model-len", "--kv-pages", "--memory"):
        assert part in caught.value.message


def test_length_above_the_context_is_refused(tiny_base: MakeBase) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tiny_base("llama"), max_model_len=257)
    for part in ("257", "256", "--max-model-len"):
        assert part in caught.value.message


def test_length_above_the_original_one_of_longrope_is_refused(tiny_base: MakeBase) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64} | factors
    base = tiny_base("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    assert load(base).scheduler_config.max_model_len == 64
    with pytest.raises(ConfigError, match="longrope"):
        load(base, max_model_len=65)


def test_pool_without_a_page_is_refused(tiny_base: MakeBase) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tiny_base("llama"), memory_bytes=1000)
    assert "--memory" in caught.value.message


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("dtype", "int8", "--dtype"),
        ("dtype", None, "--dtype"),
        ("device", "tpu", "device"),
        ("num_threads", 0, "--num-threads"),
        ("max_model_len", 0, "--max-model-len"),
        ("max_model_len", "4096", "--max-model-len"),
        ("max_lora_rank", -1, "--max-lora-rank"),
        ("kv_pages", 0, "--kv-pages"),
        ("kv_pages", 1.5, "--kv-pages"),
        ("memory_bytes", 0, "--memory"),
        ("max_num_batched_tokens", 0, "--max-num-batched-tokens"),
        ("max_num_batched_tokens", True, "--max-num-batched-tokens"),
        ("max_num_seqs", 0, "--max-num-seqs"),
        ("max_loras", 0, "--max-loras"),
        ("max_loras", 1.5, "--max-loras"),
        ("max_waiting", -3, "--max-waiting"),
    ],
)
def test_setting_that_cannot_work_is_refused_with_its_flag(name: str, value: Any, flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})
    assert flag in caught.value.message
    assert repr(value) in caught.value.message


@pytest.mark.parametrize(
    ("settings", "flag"), [({"memory_bytes": 2**60}, "--memory"), ({"kv_pages": 10**15}, "--kv-pages")]
)
def test_pool_beyond_the_memory_is_refused_before_the_weights_load(
    tiny_base: MakeBase, settings: dict[str, int], flag: str
) -> None:
    seen: list[tuple[int, int]] = []
    with pytest.raises(ConfigError) as caught:
        load_base(tiny_base("llama"), EngineConfig(**settings), progress=lambda *step: seen.append(step))
    assert flag in caught.value.message
    assert "GiB" in caught.value.message
    assert seen == []


def test_pool_that_cannot_be_allocated_is_a_mistake_of_the_settings() -> None:
    geometry = PoolGeometry(KvShape(2, 2, 16), num_pages=10**13, page_tokens=16, chunk_rank=16, elem_bytes=4)
    with pytest.raises(ConfigError, match="--kv-pages"):
        PageBuffer(geometry, torch.float32, torch.device("cpu"))


def test_default_number_of_sequences_follows_a_small_budget(tiny_base: MakeBase) -> None:
    config = load(tiny_base("llama"), max_num_batched_tokens=5).scheduler_config
    assert (config.max_step_tokens, config.max_num_seqs) == (5, 5)


def test_more_sequences_than_the_budget_has_tokens_are_refused(tiny_base: MakeBase) -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs"):
        load(tiny_base("llama"), max_num_batched_tokens=5, max_num_seqs=6)


def test_base_that_is_refused_names_why(tiny_base: MakeBase, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_base("llama"), base)
    (base / "tokenizer.json").unlink()
    with pytest.raises(BaseRefused) as caught:
        load(base)
    assert caught.value.subject == "tokenizer.json"
    edit_config(base, lambda raw: raw.update(architectures=["GPT2LMHeadModel"], model_type="gpt2"))
    with pytest.raises(BaseRefused) as caught:
        load(base)
    assert caught.value.reason is RefusalReason.ARCHITECTURE_UNSUPPORTED
    with pytest.raises(BaseRefused) as caught:
        load(tmp_path / "nowhere")
    assert caught.value.reason is RefusalReason.CONFIG_MISSING


def test_pages_hold_a_rank_of_the_fused_projections(tiny_base: MakeBase) -> None:
    base = tiny_base("phi3", num_hidden_layers=1, num_key_value_heads=1, intermediate_size=1000)
    geometry = load(base).geometry
    assert geometry.page_elems >= 2000
    assert geometry.chunk_rank >= 1


@pytest.mark.parametrize(
    ("family", "overrides", "missing"),
    [
        ("llama", {}, ""),
        ("qwen3", {}, ""),
        ("gemma", {}, "GeLU, norms by 1 + weight, scaled embeddings"),
        ("gemma2", {}, "GeLU, norms by 1 + weight, norms after attention and MLP, scaled embeddings, soft caps"),
        ("gemma3_text", {}, "GeLU, norms by 1 + weight, norms after attention and MLP, scaled embeddings"),
        ("phi3", {}, "adapters on fused projections"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "adapters on fused projections, partial rotary embeddings",
        ),
    ],
)
def test_gpu_kernels_are_not_chosen_for_what_they_lack(
    family: str, overrides: dict[str, Any], missing: str, tiny_base: MakeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice alone: nothing of it needs a GPU until the CUDA operations themselves are made."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    model = read_config(tiny_base(family, **overrides))
    assert model.extras == missing
    if missing:
        choice = choose_ops(torch.device("cuda"), torch.bfloat16, 1, 64, 1, model.extras)
        assert choice.ops.name == "torch"
        assert choice.note is not None
        assert choice.note.startswith(f"the CUDA kernels do not serve {missing};")


def test_progress_counts_layers(tiny_base: MakeBase) -> None:
    seen: list[tuple[int, int]] = []
    load_base(tiny_base("llama"), EngineConfig(num_threads=1), progress=lambda *step: seen.append(step))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_operations_that_run_are_named(tiny_base: MakeBase) -> None:
    plain = load(tiny_base("llama"), dtype="float32")
    assert (plain.kernels, plain.note is not None) == ("torch", True)
    if native_note() is None:
        native = load(tiny_base("llama"), dtype="bfloat16")
        assert (native.kernels.startswith("native"), native.note) == (True, None)
        native = load(tiny_base("gemma2"), dtype="bfloat16")
        assert (native.kernels.startswith("native"), native.note) == (True, None)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_number_of_threads_changes_no_bit(family: str, tiny_base: MakeBase) -> None:
    note = native_note()
    if note is not None:
        pytest.skip(note)
    prompt = random_prompt(40)
    one, two = (Harness(tiny_base(family), dtype="bfloat16", num_threads=n).answer(prompt) for n in (1, 2))
    assert torch.equal(torch.stack(one.logits), torch.stack(two.logits))


@pytest.mark.parametrize(("free_gib", "fits"), [(4, False), (5, True)])
def test_a_pool_that_does_not_fit_beside_the_base_on_a_gpu_is_refused(free_gib: int, fits: bool) -> None:
    geometry = PoolGeometry(KvShape(1, 1, 64), 2**21, 4, 4, 2)  # 2 GiB
    check = partial(_check_gpu_memory, geometry, "--kv-pages", free_gib * 2**30, 3 * 2**30)
    if fits:
        check()
        return
    with pytest.raises(ConfigError, match=r"2 GiB.*4 GiB free.*take 3 GiB. Lower --kv-pages"):
        check()
