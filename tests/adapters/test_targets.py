"""Expansion of a config over a base. PEFT itself is the oracle for the matching rules."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters.peft_config import parse_document, read_config
from loraplex.adapters.targets import Target, expand_targets
from loraplex.core import AdapterRefused

from .factories import make_base, make_config


def expand(num_layers: int = 2, **changes: Any) -> tuple[Target, ...]:
    document = parse_document(json.dumps(make_config(**changes)).encode())
    return expand_targets(read_config(document), make_base(num_layers))


def names(**changes: Any) -> list[str]:
    return [target.site.name.removeprefix("model.layers.") for target in expand(**changes)]


def reason(**changes: Any) -> str:
    with pytest.raises(AdapterRefused) as caught:
        expand(**changes)
    return caught.value.reason_code


def test_suffixes_and_whole_paths_are_matched_in_base_order() -> None:
    assert names(target_modules=["v_proj", "self_attn.q_proj"]) == [
        "0.self_attn.q_proj",
        "0.self_attn.v_proj",
        "1.self_attn.q_proj",
        "1.self_attn.v_proj",
    ]
    assert names(target_modules=["model.layers.1.mlp.down_proj"]) == ["1.mlp.down_proj"]


@pytest.mark.parametrize("word", ["all-linear", "ALL-Linear"])
def test_all_linear_is_every_site(word: str) -> None:
    assert len(names(target_modules=word)) == 6
    assert len(names(target_modules=word, exclude_modules=["lm_head", "1.mlp.down_proj"])) == 5


def test_excluded_modules_are_left_out() -> None:
    assert names(exclude_modules=["v_proj", "model.layers.0.self_attn.q_proj"]) == ["1.self_attn.q_proj"]
    assert reason(exclude_modules=["q_proj", "v_proj"]) == "TARGET_NOT_COVERED"


def test_layers_are_selected_by_number() -> None:
    assert names(target_modules=["q_proj"], layers_to_transform=1) == ["1.self_attn.q_proj"]
    assert names(target_modules=["q_proj"], layers_to_transform=[0], layers_pattern="layers") == ["0.self_attn.q_proj"]
    assert reason(layers_to_transform=[0], layers_pattern=["h"]) == "TARGET_NOT_COVERED"


@pytest.mark.parametrize("layers", [[0, 2], [-1], 10**30])
def test_layer_the_base_lacks_is_refused(layers: object) -> None:
    assert reason(layers_to_transform=layers) == "TARGET_NOT_COVERED"


@pytest.mark.parametrize(
    "entry", ["c_attn", "proj", "self_attn", "input_layernorm", "", "model.layers.7.mlp.down_proj"]
)
def test_entry_that_names_no_linear_layer_is_refused(entry: str) -> None:
    assert reason(target_modules=["q_proj", entry]) == "TARGET_NOT_COVERED"


@pytest.mark.parametrize("entry", ["lm_head", "embed_tokens", "model.embed_tokens"])
def test_embedding_and_head_are_not_served(entry: str) -> None:
    assert reason(target_modules=["q_proj", entry]) == "FEATURE_UNSUPPORTED"


def test_first_matching_pattern_counts() -> None:
    targets = expand(
        target_modules=["q_proj", "v_proj"],
        rank_pattern={"1.self_attn.q_proj": 8, "q_proj": 4, "model.layers.0.self_attn.q_proj": 16, "nothing": 5},
        alpha_pattern={"v.proj": 6, "v_proj": 100},
    )
    assert [target.rank for target in targets] == [4, 2, 8, 2]
    assert [target.scale for target in targets] == [1.0, 3.0, 0.5, 3.0]


def test_rslora_divides_by_the_root_of_the_modules_own_rank() -> None:
    targets = expand(use_rslora=True, rank_pattern={"v_proj": 9})
    assert [target.scale for target in targets[:2]] == [4 / math.sqrt(2), 4 / 3]


@pytest.mark.parametrize(("alpha", "scale"), [(0, 0.0), (-4, -2.0), (0.5, 0.25)])
def test_unusual_alpha_scales_as_in_peft(alpha: float, scale: float) -> None:
    assert {target.scale for target in expand(lora_alpha=alpha)} == {scale}


def test_scale_beyond_float32_is_refused() -> None:
    assert reason(lora_alpha=1e300) == "NONFINITE"


# --- against PEFT ---

paths = st.lists(st.sampled_from(["model", "layers", "h", "0", "1", "12", "q_proj", "q.proj", "a", ""]), max_size=6)
patterns = st.lists(
    st.sampled_from(["layers", "h", "a", "q_proj", ".", "..", "0", "_", "l.yers", "model."]), max_size=3
)


def test_pattern_matching_agrees_with_peft() -> None:
    get_pattern_key = pytest.importorskip("peft.utils.other").get_pattern_key
    from loraplex.adapters.targets import _first_match

    @settings(deadline=None, max_examples=400)
    @given(paths.map(".".join), st.lists(patterns.map("".join).filter(bool), max_size=3))
    def agree(name: str, keys: list[str]) -> None:
        ours = _first_match([(key, key) for key in keys], name, name)
        assert ours == get_pattern_key(keys, name)

    agree()


def test_layer_selection_agrees_with_peft() -> None:
    check = pytest.importorskip("peft.tuners.tuners_utils").check_target_module_exists
    from loraplex.adapters.targets import _layer_index

    @settings(deadline=None, max_examples=400)
    @given(paths.map(".".join), st.lists(patterns.map("".join).filter(bool), max_size=2), st.sampled_from([0, 1, 12]))
    def agree(path: str, layer_patterns: list[str], layer: int) -> None:
        config = SimpleNamespace(
            target_modules={"target"}, layers_to_transform=[layer], layers_pattern=layer_patterns, exclude_modules=None
        )
        name = f"{path}.target"
        assert (_layer_index(name, layer_patterns) == layer) == bool(check(config, name))

    agree()
