"""The rotary embedding of a config.json: both spellings, one setting or one for each kind of layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loraplex.core import RefusalReason
from loraplex.model.config_fields import Fields, refuse
from loraplex.model.families import Family


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `kind` is default, linear, llama3, yarn or longrope; `fields` has that kind's numbers."""

    theta: float
    kind: str
    fields: Mapping[str, Any]


_ROPE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
}
_ORIGINAL = "original_max_position_embeddings"
_OPTIONAL_ROPE_FIELDS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_LONG_NAMES = ("su", "yarn")  # what first configs with longrope call it
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4  # where a config with one for each kind of layer gives none


def read_rope(raw: Mapping[str, Any], family: Family) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5), and `rope_theta` with `rope_scaling` (before).

    Where a config has both, transformers follows `rope_scaling`; and an original length beside them goes before theirs.
    """
    field = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = _object(field, raw.get(field))
    theta = Fields(given).number("rope_theta", Fields(raw).number("rope_theta", 10000.0))
    lengths = (raw.get(_ORIGINAL), given.get(_ORIGINAL))
    return _make(field, given, family, theta, lengths, Fields(raw).positive_int("max_position_embeddings", 2048))


def read_layered_rope(raw: Mapping[str, Any], family: Family) -> tuple[RopeConfig, RopeConfig]:
    """(of layers without a window, of those with one): `rope_parameters` has one for each kind of layer. Before, both
    had the base alone, and the first `rope_scaling` too."""
    parameters = _object("rope_parameters", raw.get("rope_parameters"))
    if stray := sorted(parameters.keys() - {_GLOBAL, _LOCAL}):
        message = f"rope_parameters must have {_GLOBAL} and {_LOCAL} only, got {stray[0]!r:.80}."
        raise refuse("rope_parameters", message)
    scaling = _object("rope_scaling", raw.get("rope_scaling"))
    if "type" in scaling and "rope_type" not in scaling:
        raise refuse("rope_scaling", "rope_scaling must name its kind in rope_type; transformers overlooks type.")
    field = "rope_scaling" if scaling else "rope_parameters"
    whole = _object("rope_parameters", parameters.get(_GLOBAL)) | scaling
    local = _object("rope_parameters", parameters.get(_LOCAL))
    max_len, fields = Fields(raw).positive_int("max_position_embeddings"), Fields(raw)
    bases = fields.number("rope_theta", _GLOBAL_THETA), fields.number("rope_local_base_freq", _LOCAL_THETA)
    made = []
    for name, given, base in ((field, whole, bases[0]), ("rope_parameters", local, bases[1])):
        if "truncate" in given:
            raise refuse(name, f"{name}: truncate is not supported here.", RefusalReason.FEATURE_UNSUPPORTED)
        made.append(
            _make(name, given, family, Fields(given).number("rope_theta", base), (given.get(_ORIGINAL),), max_len)
        )
    return made[0], made[1]


def rotary_dim(raw: Mapping[str, Any], family: Family, head_dim: int) -> int:
    """How many dims of a head are rotated, from the first on."""
    if not family.partial_rotary:
        return head_dim
    field = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = Fields(_object(field, raw.get(field)))
    name = "partial_rotary_factor"
    dim = int(head_dim * given.number(name, Fields(raw).number(name, 1.0)))
    if not 2 <= dim <= head_dim or dim % 2:
        raise refuse(name, f"{name} must leave an even number of dims from 2 to {head_dim}, not {dim}.")
    return dim


def check_longrope(rope: RopeConfig, dim: int) -> None:
    """Raise BaseRefused unless both lists of factors have a positive number for each rotated pair."""
    for name in ("short_factor", "long_factor"):
        values = rope.fields.get(name)
        if not isinstance(values, list) or len(values) != dim // 2:
            raise refuse(name, f"{name} must be a list of {dim // 2} numbers, one for each rotated pair of dims.")
        for value in values:
            Fields({name: value}).positive_number(name, 0.0)


def _object(field: str, value: Any) -> dict[str, Any]:
    """A JSON object, empty for null. Raises BaseRefused."""
    given = value or {}
    if not isinstance(given, dict):
        raise refuse(field, f"{field} must be an object, got {given!r:.200}.")
    return given


def _make(
    field: str, given: dict[str, Any], family: Family, theta: float, lengths: tuple[Any, ...], max_len: int
) -> RopeConfig:
    """`lengths`: where the original length may stand, first come first; else it is `max_len`."""
    kind = given.get("rope_type", given.get("type", "default"))
    if "longrope" in family.rope_kinds and kind in _LONG_NAMES:
        kind = "longrope"
    if not isinstance(kind, str) or kind not in family.rope_kinds:
        supported = ", ".join(family.rope_kinds)
        reason = RefusalReason.FEATURE_UNSUPPORTED
        raise refuse(field, f"{field} of type {kind!r:.80} is not supported; supported are {supported}.", reason)
    values = dict(given)
    if _ORIGINAL in _ROPE_FIELDS[kind]:
        values[_ORIGINAL] = next((length for length in lengths if length is not None), max_len)
    if kind == "longrope":
        values["factor"] = _long_factor(values, max_len)
    _check_rope(field, kind, values, family)
    if theta <= 1.0:
        raise refuse("rope_theta", f"rope_theta must be above 1, got {theta}.")
    return RopeConfig(theta, kind, values)


def _long_factor(values: dict[str, Any], max_len: int) -> float:
    """How many times the original length the context is, as given or from the lengths."""
    original = Fields(values).positive_int(_ORIGINAL)
    if original < 2:
        raise refuse(_ORIGINAL, f"{_ORIGINAL} must be above 1.")
    return Fields(values).positive_number("factor", max_len / original)


def _check_rope(field: str, kind: str, values: dict[str, Any], family: Family) -> None:
    """Raise BaseRefused unless the numbers of this kind are there and can be computed with."""
    numbers = Fields(values)
    for name in _ROPE_FIELDS[kind]:
        if values.get(name) is None or numbers.number(name, 0.0) == 0.0:
            raise refuse(field, f"{field} of type {kind!r} needs a positive number {name}, got {values.get(name)!r}.")
    for name in _OPTIONAL_ROPE_FIELDS:
        numbers.number(name, 0.0)
    if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        raise refuse(field, f"{field}: low_freq_factor must be below high_freq_factor.")
    is_nested = any(isinstance(value, dict) for value in values.values())
    if is_nested or (not family.partial_rotary and values.get("partial_rotary_factor") not in (None, 1.0)):
        message = f"{field}: one setting for all layers and a partial_rotary_factor of 1.0 are supported."
        raise refuse(field, message, RefusalReason.FEATURE_UNSUPPORTED)
