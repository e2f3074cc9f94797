"""Configs of files whose names are wrapped: read by the paths that PEFT saw, or refused. PEFT itself is the oracle."""

import json
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from loraplex.adapters import Adapter
from loraplex.adapters.wrappers import NamedModules, split_name, wrapped_readings

from .factories import Entry, check, make_base, make_config, make_tensors, reason, tensor

BASE = make_base()
LM = ("model.", "model.language_model.")
OLD_LM = ("model.", "language_model.model.")
COMPILED = ("model.", "_orig_mod.model.")
LAYER_FSDP = (".self_attn", "._fsdp_wrapped_module.self_attn")
LAYER_COMPILED = (".self_attn", "._orig_mod.self_attn")


def rename(change: tuple[str, str], tensors: dict[str, Entry] | None = None) -> dict[str, Entry]:
    """PEFT's names with one piece of each module's path replaced."""
    prefix = "base_model.model."
    tensors = make_tensors() if tensors is None else tensors
    return {prefix + name.removeprefix(prefix).replace(*change, 1): entry for name, entry in tensors.items()}


def scales(adapter: Adapter) -> list[float]:
    return [module.scale for module in adapter.modules]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (LM, "model.language_model.layers.0.self_attn.q_proj"),
        (LM, "language_model.layers.0.self_attn.q_proj"),
        (LM, "layers.0.self_attn.q_proj"),
        (LM, r".*language_model\..*0.*q_proj"),
        (LM, r"^model\.language_model\.layers\.0\..*q_proj$"),
        (OLD_LM, "language_model.model.layers.0.self_attn.q_proj"),
        (COMPILED, "_orig_mod.model.layers.0.self_attn.q_proj"),
        (COMPILED, r"_orig_mod.*\.0\..*q_proj"),
        (COMPILED, "model.layers.0.self_attn.q_proj"),
        (LAYER_COMPILED, "layers.0._orig_mod.self_attn.q_proj"),
        (LAYER_FSDP, "layers.0.self_attn.q_proj"),
        (LAYER_FSDP, r"model\.layers\.0\.self_attn\.q_proj"),
    ],
)
@pytest.mark.parametrize("outer", ["", "module.", "_orig_mod."])
def test_keys_match_the_paths_that_peft_saw(change: tuple[str, str], key: str, outer: str) -> None:
    tensors = {outer + name: entry for name, entry in rename(change).items()}
    assert scales(check(make_config(alpha_pattern={key: 64}), tensors)) == [32.0, 2.0, 2.0, 2.0]
    assert reason(make_config(rank_pattern={key: 3}), tensors) in ("RANK_MISMATCH", "TARGET_NOT_COVERED")
    q_proj = "model.layers.0.self_attn.q_proj"
    wider = {f"base_model.model.{q_proj}.lora_A.weight": tensor((3, 8))}
    wider |= {f"base_model.model.{q_proj}.lora_B.weight": tensor((8, 3))}
    adapter = check(make_config(rank_pattern={key: 3}), rename(change, make_tensors() | wider))
    assert [module.rank for module in adapter.modules] == [3, 2, 2, 2]


@pytest.mark.parametrize("field", ["alpha_pattern", "rank_pattern"])
@pytest.mark.parametrize(
    ("change", "key"),
    [
        (LM, "nothing"),
        (LM, "model.layers.0.self_attn.q_proj"),  # PEFT saw language_model, so this had no effect
        (LM, "language_model.model.layers.0.self_attn.q_proj"),
        (OLD_LM, "model.language_model.layers.0.self_attn.q_proj"),
        (LM, r".*vision_tower\..*q_proj"),
        (LM, "lm_head"),
        (COMPILED, "language_model.model.layers.0.self_attn.q_proj"),
        (LAYER_FSDP, "layers.0._fsdp_wrapped_module.self_attn.q_proj"),  # FSDP wraps after PEFT
        (("", "module."), r"^_orig_mod\..*"),
    ],
)
def test_key_that_matches_nothing_is_refused_where_names_are_wrapped(
    change: tuple[str, str], key: str, field: str
) -> None:
    assert reason(make_config(**{field: {"q_proj": 2, key: 64}}), rename(change)) == "TARGET_NOT_COVERED"


def test_wrapper_in_front_of_pefts_prefix_counts_as_one() -> None:
    tensors = {f"_orig_mod.{name}": entry for name, entry in make_tensors().items()}
    config = make_config(alpha_pattern={"_orig_mod.base_model.model.model.layers.0.self_attn.q_proj": 64})
    assert reason(config, tensors) == "TARGET_NOT_COVERED"
    assert scales(check(config)) == [2.0] * 4, "as in PEFT, where no name is wrapped"


