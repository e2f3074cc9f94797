"""Expansion of a config over a base. PEFT itself is the oracle for the matching rules."""

import json
import math
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from loraplex.adapters.peft_config import parse_document, read_config
from loraplex.adapters.targets import Matcher, Target, expand_targets
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


@pytest.mark.parametrize("entry", ["self_attn", "input_layernorm", "norm", "model", "0", "layers.1.mlp"])
def test_entry_that_names_something_else_than_a_linear_layer_is_refused(entry: str) -> None:
    assert reason(target_modules=["q_proj", entry]) == "TARGET_NOT_COVERED"


@pytest.mark.parametrize("entry", ["c_attn", "qkv_proj", "proj", "", "model.layers.7.mlp.down_proj", "vision.q_proj"])
def test_entry_that_names_nothing_has_no_effect_beside_others(entry: str) -> None:
    assert names(target_modules=["q_proj", entry]) == names(target_modules=["q_proj"])
    assert reason(target_modules=[entry]) == "TARGET_NOT_COVERED"
    assert reason(target_modules=["q_proj", entry], exclude_modules=["q_proj"]) == "TARGET_NOT_COVERED"


def test_excluded_head_is_none_of_the_targets() -> None:
    assert names(target_modules=["q_proj", "lm_head"], exclude_modules=["lm_head"]) == names(target_modules=["q_proj"])


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


# ---------------------------------------------------------------------- regular expressions
def test_expression_is_matched_against_the_whole_path() -> None:
    assert names(target_modules=r".*\.1\.(self_attn\.q_proj|mlp\..*_proj)") == ["1.self_attn.q_proj", "1.mlp.down_proj"]
    assert names(target_modules=r"^(?!.*layers\.0).*v_proj$") == ["1.self_attn.v_proj"]
    assert reason(target_modules="q_proj") == "TARGET_NOT_COVERED"


def test_excluded_expression_goes_first() -> None:
    assert names(exclude_modules=r".*\.0\..*") == ["1.self_attn.q_proj", "1.self_attn.v_proj"]
    assert names(target_modules=".*", exclude_modules=r"(?!.*[qv]_proj).*") == names()
    assert names(target_modules=r".*(q_proj|lm_head)", exclude_modules=["lm_head"]) == names(target_modules=["q_proj"])


@pytest.mark.parametrize(
    ("expression", "code"),
    [
        (r".*(q_proj|lm_head)", "FEATURE_UNSUPPORTED"),
        (r".*(embed_tokens|q_proj)", "FEATURE_UNSUPPORTED"),
        (r".*", "TARGET_NOT_COVERED"),  # PEFT fails on the containers
        (r".*(q_proj|layernorm)", "TARGET_NOT_COVERED"),
        (r".*\.(self_attn|mlp)", "TARGET_NOT_COVERED"),
        (r"nothing", "TARGET_NOT_COVERED"),
        (r".*(q_proj", "FIELD_INVALID"),
        (r"*", "FIELD_INVALID"),
        (r"(?P<a>x)(?P<a>y)", "FIELD_INVALID"),
        (r"a{99999999999}", "FIELD_INVALID"),
    ],
)
def test_expression_that_adapts_something_else_or_is_none_is_refused(expression: str, code: str) -> None:
    assert reason(target_modules=expression) == code


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": "(m|.)*(.*)*(.*)*(.*)*!"},
        {"target_modules": r"(([a-z_.0-9]+)+)+!"},
        {"exclude_modules": r"(([a-z_.0-9]+)+)+!"},
        {"rank_pattern": {r"(([a-z_.0-9]+)+)+!": 2}},
        {"alpha_pattern": {r"(([a-z_.0-9]+)+)+!": 2}},
        {"layers_to_transform": [0], "layers_pattern": r"(([a-z_.0-9]+)+)+!"},
    ],
)
def test_hostile_expression_is_refused_in_time(changes: dict[str, object]) -> None:
    started = time.monotonic()
    assert reason(**changes) in ("TOO_LARGE", "FIELD_INVALID")
    assert time.monotonic() - started < 25


def test_expression_of_many_repetitions_needs_no_memory() -> None:
    assert reason(target_modules="((((a{999}){999}){999}){999}){999}") in ("TARGET_NOT_COVERED", "FIELD_INVALID")


