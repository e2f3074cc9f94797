"""adapter_config.json: every field is either understood exactly, or known to have no effect, or a reason to refuse.

Checked field by field against PEFT 0.21's LoraConfig. Three classes: read (`_READ`), without effect on a trained
adapter at any value (`_BENIGN`), and features that go beyond plain LoRA (`_OFF_WHEN_EMPTY`, `_OFF_WHEN_NULL`), which
must be switched off. A field that is in none of them is fine while it is null, false or empty.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from loraplex.adapters.limits import MAX_EXPRESSIONS
from loraplex.adapters.patterns import Pattern, PatternKind, check_pattern
from loraplex.adapters.refusal import field_invalid, show, unsupported
from loraplex.adapters.strict_json import JsonError, parse_json_object, plain_object
from loraplex.core import AdapterRefused, RefusalReason

ALL_LINEAR = "all-linear"
MAX_PATTERNS = 4096  # entries of rank_pattern, alpha_pattern or layers_pattern; each is compared with each site
_MAX_RANK = 2**31 - 1
_DEFAULT_RANK = _DEFAULT_ALPHA = 8  # PEFT's, for a file that leaves the field out
# Without metacharacters but ".", which stands for any one character: matched here, no expression is run.
_LITERAL_PATTERN = re.compile(r"[A-Za-z0-9_.-]+")

_READ = frozenset(
    {
        "alpha_pattern",
        "base_model_name_or_path",
        "bias",
        "exclude_modules",
        "fan_in_fan_out",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
_BENIGN = frozenset(
    {
        "auto_mapping",  # which class loads the base; we load our own
        "inference_mode",
        "megatron_core",  # read only beside megatron_config, which must be off
        "peft_version",
        "qalora_group_size",  # read only beside use_qalora, which must be off
        "revision",
    }
)
_OFF_WHEN_EMPTY = {
    "alora_invocation_tokens": "activated LoRA switches within a sequence",
    "ensure_weight_tying": "tied adapters are not plain LoRA",
    "layer_replication": "it changes the layers of the base",
    "loftq_config": "LoftQ trains against a changed base",
    "lora_bias": "LoRA pairs with a bias are not plain LoRA",
    "megatron_config": "Megatron layers are not served",
    "modules_to_save": "it replaces whole modules of the shared base",
    "monteclora_config": "Monte Carlo LoRA is not plain LoRA",
    "runtime_config": "run-time switches of the trainer have no meaning here",
    "target_parameters": "adapting bare parameters is not plain LoRA on linear layers",
    "use_dora": "DoRA rescales the base weights",
    "use_qalora": "QA-LoRA pools the inputs",
}
_OFF_WHEN_NULL = {
    "arrow_config": "Arrow routes between adapters",
    "corda_config": "CorDA trains against a changed base",
    "eva_config": "an EVA configuration is not evaluated",
    "kasa_config": "KaSA changes the base weights",
    "lora_ga_config": "LoRA-GA trains against a changed base",
    "trainable_token_indices": "it replaces rows of the shared embedding",
    "use_bdlora": "block-diagonal pairs are not plain LoRA",
    "velora_config": "VeLoRA is not plain LoRA",
}
# Initialisations that leave the base weights alone; after training they have no meaning.
_PLAIN_INITS = frozenset({"gaussian", "orthogonal", "eva"})


class TrainedBiases(StrEnum):
    """Which biases of the base were trained with the pairs (`bias`)."""

    NONE = "none"
    ALL = "all"
    LORA_ONLY = "lora_only"  # those of adapted layers


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What a config says about plain LoRA. Patterns keep the order of the file: the first match counts.

    `expressions` are those that need more than the comparison of names.
    """

    rank: int
    alpha: float
    use_rslora: bool
    target_modules: frozenset[str] | str | None  # a string is an expression; None is "all-linear"
    exclude_modules: frozenset[str] | str
    layers_to_transform: frozenset[int]  # empty is all layers
    layers_pattern: tuple[str, ...]  # empty is any name before the layer's number
    rank_pattern: tuple[tuple[str, int], ...]
    alpha_pattern: tuple[tuple[str, float], ...]
    bias: TrainedBiases
    declared_base: str | None
    expressions: tuple[Pattern, ...] = ()


def parse_document(data: bytes) -> dict[str, object]:
    """The config as a dict. Raises AdapterRefused: CONFIG_INVALID, or NONFINITE for a number that is not finite."""
    try:
        document = plain_object(parse_json_object(data))
    except JsonError as error:
        message = f"adapter_config.json {error}."
        raise AdapterRefused(RefusalReason.CONFIG_INVALID, message, "adapter_config.json") from None
    for field, value in document.items():
        if not _all_finite(value):
            message = f"adapter_config.json: {show(field)} holds a number that is not finite."
            raise AdapterRefused(RefusalReason.NONFINITE, message, field)
    return document


