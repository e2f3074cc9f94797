"""Which linear layers of a base a config adapts, and with which rank and scale, by PEFT's rules.

- `target_modules` and `exclude_modules` entries match a module's whole path or a dotted suffix of it; as a string they
  are a regular expression for the whole path.
- `rank_pattern` and `alpha_pattern` keys match likewise, as regular expressions; the first matching key of the file
  counts. A key that matches no module has no effect, in PEFT as here.
- `layers_to_transform` compares the first number in a path; entries that are a whole path are not subject to it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

from loraplex.adapters.patterns import Pattern, PatternKind, match_names
from loraplex.adapters.peft_config import PeftConfig, is_expression
from loraplex.adapters.refusal import show, unsupported
from loraplex.core import AdapterRefused, BaseDescription, BaseSite, RefusalReason

VOCABULARY_MODULES = frozenset({"embed_tokens", "lm_head"})
_MAX_SCALE = 3.4028234663852886e38  # largest float32: the scale is applied in it

# What transformers has in these families beside linear layers. PEFT fails on a config that adapts one of them.
_OTHER_MODULES = ("model", "model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head")
_OTHER_IN_LAYER = (
    *("", ".self_attn", ".self_attn.q_norm", ".self_attn.k_norm", ".mlp", ".mlp.act_fn", ".mlp.activation_fn"),
    *(".input_layernorm", ".post_attention_layernorm", ".pre_feedforward_layernorm", ".post_feedforward_layernorm"),
    *(".resid_attn_dropout", ".resid_mlp_dropout"),
)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Target:
    """One site a config adapts."""

    site: BaseSite
    rank: int
    scale: float


def expand_targets(config: PeftConfig, base: BaseDescription) -> tuple[Target, ...]:
    """The adapted sites in the base's order. Raises AdapterRefused; never returns an empty tuple.

    Regular expressions run in a child process: with some in the config this takes tens of milliseconds.
    """
    others = _other_names(base.num_layers) if isinstance(config.target_modules, str) else ()
    matcher = Matcher(config, (*(site.name for site in base.sites), *others))
    _check_entries(config, base)
    _check_other_modules(matcher, others)
    sites = [site for site in base.sites if matcher.is_target(site.name)]
    if not sites:
        message = f"The config adapts no linear layer of the base {base.name!r}."
        raise AdapterRefused(RefusalReason.TARGET_NOT_COVERED, message, "target_modules")
    return tuple(_make_target(config, matcher, site) for site in sites)


def _check_entries(config: PeftConfig, base: BaseDescription) -> None:
    """Refuse entries that name nothing we can adapt: a config for another base, or one that reaches further."""
    known = {suffix for site in base.sites for suffix in _suffixes(site.name)}
    entries = config.target_modules if isinstance(config.target_modules, frozenset) else frozenset[str]()
    for entry in sorted(entries):
        if entry.rsplit(".", 1)[-1] in VOCABULARY_MODULES:
            raise unsupported("target_modules", entry, "adapters on the embedding or the output head are not served")
        if entry not in known:
            message = f"target_modules names {show(entry)}, which is no linear layer of the base {base.name!r}."
            raise AdapterRefused(RefusalReason.TARGET_NOT_COVERED, message, "target_modules")
    for layer in sorted(config.layers_to_transform):
        if not 0 <= layer < base.num_layers:
            message = f"layers_to_transform names layer {show(layer)}; the base has layers 0 to {base.num_layers - 1}."
            raise AdapterRefused(RefusalReason.TARGET_NOT_COVERED, message, "layers_to_transform")


def _check_other_modules(matcher: "Matcher", names: Sequence[str]) -> None:
    """Refuse an expression that adapts what is no linear layer."""
    for name in names:
        if not matcher.is_target(name):
            continue
        if name.rsplit(".", 1)[-1] in VOCABULARY_MODULES:
            raise unsupported("target_modules", name, "adapters on the embedding or the output head are not served")
        message = f"target_modules matches {show(name)}, which is no linear layer."
        raise AdapterRefused(RefusalReason.TARGET_NOT_COVERED, message, "target_modules")


class Matcher:
    """The rules of one config for these module names. Its expressions are run once, when it is made."""

    def __init__(self, config: PeftConfig, names: tuple[str, ...]) -> None:
        self._config = config
        self._found: Mapping[Pattern, Mapping[str, str | None]] = {}
        if config.expressions:
            rows = match_names(config.expressions, names)
            self._found = {
                pattern: dict(zip(names, row, strict=True))
                for pattern, row in zip(config.expressions, rows, strict=True)
            }

    def is_target(self, name: str) -> bool:
        """Whether the config adapts this module."""
        config = self._config
        if self._names(config.exclude_modules, "exclude_modules", name):
            return False
        targets = config.target_modules
        if targets is None or isinstance(targets, str):
            return targets is None or self._names(targets, "target_modules", name)
        if name in targets:
            return True
        if not _matches(name, targets):
            return False
        return not config.layers_to_transform or self._layer(name) in config.layers_to_transform

    def _names(self, entries: frozenset[str] | str, field: str, name: str) -> bool:
        if isinstance(entries, str):
            return self._found[Pattern(field, PatternKind.WHOLE, entries)][name] is not None
        return _matches(name, entries)

    def first_match(self, field: str, patterns: Sequence[tuple[str, _T]], name: str, default: _T) -> _T:
        """The value of the first key that matches a module."""
        suffixes = {len(suffix): suffix for suffix in _suffixes(name)}
        for key, value in patterns:
            if is_expression(PatternKind.SUFFIX, key):
                is_match = self._found[Pattern(field, PatternKind.SUFFIX, key)][name] is not None
            else:
                is_match = _same(key, suffixes.get(len(key), ""))
            if is_match:
                return value
        return default

    def _layer(self, name: str) -> int | None:
        """The number PEFT takes for a module's layer; None if its path has none.

        Without patterns it is the first part made of digits that has two parts before it and one after. With patterns
        it is the first such part that follows a pattern.
        """
        if not self._config.layers_pattern:
            middle = name.split(".")[2:-1]
            return next((int(part) for part in middle if _is_number(part)), None)
        for pattern in self._config.layers_pattern:
            if is_expression(PatternKind.LAYER, pattern):
                found = self._found[Pattern("layers_pattern", PatternKind.LAYER, pattern)][name]
                if found is not None:
                    return int(found) if found else None
            elif (number := _number_after(pattern, name)) is not None:
                return number
        return None


def _other_names(num_layers: int) -> tuple[str, ...]:
    layers = (f"model.layers.{layer}{part}" for layer in range(num_layers) for part in _OTHER_IN_LAYER)
    return (*_OTHER_MODULES, *layers)


def _suffixes(name: str) -> Iterator[str]:
    """The path itself and every part of it that follows a dot."""
    yield name
    position = name.find(".")
    while position >= 0:
        yield name[position + 1 :]
        position = name.find(".", position + 1)


def _matches(name: str, entries: Set[str]) -> bool:
    return any(suffix in entries for suffix in _suffixes(name))


def _number_after(pattern: str, name: str) -> int | None:
    """The first number in a path that follows a literal pattern."""
    for tail in _suffixes(name):
        rest = tail[len(pattern) :].split(".")
        if _same(pattern, tail[: len(pattern)]) and len(rest) > 2 and rest[0] == "" and _is_number(rest[1]):
            return int(rest[1])
    return None


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit()


def _same(pattern: str, text: str) -> bool:
    """Equal, with "." in the pattern standing for any one character."""
    if len(pattern) != len(text):
        return False
    return pattern == text or all(want in (".", got) for want, got in zip(pattern, text, strict=True))


def _make_target(config: PeftConfig, matcher: Matcher, site: BaseSite) -> Target:
    rank = matcher.first_match("rank_pattern", config.rank_pattern, site.name, config.rank)
    alpha = matcher.first_match("alpha_pattern", config.alpha_pattern, site.name, config.alpha)
    scale = alpha / (math.sqrt(rank) if config.use_rslora else rank)
    if not abs(scale) <= _MAX_SCALE:
        message = f"The scale of {site.name!r} is {scale:.6g}, beyond the largest float32."
        raise AdapterRefused(RefusalReason.NONFINITE, message, "lora_alpha")
    return Target(site, rank, scale)
