"""Checkpoint files: what is refused, and the fingerprint."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.core import BaseRefused, RefusalReason
from loraplex.model import Checkpoint, base_fingerprint, checkpoint, open_checkpoint
from loraplex.model.checkpoint import FINGERPRINT_CACHE, INDEX_FILE, SINGLE_FILE, compute_fingerprint

from ..conftest import MakeBase
from ..oracle import edit_config

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def base(tiny_base: MakeBase, tmp_path: Path) -> Path:
    """A base of its own, to be spoiled."""
    shutil.copytree(tiny_base("llama"), tmp_path / "base")
    (tmp_path / "base" / FINGERPRINT_CACHE).unlink(missing_ok=True)
    return tmp_path / "base"


def change_tensors(base: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(base / SINGLE_FILE)
    change(tensors)
    save_file(tensors, base / SINGLE_FILE)


def shard(base: Path) -> None:
    """Spread the tensors over three files, in no order."""
    tensors = load_file(base / SINGLE_FILE)
    (base / SINGLE_FILE).unlink()
    names = sorted(tensors, key=lambda name: name[::-1])
    index = {}
    for i in range(3):
        file = f"model-{i}.safetensors"
        index |= dict.fromkeys(names[i::3], file)
        save_file({name: tensors[name] for name in names[i::3]}, base / file)
    (base / INDEX_FILE).write_text(json.dumps({"weight_map": index}))


def refusal(base: Path) -> BaseRefused:
    with pytest.raises(BaseRefused) as caught:
        open_checkpoint(base)
    return caught.value


def fingerprint(base: Path) -> str:
    return base_fingerprint(Checkpoint(base))


# ---------------------------------------------------------------------- refusals
def test_missing_tensor_is_refused_by_name(base: Path) -> None:
    change_tensors(base, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    error = refusal(base)
    assert error.reason is RefusalReason.KEY_UNMATCHED
    assert error.subject == "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.3.input_layernorm.weight", "score.weight"]
)
def test_tensor_the_architecture_does_not_use_is_refused_by_name(base: Path, name: str) -> None:
    change_tensors(base, lambda tensors: tensors.update({name: torch.ones(64)}))
    error = refusal(base)
    assert (error.reason, error.subject) == (RefusalReason.KEY_UNMATCHED, name)


def test_derived_tables_are_ignored(base: Path) -> None:
    change_tensors(base, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    open_checkpoint(base)


@pytest.mark.parametrize("shape", [(64, 32), (63, 64), (64 * 64,), (1, 64, 64)])
def test_wrong_shape_is_refused_with_both_shapes(base: Path, shape: tuple[int, ...]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    change_tensors(base, lambda tensors: tensors.update({name: torch.ones(shape)}))
    error = refusal(base)
    assert (error.reason, error.subject) == (RefusalReason.SHAPE_MISMATCH, name)
    assert str(list(shape)) in error.message
    assert "[64, 64]" in error.message


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64])
def test_dtype_that_is_not_a_plain_float_is_refused(base: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.gate_proj.weight"
    change_tensors(base, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    error = refusal(base)
    assert (error.reason, error.subject) == (RefusalReason.DTYPE_UNSUPPORTED, name)


def test_head_beside_a_tied_config_must_be_the_embedding(tiny_base: MakeBase, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_base("llama", tie_word_embeddings=True), base)
    change_tensors(base, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    open_checkpoint(base)
    change_tensors(base, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] * 2}))
    error = refusal(base)
    assert (error.reason, error.subject) == (RefusalReason.FIELD_INVALID, "lm_head.weight")


def test_untied_config_needs_a_head(base: Path) -> None:
    change_tensors(base, lambda tensors: tensors.pop("lm_head.weight"))
    assert refusal(base).subject == "lm_head.weight"


def test_only_pickled_weights_are_refused_unopened(base: Path) -> None:
    (base / SINGLE_FILE).unlink()
    (base / "pytorch_model.bin").write_bytes(b"not even a pickle")
    error = refusal(base)
    assert (error.reason, error.subject) == (RefusalReason.WEIGHTS_UNSAFE_FORMAT, "pytorch_model.bin")
    assert "safetensors" in error.message


def test_no_weights_are_refused(base: Path) -> None:
    (base / SINGLE_FILE).unlink()
    assert refusal(base).reason is RefusalReason.WEIGHTS_MISSING


@pytest.mark.parametrize("size", [0, 4, 1000])
def test_cut_file_is_refused(base: Path, size: int) -> None:
    os.truncate(base / SINGLE_FILE, size)
    assert refusal(base).reason is RefusalReason.WEIGHTS_CORRUPT


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "b", "c": 1}}']
)
def test_bad_index_is_refused(base: Path, content: str) -> None:
    (base / INDEX_FILE).write_text(content)
    assert refusal(base).reason is RefusalReason.WEIGHTS_CORRUPT


@pytest.mark.parametrize("name", ["gone.safetensors", "../base/model.safetensors", "/etc/passwd", ""])
def test_index_that_names_no_file_beside_it_is_refused(base: Path, name: str) -> None:
    (base / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert refusal(base).reason is RefusalReason.WEIGHTS_MISSING


def test_tensor_in_two_shards_is_refused(base: Path) -> None:
    shard(base)
    shutil.copy(base / "model-0.safetensors", base / "model-3.safetensors")
    index = json.loads((base / INDEX_FILE).read_text())
    index["weight_map"]["copy"] = "model-3.safetensors"
    (base / INDEX_FILE).write_text(json.dumps(index))
    assert refusal(base).reason is RefusalReason.KEY_DUPLICATE


def test_quantised_checkpoint_is_refused(base: Path) -> None:
    edit_config(base, lambda raw: raw.update(quantization_config={"quant_method": "awq", "bits": 4}))
    error = refusal(base)
    assert (error.reason, error.subject) == (RefusalReason.FEATURE_UNSUPPORTED, "quantization_config")


# ---------------------------------------------------------------------- fingerprint
def test_fingerprint_is_the_same_however_the_tensors_are_spread(base: Path) -> None:
    whole = fingerprint(base)
    shard(base)
    assert fingerprint(base) == whole
    assert compute_fingerprint(Checkpoint(base), num_threads=1) == whole
    assert len(whole) == 64


def _flip_bit(tensors: Tensors) -> None:
    tensors["model.layers.2.mlp.down_proj.weight"].view(torch.int32)[-1, -1] ^= 1


def _rename(tensors: Tensors) -> None:
    a, b = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
    tensors[a], tensors[b] = tensors[b], tensors[a]


def _reshape(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].reshape(8, 8)


def _retype(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].view(torch.int32)


def _add_empty(tensors: Tensors) -> None:
    tensors["empty"] = torch.empty(0)


@pytest.mark.parametrize("change", [_flip_bit, _rename, _reshape, _retype, _add_empty])
def test_fingerprint_changes_with_any_part_of_a_tensor(base: Path, change: Callable[[Tensors], None]) -> None:
    before = fingerprint(base)
    change_tensors(base, change)
    (base / FINGERPRINT_CACHE).unlink()
    assert fingerprint(base) != before


def test_fingerprint_of_scalars_and_every_dtype(tmp_path: Path) -> None:
    dtypes = (torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.float8_e5m2)
    tensors = {str(dtype): torch.ones((), dtype=dtype) for dtype in dtypes}
    save_file(tensors, tmp_path / SINGLE_FILE)
    assert len(fingerprint(tmp_path)) == 64


def test_a_cache_that_came_with_a_copy_counts_for_nothing(base: Path, tmp_path: Path) -> None:
    """Other weights of the same size and time of writing, as in images that set all times alike."""
    before = fingerprint(base)
    copied = tmp_path / "copy"
    shutil.copytree(base, copied)
    assert (copied / FINGERPRINT_CACHE).exists()
    weights = copied / SINGLE_FILE
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    time = (base / SINGLE_FILE).stat().st_mtime_ns
    os.utime(weights, ns=(time, time))
    assert fingerprint(copied) != before


def test_fingerprint_is_read_from_its_cache_until_size_or_time_change(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(*args: object) -> str:
        calls.append(args)
        return f"{len(calls):064d}"

    monkeypatch.setattr(checkpoint, "compute_fingerprint", counted)
    weights = base / SINGLE_FILE
    first = fingerprint(base)
    assert (fingerprint(base), len(calls)) == (first, 1)
    stat = weights.stat()
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert (fingerprint(base) != first, len(calls)) == (True, 2)
    data = weights.read_bytes()
    (base / "other.safetensors").write_bytes(data)
    size_before = weights.stat()
    change_tensors(base, _add_empty)
    os.utime(weights, ns=(size_before.st_atime_ns, size_before.st_mtime_ns))
    fingerprint(base)
    assert len(calls) == 3
    fingerprint(base)
    assert len(calls) == 3


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"files": []}', '{"files": 1, "fingerprint": 2}'])
def test_unusable_cache_is_replaced(base: Path, content: str) -> None:
    expected = compute_fingerprint(Checkpoint(base))
    (base / FINGERPRINT_CACHE).write_text(content)
    assert fingerprint(base) == expected
    assert json.loads((base / FINGERPRINT_CACHE).read_text())["fingerprint"] == expected


def test_folder_that_cannot_be_written_only_costs_the_hashing(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    before = set(base.iterdir())
    monkeypatch.setattr(Path, "write_text", refuse)  # chmod does not stop root, as whom containers run tests
    first = fingerprint(base)
    assert fingerprint(base) == first
    assert set(base.iterdir()) == before


def test_cache_that_cannot_be_replaced_leaves_no_scratch_file(base: Path) -> None:
    (base / FINGERPRINT_CACHE).mkdir()
    before = set(base.iterdir())
    assert len(fingerprint(base)) == 64
    assert set(base.iterdir()) == before


def test_fingerprint_is_computed_where_its_cache_cannot_be_written(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    expected = compute_fingerprint(Checkpoint(base))
    for name in ("write_text", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    assert fingerprint(base) == expected