def read_config(document: Mapping[str, object]) -> PeftConfig:
    """Classify every field of a config and read the plain LoRA ones. Raises AdapterRefused."""
    _check_types(document)
    _check_features(document)
    _check_plain(document)
    targets, excluded = _read_targets(document), _read_excluded(document)
    ranks, alphas = _read_pattern(document, "rank_pattern"), _read_pattern(document, "alpha_pattern")
    layers_pattern = _read_layers_pattern(document, targets)
    expressions = (
        *_expressions("target_modules", PatternKind.WHOLE, [targets] if isinstance(targets, str) else ()),
        *_expressions("exclude_modules", PatternKind.WHOLE, [excluded] if isinstance(excluded, str) else ()),
        *_expressions("rank_pattern", PatternKind.SUFFIX, [key for key, _ in ranks]),
        *_expressions("alpha_pattern", PatternKind.SUFFIX, [key for key, _ in alphas]),
        *_expressions("layers_pattern", PatternKind.LAYER, layers_pattern),
    )
    if len(expressions) > MAX_EXPRESSIONS:
        raise field_invalid(expressions[-1].field, len(expressions), f"at most {MAX_EXPRESSIONS} regular expressions")
    return PeftConfig(
        rank=_read_rank("r", document.get("r", _DEFAULT_RANK)),
        alpha=_read_alpha("lora_alpha", document.get("lora_alpha", _DEFAULT_ALPHA)),
        use_rslora=_read_flag(document, "use_rslora"),
        target_modules=targets,
        exclude_modules=excluded,
        layers_to_transform=_read_layers(document, targets),
        layers_pattern=layers_pattern,
        rank_pattern=tuple((key, _read_rank(key, value)) for key, value in ranks),
        alpha_pattern=tuple((key, _read_alpha(key, value)) for key, value in alphas),
        bias=_read_bias(document),
        declared_base=_read_declared_base(document),
        expressions=expressions,
    )


def _expressions(field: str, kind: PatternKind, texts: Sequence[str]) -> tuple[Pattern, ...]:
    """Those of a field's patterns that have to be run. Raises AdapterRefused for one that is too long."""
    wanted = tuple(Pattern(field, kind, text) for text in texts if is_expression(kind, text))
    for pattern in wanted:
        check_pattern(field, pattern.text)
    return wanted


def is_expression(kind: PatternKind, text: str) -> bool:
    """Whether a pattern is more than a name in which "." stands for any one character."""
    return kind is PatternKind.WHOLE or _LITERAL_PATTERN.fullmatch(text) is None


def _all_finite(value: object) -> bool:
    if isinstance(value, dict):
        return all(_all_finite(item) for item in value.values())
    if isinstance(value, list):
        return all(_all_finite(item) for item in value)
    return not isinstance(value, float) or math.isfinite(value)


