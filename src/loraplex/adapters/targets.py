"""Which linear layers of a base a config adapts, and with which rank and scale, by PEFT's rules.

- `target_modules` and `exclude_modules` entries match a module's whole path or a dotted suffix of it; as a string they
  are a regular expression for the whole path. Entries that match nothing have no effect, if others match.
- `rank_pattern` and `alpha_pattern` keys match likewise, as regular expressions; the first matching key of the file
  counts. A key that matches no module has no effect, in PEFT as here; where the file's names are wrapped it is refused.
- `layers_to_transform` compares the first number in a path; entries that are a whole path are not subject to it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

from loraplex.adapters.patterns import Pattern, PatternKind, match_names
from loraplex.adapters.peft_config import PeftConfig, is_expression
from loraplex.adapters.refusal import show, unsupported
from loraplex.adapters.wrappers import NamedModules, Reading, plain_reading, wrapped_readings
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

_PLAINLY_NAMED = NamedModules()
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Target:
    """One site a config adapts."""

    site: BaseSite
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a config means by one reading of the file's names."""

    targets: tuple[Target, ...]  # empty where it adapts nothing
    refusal: AdapterRefused | None  # where PEFT fails, or adapts the embedding or the head
    dead_key: tuple[str, str] | None  # field and key of a pattern that matches no module


def expand_targets(
    config: PeftConfig, base: BaseDescription, named: NamedModules = _PLAINLY_NAMED
) -> tuple[Target, ...]:
    """The adapted sites in the base's order. Raises AdapterRefused; never returns an empty tuple.

    Where names of the file are wrapped, the config is read by the paths that PEFT may have seen (`wrappers`). Readings
    that give other modules or ranks than the file has are out; the others must agree (`_agreed`). The paths of the base
    count only if nothing is adapted by any other. If all are out, what is returned contradicts the file, which
    `validate` refuses. Regular expressions run in a child process, which takes tens of milliseconds.
    """
    others = _other_names(base.num_layers)
    names = (*(site.name for site in base.sites), *others)
    plain = plain_reading(names)
    with_wrappers = wrapped_readings(names, named) if named.is_wrapped else ()
    every = (*with_wrappers, plain)
    matcher = Matcher(config, tuple(dict.fromkeys(path for reading in every for path in reading.all_paths())))
    _check_layers(config, base)
    outcomes = [_read(config, base, matcher, reading, others) for reading in with_wrappers]
    fitting = [outcome for outcome in outcomes if _fits(outcome, named)]
    if fitting:
        return _agreed(fitting)
    for outcome in outcomes:
        if outcome.refusal is not None or outcome.targets:
            return _certain(outcome, base)
    outcome = _read(config, base, matcher, plain, others)
    return _agreed([outcome]) if with_wrappers and outcome.targets else _certain(outcome, base)


def _read(
    config: PeftConfig, base: BaseDescription, matcher: "Matcher", reading: Reading, others: Sequence[str]
) -> _Outcome:
    refusal = _refuse_other_modules(config, matcher, reading, others)
    if refusal is not None:
        return _Outcome((), refusal, None)
    sites = [site for site in base.sites if any(map(matcher.is_target, reading.paths[site.name]))]
    targets = tuple(_make_target(config, matcher, site, reading.paths[site.name][0]) for site in sites)
    paths = [path for site in base.sites for path in reading.paths[site.name]]
    return _Outcome(targets, None, matcher.dead_key(paths))


def _certain(outcome: _Outcome, base: BaseDescription) -> tuple[Target, ...]:
    """The targets of the one reading there is; keys that match nothing have no effect. Raises AdapterRefused."""
    if outcome.refusal is not None:
        raise outcome.refusal
    if not outcome.targets:
        message = f"The config adapts no linear layer of the base {base.name!r}."
        raise AdapterRefused(RefusalReason.TARGET_NOT_COVERED, message, "target_modules")
    return outcome.targets


def _fits(outcome: _Outcome, named: NamedModules) -> bool:
    """Whether these are the modules and ranks that the file has."""
    return bool(outcome.targets) and {target.site.name: target.rank for target in outcome.targets} == named.ranks


