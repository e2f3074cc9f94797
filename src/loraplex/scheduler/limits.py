"""What can never run, and how fast the queue moves."""

import math
from collections.abc import Iterable

from loraplex.core import AdapterDigest, ContextTooLong, Overloaded
from loraplex.pool import AdapterResidency, PoolGeometry
from loraplex.scheduler.sequence import Sequence

_MEMORY_S = 10.0  # of the rate of starts
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


def longest_length(
    geometry: PoolGeometry,
    max_model_len: int,
    prompt_len: int,
    max_tokens: int | None,
    adapter_pages: int,
    pinned_pages: int = 0,
) -> int:
    """Longest length a sequence may reach. Raises ContextTooLong if it could never run.

    `pinned_pages`: of pinned adapters other than its own.
    """
    if prompt_len < 1:
        raise ContextTooLong("The prompt is empty; at least 1 token is needed.", "prompt")
    if prompt_len >= max_model_len:
        raise ContextTooLong(
            f"The prompt has {prompt_len} tokens; the model's context is {max_model_len} tokens and must leave room "
            "for at least one more (--max-model-len).",
            "prompt",
        )
    max_len = max_model_len if max_tokens is None else min(max_model_len, prompt_len + max_tokens)
    capacity = (geometry.num_pages - adapter_pages - pinned_pages) * geometry.page_tokens
    if max_tokens is None:
        max_len = min(max_len, capacity)
    needed = max(max_len, prompt_len + 1)
    if needed > capacity:
        raise ContextTooLong(
            f"The request needs {needed} tokens of KV beside {adapter_pages} pages for its adapter"
            f"{f' and {pinned_pages} for pinned ones' if pinned_pages else ''}; the pool of {geometry.num_pages} pages "
            f"holds {max(capacity, 0)} (--kv-pages, --memory).",
            "max_tokens",
        )
    return max_len


def check_pin(
    geometry: PoolGeometry,
    residency: AdapterResidency,
    sequences: Iterable[Sequence],
    digest: AdapterDigest,
    num_pages: int,
    retry_after_s: float,
) -> None:
    """Raise Overloaded if a sequence could not reach its length beside all that would be pinned."""
    pinned = residency.num_pinned_pages + num_pages
    for seq in sequences:
        own = 0 if seq.adapter == digest or seq.adapter is None else seq.adapter_pages
        if seq.adapter is not None and residency.is_pinned(seq.adapter):
            own = 0
        needed = geometry.pages_for_tokens(seq.max_len) + own
        if needed + pinned > geometry.num_pages:
            raise Overloaded(
                f"{pinned} pages would be pinned, and a request that has not ended needs {needed} of the pool's "
                f"{geometry.num_pages} beside them (--kv-pages, --memory); pin when it has ended.",
                retry_after_s,
            )


class StartRate:
    """Sequences started a second, over about the last 10 s in which any waited."""

    __slots__ = ("_last_s", "_seconds", "_starts")

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._starts = 0.0
        self._seconds = 0.0

    def note(self, num_started: int, now: float, *, is_waiting: bool) -> None:
        """Book a step. Time in which nothing waited says nothing about how fast starts can be."""
        passed = max(0.0, now - self._last_s) if self._last_s is not None and is_waiting else 0.0
        self._last_s = now
        kept = math.exp(-passed / _MEMORY_S)
        self._starts = self._starts * kept + num_started
        self._seconds = self._seconds * kept + passed

    def wait_s(self, num_waiting: int) -> float:
        """Seconds until so many have started, from 1 to 60; 1 when nothing is known."""
        if not self._seconds:
            return MIN_RETRY_S
        if not self._starts:
            return MAX_RETRY_S
        return min(max(num_waiting * self._seconds / self._starts, MIN_RETRY_S), MAX_RETRY_S)
