"""Which adapters are used most, kept in a file from one run to the next."""

import heapq
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from loraplex.core import AdapterDigest

HALF_LIFE_S = 3600.0
MAX_NAMES = 10_000
MAX_FILE_BYTES = 4 * 2**20
_VERSION = 1


class Starts:
    """Starts by adapter since `drain`. Of more than twice MAX_NAMES adapters the least started are forgotten."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: Counter[AdapterDigest] = Counter()

    def note(self, digest: AdapterDigest) -> None:
        """An adapter was started once more."""
        self._counts[digest] += 1
        if len(self._counts) > 2 * MAX_NAMES:
            self._counts = Counter(dict(self._counts.most_common(MAX_NAMES)))

    def drain(self) -> Counter[AdapterDigest]:
        """All starts since the last time."""
        counts, self._counts = self._counts, Counter()
        return counts


class Popularity:
    """A score for each name: starts, which count half as much after an hour. Belongs to one thread."""

    __slots__ = ("_scores",)

    def __init__(self, scores: Mapping[str, float] | None = None) -> None:
        self._scores = dict(scores or {})

    def note(self, starts: Mapping[str, float], elapsed_s: float) -> None:
        """Book starts of the last `elapsed_s` seconds."""
        kept = math.pow(0.5, max(0.0, elapsed_s) / HALF_LIFE_S)
        scores = {name: score * kept for name, score in self._scores.items()}
        for name, count in starts.items():
            scores[name] = scores.get(name, 0.0) + count
        top = heapq.nlargest(MAX_NAMES, scores.items(), key=lambda item: (item[1], item[0]))
        self._scores = {name: score for name, score in top if score > 1e-3}

    def top(self, count: int) -> list[str]:
        """The most popular names, the first most."""
        return [name for name, _ in heapq.nlargest(count, self._scores.items(), key=lambda item: (item[1], item[0]))]

    def text(self) -> str:
        """What `read_scores` reads."""
        return json.dumps({"version": _VERSION, "scores": self._scores}, indent=0)


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole, for its owner alone. Raises OSError."""
    beside = path.with_name(path.name + ".new")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def read_scores(path: Path) -> dict[str, float]:
    """The scores of a file; none if there is no file. Raises OSError, and ValueError for one that is damaged."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return {}
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
    try:
        content = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    scores = content.get("scores") if isinstance(content, dict) and content.get("version") == _VERSION else None
    if not isinstance(scores, dict) or len(scores) > MAX_NAMES:
        raise ValueError("it holds no scores")
    if not all(type(score) in (int, float) and math.isfinite(score) and score >= 0 for score in scores.values()):
        raise ValueError("a score is not a number of 0 or more")
    return {name: float(score) for name, score in scores.items()}