def _agreed(outcomes: Sequence[_Outcome]) -> tuple[Target, ...]:
    """The targets of the first reading in which every key matches a module. Raises AdapterRefused for none or several.

    A reading with fewer wrappers in which a key is dead need not agree: the key shows that PEFT saw the wrappers. One
    with more must agree all the same, as a key can be dead in PEFT, by a slip.
    """
    index = next((index for index, outcome in enumerate(outcomes) if outcome.dead_key is None), None)
    if index is None:
        field, key = next(outcome.dead_key for outcome in outcomes if outcome.dead_key is not None)
        message = (
            f"adapter_config.json: {show(field)} has the key {show(key)}, which matches no linear layer "
            "by those readings of the file's wrapped names that give its modules and ranks."
        )
        raise AdapterRefused(RefusalReason.TARGET_NOT_COVERED, message, field)
    found = outcomes[index].targets
    rivals = (*outcomes[:index], *(outcome for outcome in outcomes[index:] if outcome.dead_key is None))
    if any(outcome.targets != found for outcome in rivals):
        message = (
            "The file's names are wrapped, and the scales of the config depend on whether the wrappers were there when "
            "PEFT matched its keys. Write keys of alpha_pattern that match in both cases."
        )
        raise AdapterRefused(RefusalReason.TARGET_NOT_COVERED, message, "alpha_pattern")
    return found


def _check_layers(config: PeftConfig, base: BaseDescription) -> None:
    """Refuse numbers of layers that the base lacks: a config for another base."""
    for layer in sorted(config.layers_to_transform):
        if not 0 <= layer < base.num_layers:
            message = f"layers_to_transform names layer {show(layer)}; the base has layers 0 to {base.num_layers - 1}."
            raise AdapterRefused(RefusalReason.TARGET_NOT_COVERED, message, "layers_to_transform")


def _refuse_other_modules(
    config: PeftConfig, matcher: "Matcher", reading: Reading, others: Sequence[str]
) -> AdapterRefused | None:
    """A refusal of names and expressions that adapt what is no linear layer of ours. "all-linear" never does."""
    if config.target_modules is None:
        return None
    name = next((name for name in others if any(map(matcher.is_target, reading.paths[name]))), None)
    if name is None:
        return None
    if name.rsplit(".", 1)[-1] in VOCABULARY_MODULES:
        return unsupported("target_modules", name, "adapters on the embedding or the output head are not served")
    message = f"target_modules matches {show(name)}, which is no linear layer."
    return AdapterRefused(RefusalReason.TARGET_NOT_COVERED, message, "target_modules")


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
        suffixes = _by_length(name)
        matching = (value for key, value in patterns if self._is_match(field, key, name, suffixes))
        return next(matching, default)

    def dead_key(self, names: Iterable[str]) -> tuple[str, str] | None:
        """The first key of rank_pattern or alpha_pattern that matches none of these names, with its field."""
        tables = [(name, _by_length(name)) for name in names]
        suffixes = {suffix for _, table in tables for suffix in table.values()}
        for field, patterns in (
            ("rank_pattern", self._config.rank_pattern),
            ("alpha_pattern", self._config.alpha_pattern),
        ):
            for key, _ in patterns:
                if key not in suffixes and not any(self._is_match(field, key, name, table) for name, table in tables):
                    return field, key
        return None

    def _is_match(self, field: str, key: str, name: str, suffixes: Mapping[int, str]) -> bool:
        if is_expression(PatternKind.SUFFIX, key):
            return self._found[Pattern(field, PatternKind.SUFFIX, key)][name] is not None
        return _same(key, suffixes.get(len(key), ""))

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


def _by_length(name: str) -> dict[int, str]:
    return {len(suffix): suffix for suffix in _suffixes(name)}


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


def _make_target(config: PeftConfig, matcher: Matcher, site: BaseSite, path: str) -> Target:
    rank = matcher.first_match("rank_pattern", config.rank_pattern, path, config.rank)
    alpha = matcher.first_match("alpha_pattern", config.alpha_pattern, path, config.alpha)
    scale = alpha / (math.sqrt(rank) if config.use_rslora else rank)
    if not abs(scale) <= _MAX_SCALE:
        message = f"The scale of {site.name!r} is {scale:.6g}, beyond the largest float32."
        raise AdapterRefused(RefusalReason.NONFINITE, message, "lora_alpha")
    return Target(site, rank, scale)