def test_keys_of_patterns_are_expressions() -> None:
    targets = expand(
        rank_pattern={r".*\.1\..*(q|v)_proj": 8, "[qk]_proj": 4, r"model\.layers\.0\.self_attn\.v_proj": 16},
        alpha_pattern={r"^model.*q_proj$": 6},
    )
    assert [target.rank for target in targets] == [4, 16, 8, 8]
    assert [target.scale * target.rank for target in targets] == [6, 4, 6, 4]
    assert reason(rank_pattern={"q_proj(": 2}) == "FIELD_INVALID"
    assert reason(layers_to_transform=[0], layers_pattern="layers(") == "FIELD_INVALID"


# ---------------------------------------------------------------------- against PEFT
parts = st.sampled_from(["model", "layers", "h", "0", "1", "12", "q_proj", "q.proj", "a", ""])
paths = st.lists(parts, max_size=6).map(".".join)
literal = st.lists(
    st.sampled_from(["layers", "h", "a", "q_proj", ".", "..", "0", "_", "l.yers", "model."]), min_size=1, max_size=3
).map("".join)
pieces = [
    "layers",
    "h",
    "q_proj",
    ".",
    r"\.",
    ".*",
    "[0-9]+",
    r"\d",
    "(q|v)_proj",
    "a|h",
    "^",
    "$",
    "(?i:MODEL)",
    "l+",
    "?",
]
expression = st.lists(st.sampled_from(pieces), min_size=1, max_size=5).map("".join)


def is_valid(*expressions: str) -> bool:
    try:
        for text in expressions:
            re.compile(text)
    except re.error:
        return False
    return True


def matcher(config: dict[str, Any], names: tuple[str, ...]) -> Matcher:
    return Matcher(read_config(parse_document(json.dumps(make_config(**config)).encode())), names)


@pytest.mark.parametrize(("keys", "num"), [(literal, 150), (expression, 60)])
def test_pattern_matching_agrees_with_peft(keys: st.SearchStrategy[str], num: int) -> None:
    get_pattern_key = pytest.importorskip("peft.utils.other").get_pattern_key

    @settings(deadline=None, max_examples=num)
    @given(st.lists(paths, min_size=1, max_size=8, unique=True), st.lists(keys, max_size=3, unique=True))
    def agree(names: list[str], keys: list[str]) -> None:
        assume(is_valid(*(rf"(.*\.)?({key})$" for key in keys)))
        ours = matcher({"rank_pattern": dict.fromkeys(keys, 2)}, tuple(names))
        for name in names:
            found = ours.first_match("rank_pattern", [(key, key) for key in keys], name, name)
            assert found == get_pattern_key(keys, name)

    agree()


@pytest.mark.parametrize(("patterns", "num"), [(literal, 300), (expression, 60)])
def test_layer_selection_agrees_with_peft(patterns: st.SearchStrategy[str], num: int) -> None:
    check = pytest.importorskip("peft.tuners.tuners_utils").check_target_module_exists

    @settings(deadline=None, max_examples=num)
    @given(
        st.lists(paths.map("{}.target".format), min_size=1, max_size=8, unique=True),
        st.lists(patterns, max_size=2),
        st.sampled_from([0, 1, 12]),
    )
    def agree(names: list[str], layer_patterns: list[str], layer: int) -> None:
        assume(is_valid(*(rf"(?:^|.*?\.){text}\.(?P<idx>\d+)\." for text in layer_patterns)))
        fields = {"layers_to_transform": [layer], "layers_pattern": layer_patterns}
        ours = matcher({"target_modules": ["target"], **fields}, tuple(names))
        config = SimpleNamespace(target_modules={"target"}, exclude_modules=None, **fields)
        for name in names:
            assert ours.is_target(name) == bool(check(config, name)), name

    agree()


def test_expressions_for_modules_agree_with_peft() -> None:
    check = pytest.importorskip("peft.tuners.tuners_utils").check_target_module_exists
    base_names = tuple(site.name for site in make_base(3).sites)

    @settings(deadline=None, max_examples=60)
    @given(expression, st.one_of(st.none(), expression, st.lists(st.sampled_from(["q_proj", "0.mlp.down_proj"]))))
    def agree(targets: str, excluded: str | list[str] | None) -> None:
        assume(is_valid(targets) and (not isinstance(excluded, str) or is_valid(excluded)))
        ours = matcher({"target_modules": targets, "exclude_modules": excluded}, base_names)
        config = SimpleNamespace(target_modules=targets, exclude_modules=excluded)
        for name in base_names:
            assert ours.is_target(name) == bool(check(config, name)), name

    agree()
