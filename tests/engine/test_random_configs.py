"""Random configs of PEFT on random small bases: the engine gives what PEFT gives, and refuses where PEFT fails."""

import json
import random
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers

from loraplex.adapters import AdapterLimits, load_adapter
from loraplex.adapters.targets import _other_names
from loraplex.core import AdapterRefused
from tests import oracle

from ..conftest import MakeBase
from ..oracle import FUSED_PROJECTIONS, GREEDY, PROJECTIONS, Harness, Reference, random_prompt

pytestmark = [  # what PEFT says about configs that are drawn at random
    pytest.mark.filterwarnings("ignore:.*did not match any targeted module:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:You have passed exclude_modules"),
]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3")
NUM_LAYERS = 3


def draw_targets(rng: random.Random, projections: tuple[str, ...]) -> list[str] | str:
    """Names, paths, an expression, or all."""
    some = rng.sample(projections, rng.randint(1, len(projections)))
    kind = rng.choice(["names", "more names", "paths", "suffix expression", "layer expression", "lookahead", "all"])
    if kind == "names":
        return some
    if kind == "more names":  # of other families
        return [*some, "c_attn", "dense", "model.layers.9.mlp.up_proj"]
    if kind == "paths":
        blocks = {name: "mlp" if "gate" in name or "up" in name or "down" in name else "self_attn" for name in some}
        return [f"model.layers.{rng.randrange(NUM_LAYERS)}.{blocks[name]}.{name}" for name in some]
    if kind == "suffix expression":
        return rf".*\.({'|'.join(some)})"
    if kind == "layer expression":
        return rf"model\.layers\.[{rng.randrange(NUM_LAYERS)}{rng.randrange(NUM_LAYERS)}]\..*_proj"
    if kind == "lookahead":
        return rf"^(?!.*(lm_head|layers\.{rng.randrange(NUM_LAYERS)}\b)).*\.({'|'.join(some)})$"
    return "all-linear"


def draw_key(rng: random.Random, projections: tuple[str, ...]) -> str:
    name = rng.choice(projections)
    layer = rng.randrange(NUM_LAYERS)
    return rng.choice(
        [
            name,
            rf"layers\.{layer}\..*",
            rf".*\.{layer}\..*\.{name}",
            f"^model.*{name}$",
            rf"model\.layers\.{layer}\..*{name}",
            f"model.layers.{layer}.mlp.down_proj",
            "[a-m].*_proj",
            "nothing",
            name,
        ]
    )


def draw_pattern(rng: random.Random, projections: tuple[str, ...]) -> dict[str, int]:
    """In the order in which PEFT saves the keys: the first that matches counts."""
    keys = sorted({draw_key(rng, projections) for _ in range(rng.choice([0, 0, 1, 3]))})
    return {key: rng.randint(1, 9) for key in keys}


def draw_config(rng: random.Random, projections: tuple[str, ...], biases: tuple[str, ...] = ()) -> dict[str, Any]:
    targets = draw_targets(rng, projections)
    config: dict[str, Any] = {
        "r": rng.choice([1, 2, 3, 8, 17]),
        "lora_alpha": rng.choice([1, 4, 7.5, 16, -3, 0]),
        "target_modules": targets,
        "use_rslora": rng.random() < 0.3,
        "lora_dropout": 0.1,
        "bias": rng.choice(["none", "none", *biases]),
        "rank_pattern": draw_pattern(rng, projections),
        "alpha_pattern": draw_pattern(rng, projections),
    }
    if isinstance(targets, list) and rng.random() < 0.4:
        config["layers_to_transform"] = rng.choice([0, [1], [0, 2]])
        config["layers_pattern"] = rng.choice([None, "layers", ["h", "layers"], "(layers|h)", "model.layers"])
    if rng.random() < 0.3:
        config["exclude_modules"] = rng.choice(
            [
                [rng.choice(projections)],
                rf".*\.{rng.randrange(NUM_LAYERS)}\..*_proj",
                [f"model.layers.{rng.randrange(NUM_LAYERS)}.mlp.down_proj"],
                rf"model\.layers\.{rng.randrange(NUM_LAYERS)}\..*(q|qkv|up|gate_up)_proj",
            ]
        )
    return config


