"""Regular expressions of an adapter's config, run as PEFT runs them, by Python's `re`, but in a process of their own.

An expression can take exponential time, and it comes from a stranger. The child (`pattern_child.py`) gets expressions
and names as JSON, has little time and memory, and answers which names match.
"""

import functools
import json
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from loraplex.adapters.limits import MAX_PATTERN_CHARS, PATTERN_CPU_S
from loraplex.adapters.refusal import show
from loraplex.core import AdapterRefused, RefusalReason

_CHILD = Path(__file__).with_name("pattern_child.py")
_MEMORY_BYTES = 2**28
_WALL_S = 10.0 * PATTERN_CPU_S  # the machine may be busy


class PatternKind(StrEnum):
    """What a field's expression is matched against."""

    WHOLE = "whole"  # the whole name: target_modules, exclude_modules
    SUFFIX = "suffix"  # the name or what follows a dot: keys of rank_pattern and alpha_pattern
    LAYER = "layer"  # what stands before the layer's number: layers_pattern


@dataclass(frozen=True, slots=True)
class Pattern:
    """An expression of a config field."""

    field: str
    kind: PatternKind
    text: str

    @property
    def expression(self) -> str:
        """The expression that PEFT makes of it."""
        if self.kind is PatternKind.SUFFIX:
            return rf"(.*\.)?({self.text})$"
        if self.kind is PatternKind.LAYER:
            return rf"(?:^|.*?\.){self.text}\.(?P<idx>\d+)\."
        return self.text


def check_pattern(field: str, text: str) -> None:
    """Raise AdapterRefused (FIELD_INVALID) for an expression that is too long to be run."""
    if len(text) > MAX_PATTERN_CHARS:
        message = (
            f"adapter_config.json: {show(field)} has an expression of {len(text)} characters; the limit is "
            f"{MAX_PATTERN_CHARS}. List the modules instead."
        )
        raise AdapterRefused(RefusalReason.FIELD_INVALID, message, field)


@functools.lru_cache(maxsize=64)
def match_names(patterns: tuple[Pattern, ...], names: tuple[str, ...]) -> tuple[tuple[str | None, ...], ...]:
    """For each pattern and name: None where it does not match, else the layer's number, empty for other kinds.

    Blocks for some 20 ms, at most seconds. Raises AdapterRefused: FIELD_INVALID for what is no expression, TOO_LARGE
    for one that takes too much time or memory.
    """
    order = {
        "cpu_s": PATTERN_CPU_S,
        "memory_bytes": _MEMORY_BYTES,
        "patterns": [[pattern.kind is PatternKind.WHOLE, pattern.expression] for pattern in patterns],
        "names": names,
    }
    rows, invalid = _run_child(json.dumps(order).encode(), patterns)
    if invalid is not None:
        pattern = patterns[invalid]
        message = f"adapter_config.json: {show(pattern.field)} has {show(pattern.text)}, which is no valid expression."
        raise AdapterRefused(RefusalReason.FIELD_INVALID, message, pattern.field)
    return tuple(tuple(row) for row in rows)


def _run_child(order: bytes, patterns: tuple[Pattern, ...]) -> tuple[list[list[str | None]], int | None]:
    """The rows of matches, and the number of the first pattern that is no expression."""
    command = [sys.executable, "-I", "-S", str(_CHILD)]
    try:
        done = subprocess.run(command, input=order, capture_output=True, timeout=_WALL_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise _too_slow(patterns) from None
    if done.returncode != 0:
        raise _too_slow(patterns)
    answer = json.loads(done.stdout)
    return answer["rows"], answer["invalid"]


def _too_slow(patterns: tuple[Pattern, ...]) -> AdapterRefused:
    fields = ", ".join(dict.fromkeys(pattern.field for pattern in patterns))
    message = (
        f"adapter_config.json: the regular expressions of {fields} take more than {PATTERN_CPU_S} s or "
        f"{_MEMORY_BYTES} bytes to match. List the modules instead."
    )
    return AdapterRefused(RefusalReason.TOO_LARGE, message, patterns[0].field)