def _is_off(value: object) -> bool:
    """Null, false or empty; a zero is a value."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def _check_types(document: Mapping[str, object]) -> None:
    peft_type, task_type = document.get("peft_type"), document.get("task_type")
    if peft_type != "LORA":
        message = f"adapter_config.json: 'peft_type' is {show(peft_type)}; only 'LORA' is served."
        raise AdapterRefused(RefusalReason.PEFT_TYPE_UNSUPPORTED, message, "peft_type")
    if task_type is not None and task_type != "CAUSAL_LM":
        message = f"adapter_config.json: 'task_type' is {show(task_type)}; only 'CAUSAL_LM' or null is served."
        raise AdapterRefused(RefusalReason.TASK_TYPE_UNSUPPORTED, message, "task_type")


def _check_features(document: Mapping[str, object]) -> None:
    """Refuse what goes beyond plain LoRA, and fields of other versions that carry a value."""
    for field, value in document.items():
        if field in _READ or field in _BENIGN:
            continue
        if field in _OFF_WHEN_NULL:
            if value is not None:
                raise unsupported(field, value, _OFF_WHEN_NULL[field])
        elif not _is_off(value):
            raise unsupported(field, value, _OFF_WHEN_EMPTY.get(field, "the field is unknown"))


def _check_plain(document: Mapping[str, object]) -> None:
    """Fields that are read only to see that they ask for nothing."""
    if _read_flag(document, "fan_in_fan_out"):
        raise unsupported("fan_in_fan_out", True, "linear layers of the served families are not transposed")
    init = document.get("init_lora_weights", True)
    if isinstance(init, str) and init not in _PLAIN_INITS and init.lower() != "gaussian":
        raise unsupported("init_lora_weights", init, "the pairs may be relative to a changed base; convert them first")
    if init is not None and not isinstance(init, (bool, str)):
        raise field_invalid("init_lora_weights", init, "true, false or the name of an initialisation")
    dropout = document.get("lora_dropout", 0.0)
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
        raise field_invalid("lora_dropout", dropout, "a number from 0 to 1")


def _read_bias(document: Mapping[str, object]) -> TrainedBiases:
    value = document.get("bias", TrainedBiases.NONE.value)
    trained = next((trained for trained in TrainedBiases if trained == value), None)
    if trained is None:
        raise field_invalid("bias", value, "'none', 'all' or 'lora_only'")
    return trained


def _read_flag(document: Mapping[str, object], field: str) -> bool:
    value = document.get(field)
    if value is not None and not isinstance(value, bool):
        raise field_invalid(field, value, "true, false or null")
    return bool(value)


def _read_rank(field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_RANK:
        raise field_invalid(field, value, f"an integer from 1 to {_MAX_RANK}")
    return value


def _read_alpha(field: str, value: object) -> float:
    """Any finite number: PEFT takes fractions, zero and negative ones."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise field_invalid(field, value, "a number")
    try:
        return float(value)
    except OverflowError:
        message = f"adapter_config.json: {show(field)} is {show(value)}, beyond what a float can hold."
        raise AdapterRefused(RefusalReason.NONFINITE, message, field) from None


def _read_pattern(document: Mapping[str, object], field: str) -> tuple[tuple[str, object], ...]:
    """A mapping from module patterns to values, in file order."""
    value = document.get(field, {})
    if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
        raise field_invalid(field, value, f"an object of at most {MAX_PATTERNS} entries")
    return tuple(value.items())


def _read_names(field: str, value: object) -> tuple[str, ...]:
    """A list of strings."""
    if not isinstance(value, list):
        raise field_invalid(field, value, "a list of module names")
    names = tuple(item for item in value if isinstance(item, str))
    if len(names) != len(value):
        raise field_invalid(field, value, "a list of module names")
    return names


def _read_targets(document: Mapping[str, object]) -> frozenset[str] | str | None:
    value = document.get("target_modules")
    if isinstance(value, str) and value.lower() == ALL_LINEAR:
        return None
    names = value if isinstance(value, str) else _read_names("target_modules", value)
    if not names:
        message = "adapter_config.json: 'target_modules' is empty, so the adapter adapts nothing."
        raise AdapterRefused(RefusalReason.TARGET_NOT_COVERED, message, "target_modules")
    return names if isinstance(names, str) else frozenset(names)


def _read_excluded(document: Mapping[str, object]) -> frozenset[str] | str:
    value = document.get("exclude_modules")
    if not value and value in (None, ""):
        return frozenset()
    return value if isinstance(value, str) else frozenset(_read_names("exclude_modules", value))


def _read_layers(document: Mapping[str, object], targets: frozenset[str] | str | None) -> frozenset[int]:
    field = "layers_to_transform"
    value = document.get(field)
    if value is None:
        return frozenset()
    if not isinstance(targets, frozenset):
        raise field_invalid(field, value, "null when target_modules is a string")
    items = value if isinstance(value, list) else [value]
    layers = tuple(item for item in items if isinstance(item, int) and not isinstance(item, bool))
    if len(layers) != len(items):
        raise field_invalid(field, value, "an integer, a list of integers or null")
    return frozenset(layers)


def _read_layers_pattern(document: Mapping[str, object], targets: frozenset[str] | str | None) -> tuple[str, ...]:
    field = "layers_pattern"
    value = document.get(field)
    if value is None:
        return ()
    if not isinstance(targets, frozenset):
        raise field_invalid(field, value, "null when target_modules is a string")
    if not value:
        value = []
    patterns = (value,) if isinstance(value, str) else _read_names(field, value)
    if patterns and document.get("layers_to_transform") is None:
        raise field_invalid(field, value, "null when layers_to_transform is null")
    if len(patterns) > MAX_PATTERNS:
        raise field_invalid(field, value, f"a list of at most {MAX_PATTERNS} entries")
    return patterns


def _read_declared_base(document: Mapping[str, object]) -> str | None:
    value = document.get("base_model_name_or_path")
    if value is not None and not isinstance(value, str):
        raise field_invalid("base_model_name_or_path", value, "a string or null")
    return value
