"""Which linear layers of a base a config adapts, and with which rank and scale, by PEFT's rules.

- `target_modules` and `exclude_modules` entries match a module's whole path or a dotted suffix of it.
- `rank_pattern` and `alpha_pattern` keys match likewise, with "." standing for any one character; the first matching
  key of the file counts. A key that matches no module has no effect, in PEFT as here.
- `layers_to_transform` compares the first number in a path; entries that are a whole path are not subject to it.
"""

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

from loraplex.adapters.peft_config import PeftConfig
from loraplex.adapters.refusal import show, unsupported
from loraplex.core import AdapterRefused, BaseDescription, BaseSite, RefusalReason

VOCABULARY_MODULES = frozenset({"embed_tokens", "lm_head"})
_MAX_SCALE = 3.4028234663852886e38  # largest float32: the scale is applied in it

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Target:
    """One site a config adapts."""

    site: BaseSite
    rank: int
    scale: float


def expand_targets(config: PeftConfig, base: BaseDescription) -> tuple[Target, ...]:
    """The adapted sites in the base's order. Raises AdapterRefused; never returns an empty tuple."""
    _check_entries(config, base)
    sites = [site for site in base.sites if _is_target(config, site.name)]
    if not sites:
        message = f"The config adapts no linear layer of the base {base.name!r}."
        raise AdapterRefused(RefusalReason.TARGET_NOT_COVERED, message, "target_modules")
    return tuple(_make_target(config, site) for site in sites)


def _check_entries(config: PeftConfig, base: BaseDescription) -> None:
    """Refuse entries that name nothing we can adapt: a config for another base, or one that reaches further."""
    known = {suffix for site in base.sites for suffix in _suffixes(site.name)}
    for entry in sorted(config.target_modules or ()):
        if entry.rsplit(".", 1)[-1] in VOCABULARY_MODULES:
            raise unsupported("target_modules", entry, "adapters on the embedding or the output head are not served")
        if entry not in known:
            message = f"target_modules names {show(entry)}, which is no linear layer of the base {base.name!r}."
            raise AdapterRefused(RefusalReason.TARGET_NOT_COVERED, message, "target_modules")
    for layer in sorted(config.layers_to_transform):
        if not 0 <= layer < base.num_layers:
            message = f"layers_to_transform names layer {show(layer)}; the base has layers 0 to {base.num_layers - 1}."
            raise AdapterRefused(RefusalReason.TARGET_NOT_COVERED, message, "layers_to_transform")


def _suffixes(name: str) -> Iterator[str]:
    """The path itself and every part of it that follows a dot."""
    yield name
    position = name.find(".")
    while position >= 0:
        yield name[position + 1 :]
        position = name.find(".", position + 1)


def _matches(name: str, entries: Set[str]) -> bool:
    return any(suffix in entries for suffix in _suffixes(name))


def _is_target(config: PeftConfig, name: str) -> bool:
    if _matches(name, config.exclude_modules):
        return False
    if config.target_modules is None or name in config.target_modules:
        return True
    if not _matches(name, config.target_modules):
        return False
    return not config.layers_to_transform or _layer_index(name, config.layers_pattern) in config.layers_to_transform


def _layer_index(name: str, patterns: Sequence[str]) -> int | None:
    """The number PEFT takes for a module's layer; None if its path has none.

    Without patterns it is the first part made of digits that has two parts before it and one after. With patterns it
    is the first such part that follows a pattern.
    """
    if not patterns:
        middle = name.split(".")[2:-1]
        return next((int(part) for part in middle if _is_number(part)), None)
    for pattern in patterns:
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


def _first_match(patterns: Sequence[tuple[str, _T]], name: str, default: _T) -> _T:
    suffixes = {len(suffix): suffix for suffix in _suffixes(name)}
    for key, value in patterns:
        if _same(key, suffixes.get(len(key), "")):
            return value
    return default


def _make_target(config: PeftConfig, site: BaseSite) -> Target:
    rank = _first_match(config.rank_pattern, site.name, config.rank)
    alpha = _first_match(config.alpha_pattern, site.name, config.alpha)
    scale = alpha / (math.sqrt(rank) if config.use_rslora else rank)
    if not abs(scale) <= _MAX_SCALE:
        message = f"The scale of {site.name!r} is {scale:.6g}, beyond the largest float32."
        raise AdapterRefused(RefusalReason.NONFINITE, message, "lora_alpha")
    return Target(site, rank, scale)
