"""Random configs of PEFT on random small bases: the engine gives what PEFT gives, and refuses where PEFT fails."""

import json
import random
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from loraplex.adapters import AdapterLimits, load_adapter
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
    kind = rng.choice(["names", "names", "paths", "suffix expression", "layer expression", "lookahead", "all"])
    if kind == "names":
        return some
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
            "[a-m].*_proj",
            "nothing",
            name,
        ]
    )


def draw_pattern(rng: random.Random, projections: tuple[str, ...]) -> dict[str, int]:
    """In the order in which PEFT saves the keys: the first that matches counts."""
    keys = sorted({draw_key(rng, projections) for _ in range(rng.choice([0, 0, 1, 3]))})
    return {key: rng.randint(1, 9) for key in keys}


def draw_config(rng: random.Random, projections: tuple[str, ...]) -> dict[str, Any]:
    targets = draw_targets(rng, projections)
    config: dict[str, Any] = {
        "r": rng.choice([1, 2, 3, 8, 17]),
        "lora_alpha": rng.choice([1, 4, 7.5, 16, -3, 0]),
        "target_modules": targets,
        "use_rslora": rng.random() < 0.3,
        "lora_dropout": 0.1,
        "rank_pattern": draw_pattern(rng, projections),
        "alpha_pattern": draw_pattern(rng, projections),
    }
    if isinstance(targets, list) and rng.random() < 0.4:
        config["layers_to_transform"] = rng.choice([0, [1], [0, 2]])
        config["layers_pattern"] = rng.choice([None, "layers", ["h", "layers"], "(layers|h)"])
    if rng.random() < 0.3:
        config["exclude_modules"] = rng.choice(
            [[rng.choice(projections)], rf".*\.{rng.randrange(NUM_LAYERS)}\..*_proj"]
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


@pytest.mark.parametrize("family", FAMILIES)
def test_random_configs_give_what_peft_gives(family: str, tiny_base: MakeBase, tmp_path: Path) -> None:
    overrides = {} if family == "phi3" else {"tie_word_embeddings": family.startswith("gemma") or family == "llama"}
    base = tiny_base(family, **overrides)
    projections = FUSED_PROJECTIONS if family == "phi3" else PROJECTIONS
    rng, served = random.Random(FAMILIES.index(family)), 0
    harness = Harness(base, memory_bytes=16 * 2**20)
    prompt = random_prompt(21, seed=4)
    for number in range(6):
        config = draw_config(rng, projections)
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
    "targets", ["q_proj", ".*", ".*layernorm", r".*\.(q_proj|input_layernorm)", ".*self_attn", "nothing", ["self_attn"]]
)
def test_where_peft_fails_the_adapter_is_refused(targets: list[str] | str, tiny_base: MakeBase, tmp_path: Path) -> None:
    base = tiny_base("llama")
    assert save(tmp_path / "sound", base, {"r": 2, "target_modules": ["q_proj"]}, seed=1)
    assert not save(tmp_path / "none", base, {"r": 2, "target_modules": targets}, seed=1)
    path = tmp_path / "sound" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": targets}))
    with pytest.raises(AdapterRefused):
        Harness(base).load("a", tmp_path / "sound")
