"""What an engine tells of itself. The number of figures does not depend on how many adapters there are."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from loraplex.core.types import AdapterDigest

DISTINCT_BUCKETS = ("0", "1", "2-8", "9-32", "33-64", "65+")
"""Steps by how many distinct adapters they have."""

_DISTINCT_FROM = (1, 2, 9, 33, 65)
NUM_POPULAR_ADAPTERS = 20
NUM_LISTED_ADAPTERS = 256


def distinct_bucket(num_adapters: int) -> int:
    """Index into DISTINCT_BUCKETS."""
    return bisect_right(_DISTINCT_FROM, num_adapters)


@dataclass(frozen=True, slots=True)
class Histogram:
    """`counts[i]` values are at most `bounds[i]` and above the bound before; the last count is of those above all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float  # of the values


class HistogramCounter:
    """A histogram that grows."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += times * value

    def read(self) -> Histogram:
        """As it is now."""
        return Histogram(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """How much one adapter of the pool is used. `popularity` counts starts, with a half-life of a minute."""

    digest: AdapterDigest
    popularity: float
    num_running: int  # sequences


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that is in the pool, or only in host memory."""

    digest: AdapterDigest
    in_pool: bool
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class AdapterResidence:
    """Where the weights of one adapter are. `state` is that of the pool: absent, loading, resident or failed."""

    digest: AdapterDigest
    state: str
    in_host_memory: bool
    num_pages: int  # that it has in the pool, or would have; 0 where it is neither there nor in host memory
    num_bytes: int  # of these pages
    num_running: int  # sequences that run on it; while there are any it is not evicted
    popularity: float  # starts since it came into the pool, with a half-life of a minute
    idle_s: float | None  # since the last start; None if there was none since it came
    is_pinned: bool = False  # never evicted once it is in the pool
    packed_bytes: int = 0  # of its packed file on disk; 0 where there is none
    error_code: str | None = None  # of what kept it from being read into host memory
    retry_after_s: float | None = None  # until a load that failed is tried again


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory for adapters. What was held is kept, pinned where a GPU reads it, for the next to lease."""

    num_adapters: int = 0
    held_bytes: int = 0  # that the system has given
    leased_bytes: int = 0  # of these, that hold adapters
    max_bytes: int | None = None  # None: no bound


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and gauges of one engine, read at any moment. Counters only grow."""

    num_waiting: int = 0
    num_running: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_idle_pages: int = 0  # that could be evicted now: of adapters and prefixes that nothing uses
    num_adapter_pages: int = 0  # held by adapters, idle ones included
    host_memory: HostMemory = HostMemory()
    page_tokens: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_adapter_loads: int = 0
    adapter_load_s: float = 0.0
    num_adapter_evictions: int = 0
    num_distinct_adapters: int = 0  # in the last step
    max_loras: int = 0
    running_adapters: tuple[str, ...] = ()  # names, those with most sequences first, of these the latest
    waiting_adapters: tuple[str, ...] = ()
    resident_adapters: tuple[str, ...] = ()  # digests
    num_loading_adapters: int = 0
    failed_adapters: tuple[AdapterDigest, ...] = ()  # whose load into the pool failed and is not tried again yet
    num_load_failures: int = 0
    num_adapter_reloads: int = 0  # loads of adapters that were evicted lately
    reload_pages: int = 0  # pages more with which nine in ten of the last of these would not have been
    num_warm_starts: int = 0  # sequences that found their adapter in the pool
    num_cold_starts: int = 0  # sequences that waited for a load
    evictions_by_reason: tuple[tuple[str, int], ...] = ()  # of adapters; a fixed set of reasons
    waiting_by_reason: tuple[tuple[str, int], ...] = ()  # sequences; a fixed set of reasons
    num_cached_pages: int = 0  # held by cached prefixes
    num_prefix_evictions: int = 0  # pages
    num_prefix_tokens: int = 0  # of prompts that could have used the prefix cache
    num_cached_tokens: int = 0  # of those, taken from it
    sum_ranks: float = 0.0  # of the distinct adapters in the last step
    queue_age_s: float = 0.0  # of the sequence that waits longest
    step_adapters: int = 0  # distinct adapters of each step, summed over all steps
    step_ranks: float = 0.0  # ranks of these, summed over all steps
    steps_by_distinct: tuple[tuple[str, int], ...] = ()  # DISTINCT_BUCKETS
    token_s_by_distinct: tuple[tuple[str, Histogram], ...] = ()  # from one token of a sequence to its next
    queue_s: Histogram | None = None  # from a request's arrival to its first step
    packed_files: tuple[tuple[str, int], ...] = ()  # what became of packed adapters on disk; a fixed set of events
    packed_bytes: int = 0  # of these on disk
    popular_adapters: tuple[AdapterUse, ...] = ()  # of the pool, at most NUM_POPULAR_ADAPTERS
    loaded_adapters: tuple[LoadedAdapter, ...] = ()  # the pool's first, at most NUM_LISTED_ADAPTERS