@pytest.mark.parametrize(
    "key",
    [
        "^model.layers.0.self_attn.q_proj",  # dead if the model was compiled before
        r"^(_orig_mod\.model\.layers\.0|model\.layers\.1)\..*q_proj",  # another module in each case
    ],
)
def test_scale_that_depends_on_when_the_wrapper_came_is_refused(key: str) -> None:
    assert reason(make_config(alpha_pattern={key: 64}), rename(COMPILED)) == "TARGET_NOT_COVERED"
    assert scales(check(make_config(alpha_pattern={key: 4}), rename(COMPILED))) == [2.0] * 4, "no difference"


@pytest.mark.parametrize(
    ("change", "changes"),
    [
        (LM, {"target_modules": ["model.language_model.layers.1.self_attn.q_proj"]}),
        (LM, {"target_modules": r".*language_model\..*1.*q_proj"}),
        (LM, {"target_modules": ["q_proj"], "exclude_modules": r".*language_model\.layers\.0.*"}),
        (LM, {"target_modules": ["q_proj"], "exclude_modules": ["language_model.layers.0.self_attn.q_proj"]}),
        (LM, {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "language_model.layers"}),
        (COMPILED, {"target_modules": r"_orig_mod\.model\.layers\.1.*q_proj"}),
        (COMPILED, {"target_modules": ["model.layers.1.self_attn.q_proj"]}),
        (LAYER_FSDP, {"target_modules": ["layers.1.self_attn.q_proj"]}),
        (LM, {"target_modules": ["model.layers.1.self_attn.q_proj"]}),  # only the base's paths give the file's modules
        (LM, {"target_modules": r"(?!.*language_model).*\.1\..*q_proj"}),
    ],
)
def test_modules_are_those_of_the_paths_that_peft_saw(change: tuple[str, str], changes: dict[str, Any]) -> None:
    one = {name: entry for name, entry in make_tensors(modules=("q_proj",)).items() if "layers.1." in name}
    tensors = rename(change, one)
    adapter = check(make_config(**changes), tensors)
    assert [module.site.name for module in adapter.modules] == ["model.layers.1.self_attn.q_proj"]
    both = rename(change, make_tensors(modules=("q_proj",)))
    assert reason(make_config(**changes), both) == "TARGET_NOT_COVERED"


def test_module_that_the_file_lacks_is_missed_under_its_wrapped_path() -> None:
    one = {name: entry for name, entry in make_tensors(modules=("q_proj",)).items() if "layers.1." in name}
    config = make_config(target_modules=r".*language_model\..*q_proj")
    assert reason(config, rename(LM, one)) == "TARGET_NOT_COVERED"


def test_some_names_may_be_wrapped_and_others_not() -> None:
    mixed = {
        name.replace(".self_attn", "._orig_mod.self_attn") if "layers.0." in name else name: entry
        for name, entry in make_tensors().items()
    }
    keys = {"layers.0._orig_mod.self_attn.q_proj": 64, "layers.1.self_attn.v_proj": 8}
    assert scales(check(make_config(alpha_pattern=keys), mixed)) == [32.0, 2.0, 2.0, 4.0]
    keys = {"layers.0.self_attn.q_proj": 64}
    assert reason(make_config(alpha_pattern=keys), mixed) == "TARGET_NOT_COVERED"


def test_halves_of_a_pair_are_wrapped_alike() -> None:
    mixed = {
        name.replace(".layers", ".language_model.layers") if "lora_A" in name else name: entry
        for name, entry in make_tensors().items()
    }
    assert reason(tensors=mixed) == "KEY_UNMATCHED"


def test_expression_that_reaches_wrapped_norms_or_the_head_is_refused() -> None:
    tensors = rename(LM, make_tensors(modules=("q_proj", "v_proj", "down_proj")))
    assert reason(make_config(target_modules=r".*language_model\.layers\..*"), tensors) == "TARGET_NOT_COVERED"
    tensors = rename(OLD_LM, make_tensors(modules=("q_proj",)))
    assert reason(make_config(target_modules=r"language_model\..*(q_proj|head)"), tensors) == "FEATURE_UNSUPPORTED"


def test_wrappers_have_limits() -> None:
    long = rename(("model.", "module." * 17 + "model."))
    assert reason(tensors=long) == "KEY_UNMATCHED"
    assert reason(tensors=rename(("model.", "module." * 16 + "model."))) is None
    base = make_base(9)
    tensors = {
        re.sub(r"layers\.(\d)", lambda match: "module." * int(match[1]) + match[0], name): entry
        for name, entry in make_tensors(base).items()
    }
    assert reason(tensors=tensors, base=base) == "KEY_UNMATCHED"
    tensors = {name: entry for name, entry in tensors.items() if "layers.8." not in name}
    assert reason(make_config(layers_to_transform=list(range(8))), tensors, base) is None


@given(st.lists(st.sampled_from(["module", "language_model", "base_model", "model", "a", ""]), max_size=6))
def test_any_name_is_split_into_parts_with_their_wrappers(parts: list[str]) -> None:
    split = split_name(".".join(parts))
    assert len(split.parts) == len(split.wrapping) >= 1
    named = NamedModules(True, {"x.y": split.wrapping})
    assert all(reading.paths["x.y"] for reading in wrapped_readings(["x.y"], named))