def save(directory: Path, base: Path, config: dict[str, Any], seed: int) -> bool:
    """Write the adapter by PEFT; False where PEFT finds nothing to adapt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with oracle._peft_warnings():
        try:
            wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config))
        except ValueError as error:
            assert any(word in str(error) for word in ("arget modules", "target_modules", "xclude", "not supported"))
            return False
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)
    wrapped.save_pretrained(directory)
    return True


# What stands for "model.layers" in the paths of a wrapped model, and for a "model" that begins an expression.
WRAPPED = {
    "model.language_model": ("model.language_model.layers", "model"),
    "language_model.model": ("language_model.model.layers", r"language_model\.model"),
    "_orig_mod.model": ("_orig_mod.model.layers", r"_orig_mod\.model"),
    "module._orig_mod.model": ("module._orig_mod.model.layers", r"module\._orig_mod\.model"),
}


def wrap_text(text: str, wrapped: str) -> str:
    """A name, key or expression as the trainer of the wrapped model would have it."""
    layers, first = WRAPPED[wrapped]
    text = text.replace("model.layers", layers).replace(r"model\.layers", layers.replace(".", r"\."))
    return text.replace("^model.*", f"^{first}.*")


def wrap_field(value: Any, wrapped: str) -> Any:
    if isinstance(value, dict):
        return {wrap_text(key, wrapped): number for key, number in value.items()}
    if isinstance(value, list):
        return [wrap_text(entry, wrapped) if isinstance(entry, str) else entry for entry in value]
    return wrap_text(value, wrapped) if isinstance(value, str) else value


def wrap_adapter(directory: Path, source: Path, wrapped: str, outer: str) -> None:
    """The same adapter as if it had been trained on the wrapped model: other names of tensors, other keys."""
    config = json.loads((source / "adapter_config.json").read_text())
    fields = ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "layers_pattern")
    config |= {field: wrap_field(config[field], wrapped) for field in fields}
    tensors = safetensors.torch.load_file(source / "adapter_model.safetensors")
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(config))
    renamed = {outer + wrap_text(name, wrapped): tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(renamed, directory / "adapter_model.safetensors")


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_configs_of_wrapped_models_mean_the_same(family: str, tiny_base: MakeBase, tmp_path: Path) -> None:
    base = tiny_base(family)
    projections = FUSED_PROJECTIONS if family == "phi3" else PROJECTIONS
    description = Harness(base).engine.base
    rng = random.Random(f"wrapped {family}")
    fields = dict.fromkeys(("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "layers_pattern"), 0)
    for number in range(30):
        config = draw_config(rng, projections, ("all", "lora_only"))
        if isinstance(config["target_modules"], list) and number % 2:
            config |= {"layers_to_transform": [0, 2], "layers_pattern": "model.layers"}
        source = tmp_path / str(number)
        if not save(source, base, config, seed=number):
            continue
        digest = load_adapter(source, description, AdapterLimits()).digest
        is_dead = "nothing" in {**config["rank_pattern"], **config["alpha_pattern"]}
        for wrapped in WRAPPED:
            directory, outer = tmp_path / f"{number} {wrapped}", rng.choice(["", "", "module.", "_orig_mod."])
            wrap_adapter(directory, source, wrapped, outer)
            if is_dead:
                with pytest.raises(AdapterRefused, match="nothing"):
                    load_adapter(directory, description, AdapterLimits())
                continue
            assert load_adapter(directory, description, AdapterLimits()).digest == digest, (wrapped, config)
            for field in fields:
                fields[field] += wrap_field(config.get(field), wrapped) != config.get(field)
    assert all(fields.values()), fields


@pytest.mark.parametrize("family", FAMILIES)
def test_all_modules_of_a_family_are_known(family: str, tiny_base: MakeBase) -> None:
    base = tiny_base(family)
    description = Harness(base).engine.base
    known = {*_other_names(NUM_LAYERS), *(site.name for site in description.sites)}
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert {name for name, _ in model.named_modules() if name} <= known
    biased = {name.removesuffix(".bias") for name, _ in model.named_parameters() if name.endswith(".bias")}
    assert biased == {site.name for site in description.sites if site.has_bias}


@pytest.mark.parametrize("family", FAMILIES)
def test_random_configs_give_what_peft_gives(family: str, tiny_base: MakeBase, tmp_path: Path) -> None:
    overrides = {} if family == "phi3" else {"tie_word_embeddings": family.startswith("gemma") or family == "llama"}
    base = tiny_base(family, **overrides)
    projections = FUSED_PROJECTIONS if family == "phi3" else PROJECTIONS
    rng, served = random.Random(FAMILIES.index(family)), 0
    harness = Harness(base, memory_bytes=16 * 2**20)
    prompt = random_prompt(21, seed=4)
    for number in range(6):
        config = draw_config(rng, projections, () if family == "qwen2" else ("all", "lora_only"))
        directory = tmp_path / str(number)
        if not save(directory, base, config, seed=number):
            continue
        served += 1
        ref = harness.load(f"a{number}", directory)
        trace = harness.answer(prompt, GREEDY, ref)
        wide = Reference(base, directory).logits([*prompt, *trace.tokens[:-1]])[len(prompt) - 1 :]
        torch.testing.assert_close(torch.stack(trace.logits), wide, rtol=1e-4, atol=1e-4, msg=f"{config}")
        adapter = load_adapter(directory, harness.engine.base, AdapterLimits())
        figures = harness.engine.compare(adapter)
        assert figures.passed, (config, figures)
        assert (figures.effect == 0.0) == all(module.scale == 0.0 for module in adapter.modules)
    assert served >= 3, "the run was hollow"


@pytest.mark.parametrize(
    "targets",
    [
        "q_proj",
        ".*",
        ".*layernorm",
        r".*\.(q_proj|input_layernorm)",
        ".*self_attn",
        "nothing",
        ["self_attn"],
        ["q_proj", "mlp"],
    ],
)
def test_where_peft_fails_the_adapter_is_refused(targets: list[str] | str, tiny_base: MakeBase, tmp_path: Path) -> None:
    base = tiny_base("llama")
    assert save(tmp_path / "sound", base, {"r": 2, "target_modules": ["q_proj"]}, seed=1)
    assert not save(tmp_path / "none", base, {"r": 2, "target_modules": targets}, seed=1)
    path = tmp_path / "sound" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": targets}))
    with pytest.raises(AdapterRefused):
        Harness(base).load("a", tmp_path / "sound")
