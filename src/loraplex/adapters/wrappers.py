"""What trainers wrap around modules, and which module paths PEFT may have seen when it matched a config.

PEFT matches a config against the paths of the model it is given, which a file's names show only in part:
`language_model` was in that model, FSDP wraps after PEFT, and the other wrappers may have been put on before PEFT
matched or after. What stands in front of PEFT's own prefix was certainly put on after.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

_IN_THE_MODEL = frozenset({"language_model"})
_MAYBE_LATER = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "module"})
_LATER = frozenset({"_fsdp_wrapped_module"})
WRAPPERS = _IN_THE_MODEL | _MAYBE_LATER | _LATER
_PEFT_PREFIX = ("base_model", "model")

Wrapping = tuple[tuple[str, ...], ...]
"""The wrappers before each part of a module's path, and as the last item those after it."""


@dataclass(frozen=True, slots=True)
class SplitName:
    """The parts of a tensor's name without wrappers and PEFT's prefix, at least one."""

    parts: tuple[str, ...]
    wrapping: Wrapping  # before each part; not what stands in front of PEFT's prefix


@dataclass(frozen=True, slots=True)
class NamedModules:
    """The modules that a file has pairs for, by their path in the base. By default no name is wrapped."""

    is_wrapped: bool = False  # some name has a wrapper, be it in front of PEFT's prefix
    wrappings: Mapping[str, Wrapping] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)  # rows of A, where the file has A


@dataclass(frozen=True, slots=True)
class Reading:
    """The paths of a base's modules, by the path in the base.

    A module that the file does not name may have any of the wrappings that the file has, so several paths.
    """

    paths: Mapping[str, tuple[str, ...]]

    def all_paths(self) -> Iterator[str]:
        """The paths of all modules; some may come twice."""
        return (path for paths in self.paths.values() for path in paths)


def split_name(name: str) -> SplitName:
    """Take wrappers and PEFT's prefix off a tensor's name."""
    parts: list[str] = []
    wrapping: list[tuple[str, ...]] = []
    before: list[str] = []
    for part in name.split("."):
        if part in WRAPPERS:
            before.append(part)
            continue
        parts.append(part)
        wrapping.append(tuple(before))
        before = []
    start = len(_PEFT_PREFIX) if tuple(parts[: len(_PEFT_PREFIX)]) == _PEFT_PREFIX else 0
    if len(parts) == start:
        return SplitName(("",), ((),))
    return SplitName(tuple(parts[start:]), tuple(wrapping[start:]))


def wrapped_readings(modules: Iterable[str], named: NamedModules) -> tuple[Reading, ...]:
    """The paths with all wrappers that PEFT may have seen and, if these differ, with those it certainly saw."""
    names = tuple(modules)
    most, least = _read(names, named, _IN_THE_MODEL | _MAYBE_LATER), _read(names, named, _IN_THE_MODEL)
    return (most,) if most == least else (most, least)


def plain_reading(modules: Iterable[str]) -> Reading:
    """The paths in the base."""
    return Reading({name: (name,) for name in modules})


def _read(names: Iterable[str], named: NamedModules, kept: frozenset[str]) -> Reading:
    every = tuple(dict.fromkeys(named.wrappings.values())) or ((),)
    paths: dict[str, tuple[str, ...]] = {}
    for name in names:
        wrappings = (named.wrappings[name],) if name in named.wrappings else every
        paths[name] = tuple(dict.fromkeys(_wrap(name, wrapping, kept) for wrapping in wrappings))
    return Reading(paths)


def _wrap(name: str, wrapping: Wrapping, kept: frozenset[str]) -> str:
    """A path with those wrappers that are kept. A path of another depth has what stands before its own parts."""
    parts: list[str] = []
    plain = name.split(".")
    for index, before in enumerate(wrapping[: len(plain) + 1]):
        parts.extend(part for part in before if part in kept)
        parts.extend(plain[index : index + 1])
    parts.extend(plain[len(wrapping) :])
    return ".".join(parts)