# ---------------------------------------------------------------------- against PEFT
MODEL_WRAPPERS = ("language_model",)
EITHER = ("_orig_mod", "module", "_checkpoint_wrapped_module")
PIECES = (
    *("q_proj", "v_proj", "self_attn.q_proj", "layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"),
    *(r".*\.0\..*_proj", r"^model\..*q_proj", r"model\.layers\.\d\..*v_proj", r".*(_orig_mod|module)\..*v_proj"),
    *(r".*language_model\..*q_proj", r".*language_model\.layers\.0\..*", r"_orig_mod\..*", r"(?!.*module).*q_proj"),
    *("_orig_mod.self_attn.q_proj", "module.q_proj", "model.language_model.layers.0.self_attn.q_proj", "nothing"),
)
wrapper_sets = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(MODEL_WRAPPERS + EITHER), st.sampled_from(["0", "1", "01"])),
    min_size=1,
    max_size=2,
)
pattern = st.dictionaries(st.sampled_from(PIECES), st.integers(1, 5), max_size=2)
fields = st.fixed_dictionaries(
    {
        "target_modules": st.one_of(
            st.just(["q_proj", "v_proj"]),
            st.lists(st.sampled_from([piece for piece in PIECES if "*" not in piece]), min_size=1, max_size=3),
            st.sampled_from([r".*_proj", *PIECES]),
        ),
        "rank_pattern": pattern,
        "alpha_pattern": pattern,
    },
    optional={
        "exclude_modules": st.one_of(st.sampled_from(PIECES), st.lists(st.sampled_from(PIECES), max_size=2)),
        "layers": st.sampled_from([(0, None), ([1], "layers"), (1, "language_model.layers"), ([0], ["_orig_mod"])]),
    },
)


def wrap(path: str, wrappers: list[tuple[int, str, str]]) -> str:
    parts = path.split(".")
    for position, wrapper, layers in sorted(wrappers, reverse=True):
        if path.split(".")[2] in layers:
            parts.insert(position, wrapper)
    return ".".join(parts)


def trained(paths: dict[str, tuple[int, int]], config: dict[str, Any]) -> dict[str, tuple[int, float]] | None:
    """Rank and scale that PEFT gives to each module it adapts in a model with these linear layers; None if it fails."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    model = torch.nn.Module()
    for path, sizes in paths.items():
        parent = model
        *outer, last = path.split(".")
        for part in outer:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        parent.add_module(last, torch.nn.Linear(*sizes, bias=False))
    try:
        wrapped = peft.get_peft_model(model, peft.LoraConfig(**config))
    except (ValueError, AttributeError):
        return None
    layers = ((name, module) for name, module in wrapped.base_model.model.named_modules() if hasattr(module, "lora_A"))
    return {name: (layer.r["default"], layer.scaling["default"]) for name, layer in layers}


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:You have passed exclude_modules")
def test_config_means_what_it_meant_when_it_was_trained_or_is_refused() -> None:
    served = refused = 0

    @settings(deadline=None, max_examples=250, derandomize=True)
    @given(wrapper_sets, st.booleans(), fields)
    def agree(wrappers: list[tuple[int, str, str]], came_later: bool, changes: dict[str, Any]) -> None:
        nonlocal served, refused
        layers, layers_pattern = changes.get("layers", (None, None))
        config = {key: value for key, value in changes.items() if key != "layers"} | {"r": 2, "lora_alpha": 4}
        if layers is not None and isinstance(config["target_modules"], list):
            config |= {"layers_to_transform": layers, "layers_pattern": layers_pattern}
        seen = [one for one in wrappers if not came_later or one[1] in MODEL_WRAPPERS]
        sites = {site.name: site for site in BASE.sites}
        seen_paths = {wrap(name, seen): site for name, site in sites.items()}
        truth = trained({path: (site.d_in, site.d_out) for path, site in seen_paths.items()}, config)
        assume(truth)
        assert truth is not None
        if came_later:  # a key without effect in PEFT may then look like one for the wrapped paths
            keys = {*config["rank_pattern"], *config["alpha_pattern"]}
            assume(all(any(re.match(rf"(.*\.)?({key})$", path) for path in seen_paths) for key in keys))
        tensors: dict[str, Entry] = {}
        for path, (rank, _) in truth.items():
            site = seen_paths[path]
            name = f"base_model.model.{wrap(site.name, wrappers)}"
            tensors[f"{name}.lora_A.weight"] = tensor((rank, site.d_in))
            tensors[f"{name}.lora_B.weight"] = tensor((site.d_out, rank))
        written = json.loads(json.dumps(make_config(**config)))
        if reason(written, tensors) is not None:
            refused += 1
            return
        served += 1
        ours = {module.site.name: (module.rank, module.scale) for module in check(written, tensors).modules}
        assert ours == {seen_paths[path].name: value for path, value in truth.items()}

    agree()
    assert served >= 60, (served, refused)
