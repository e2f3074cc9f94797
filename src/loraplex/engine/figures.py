"""Counters of an engine, and what is told of it when somebody asks.

`snapshot` and `residences` are called from any thread while the engine steps: they read numbers and copies of lists.
A step itself pays for what it counts alone, however many adapters there are and however many sequences wait.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from loraplex.core import AdapterDigest, AdapterResidence, AdapterUse, EngineStats, LoadedAdapter
from loraplex.core.figures import (
    DISTINCT_BUCKETS,
    NUM_LISTED_ADAPTERS,
    NUM_POPULAR_ADAPTERS,
    HistogramCounter,
    HostMemory,
    distinct_bucket,
)
from loraplex.engine.packed_files import PackedFileCounts
from loraplex.engine.packing import PackedAdapter
from loraplex.pool import AdapterResidency, AdapterState, EvictionReason, Placement
from loraplex.scheduler import Scheduler, Sequence, StepPlan, WaitReason

TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
QUEUE_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_PACKED_EVENTS = (
    ("hit", "num_hits"),
    ("miss", "num_misses"),
    ("stored", "num_stored"),
    ("dropped", "num_dropped"),
    ("evicted", "num_evicted"),
    ("write_failed", "num_failures"),
    ("read_failed", "num_read_failures"),
)


def _token_histograms() -> tuple[HistogramCounter, ...]:
    return tuple(HistogramCounter(TOKEN_BOUNDS_S) for _ in DISTINCT_BUCKETS)


@dataclass(slots=True)
class Counters:
    """What only the engine knows. Counters only grow; `num_distinct_adapters` and `sum_ranks` are of the last step."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_adapter_loads: int = 0
    num_load_failures: int = 0
    adapter_load_s: float = 0.0
    num_distinct_adapters: int = 0
    sum_ranks: float = 0.0
    step_adapters: int = 0
    step_ranks: float = 0.0
    steps_by_distinct: list[int] = field(default_factory=lambda: [0] * len(DISTINCT_BUCKETS))
    token_s: tuple[HistogramCounter, ...] = field(default_factory=_token_histograms)
    queue_s: HistogramCounter = field(default_factory=lambda: HistogramCounter(QUEUE_BOUNDS_S))

    def count(self, plan: StepPlan, sequences: Iterable[Sequence]) -> int:
        """Book a step that is launched; `sequences` are those of its chunks. How many draw a token after their first,
        but for those that were preempted and compute theirs again.
        """
        num_next = 0
        for chunk, seq in zip(plan.chunks, sequences, strict=True):
            self.num_prompt_tokens += max(0, min(chunk.num_tokens, seq.prompt_len - chunk.start))
            num_next += chunk.num_tokens == 1 and chunk.start >= seq.prompt_len
        self.num_steps += 1
        self.num_distinct_adapters, self.sum_ranks = len(plan.adapters), plan.sum_ranks
        self.step_adapters += len(plan.adapters)
        self.step_ranks += plan.sum_ranks
        self.steps_by_distinct[distinct_bucket(len(plan.adapters))] += 1
        return num_next

    def count_tokens(self, num_adapters: int, num_next: int, seconds: float) -> None:
        """Book the tokens of a step of so many distinct adapters that came `seconds` after the step before it."""
        if num_next:
            self.token_s[distinct_bucket(num_adapters)].add(seconds, num_next)


def snapshot(
    scheduler: Scheduler,
    counters: Counters,
    running: tuple[str, ...],
    waiting: tuple[str, ...],
    now: float,
    adapters: Mapping[AdapterDigest, PackedAdapter],
    files: PackedFileCounts,
    host: HostMemory,
) -> EngineStats:
    """Figures as of now. `running` and `waiting` are adapters' names; `adapters` is a copy of those in host memory.

    `files` and `host` tell of the tiers beside the pool.
    """
    reasons = scheduler.waiting.num_by_reason()
    oldest = next(iter(scheduler.waiting), None)
    popular = scheduler.residency.most_popular(NUM_LISTED_ADAPTERS, now)
    return replace(
        _adapter_figures(scheduler, popular[:NUM_POPULAR_ADAPTERS], now),
        num_waiting=len(scheduler.waiting),
        num_running=len(scheduler.running),
        num_pages=scheduler.pool.num_pages,
        num_free_pages=scheduler.pool.num_free,
        num_idle_pages=scheduler.residency.num_evictable_pages,
        page_tokens=scheduler.geometry.page_tokens,
        num_preemptions=scheduler.num_preemptions,
        max_loras=scheduler.config.max_distinct,
        running_adapters=running,
        waiting_adapters=waiting,
        num_warm_starts=scheduler.starts.num_warm,
        num_cold_starts=scheduler.starts.num_cold,
        waiting_by_reason=tuple((reason.value, reasons[reason]) for reason in WaitReason),
        num_cached_pages=scheduler.cache.num_pages,
        num_prefix_evictions=scheduler.cache.num_evictions,
        num_prefix_tokens=scheduler.starts.num_prompt_tokens,
        num_cached_tokens=scheduler.starts.num_cached_tokens,
        queue_age_s=max(0.0, now - oldest.arrival_s) if oldest is not None else 0.0,
        packed_files=tuple((event, getattr(files, name)) for event, name in _PACKED_EVENTS),
        packed_bytes=files.num_bytes,
        host_memory=host,
        loaded_adapters=tuple(islice(_loaded(scheduler.residency, popular, adapters), NUM_LISTED_ADAPTERS)),
        **_counted(counters, is_running=bool(scheduler.running)),
    )


def _adapter_figures(scheduler: Scheduler, popular: list[tuple[AdapterDigest, float]], now: float) -> EngineStats:
    """Those of the pool's adapters, of which `popular` come with their popularity."""
    residency = scheduler.residency
    evictions = tuple((reason.value, residency.evictions[reason]) for reason in EvictionReason)
    return EngineStats(
        num_adapter_pages=residency.num_pages,
        num_adapter_evictions=sum(count for _, count in evictions),
        evictions_by_reason=evictions,
        resident_adapters=residency.resident,
        num_loading_adapters=len(residency.loading),
        failed_adapters=residency.failed(now),
        num_adapter_reloads=residency.reloads.count,
        reload_pages=residency.reloads.missing(now),
        popular_adapters=tuple(
            AdapterUse(digest, popularity, residency.num_users(digest))
            for digest, popularity in popular
            if popularity > 0.0
        ),
    )


def _loaded(
    residency: AdapterResidency,
    popular: list[tuple[AdapterDigest, float]],
    packed: Mapping[AdapterDigest, PackedAdapter],
) -> Iterator[LoadedAdapter]:
    """The pool's `popular` adapters, then those only in host memory, the last that came first."""
    for digest, _ in popular:
        yield LoadedAdapter(digest, in_pool=True, is_pinned=residency.is_pinned(digest))
    for digest in reversed(tuple(packed)):
        if not residency.is_resident(digest):
            yield LoadedAdapter(digest, in_pool=False)


def _counted(counters: Counters, *, is_running: bool) -> dict[str, Any]:
    """The counters, by the names of EngineStats."""
    return {
        "num_steps": counters.num_steps,
        "num_prompt_tokens": counters.num_prompt_tokens,
        "num_output_tokens": counters.num_output_tokens,
        "num_adapter_loads": counters.num_adapter_loads,
        "num_load_failures": counters.num_load_failures,
        "adapter_load_s": counters.adapter_load_s,
        "num_distinct_adapters": counters.num_distinct_adapters if is_running else 0,
        "sum_ranks": counters.sum_ranks if is_running else 0.0,
        "step_adapters": counters.step_adapters,
        "step_ranks": counters.step_ranks,
        "steps_by_distinct": tuple(zip(DISTINCT_BUCKETS, counters.steps_by_distinct, strict=True)),
        "token_s_by_distinct": tuple(
            (bucket, tokens.read()) for bucket, tokens in zip(DISTINCT_BUCKETS, counters.token_s, strict=True)
        ),
        "queue_s": counters.queue_s.read(),
    }


_ABSENT = Placement(AdapterState.ABSENT, 0, 0, 0.0, None)


def residences(
    scheduler: Scheduler,
    packed: Mapping[AdapterDigest, PackedAdapter],
    file_sizes: Mapping[AdapterDigest, int],
    now: float,
) -> tuple[AdapterResidence, ...]:
    """Every adapter that is packed in host memory or on disk, in the pool, or failed lately, by digest.

    `packed` and `file_sizes` (of packed files, in bytes) are copies.
    """
    placements = scheduler.residency.placements(now)
    page_bytes = scheduler.geometry.page_bytes
    found = []
    for digest in sorted(placements.keys() | packed.keys() | file_sizes.keys()):
        place, image = placements.get(digest, _ABSENT), packed.get(digest)
        num_pages = place.num_pages or (image.num_pages if image is not None else 0)
        found.append(
            AdapterResidence(
                digest=digest,
                state=place.state.value,
                in_host_memory=image is not None,
                num_pages=num_pages,
                num_bytes=num_pages * page_bytes,
                num_running=place.num_users,
                popularity=place.popularity,
                idle_s=max(0.0, now - place.used_s) if place.used_s is not None else None,
                is_pinned=scheduler.residency.is_pinned(digest),
                packed_bytes=file_sizes.get(digest, 0),
                retry_after_s=round(place.retry_at_s - now, 3) if place.retry_at_s is not None else None,
            )
        )
    return tuple(found)
