"""Counters of an engine, and the snapshot of them that other threads read."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from loraplex.core import EngineStats
from loraplex.pool import EvictionReason
from loraplex.scheduler import Scheduler, Sequence, StepPlan, WaitReason


@dataclass(slots=True)
class Counters:
    """What only the engine knows. Counters only grow; the last two are of the last step."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_adapter_loads: int = 0
    num_load_failures: int = 0
    adapter_load_s: float = 0.0
    num_distinct_adapters: int = 0
    sum_ranks: float = 0.0

    def count(self, plan: StepPlan, sequences: Iterable[Sequence]) -> None:
        """Book a step that is launched; `sequences` are those of its chunks."""
        self.num_steps += 1
        for chunk, seq in zip(plan.chunks, sequences, strict=True):
            self.num_prompt_tokens += max(0, min(chunk.num_tokens, seq.prompt_len - chunk.start))
        self.num_distinct_adapters, self.sum_ranks = len(plan.adapters), plan.sum_ranks


def snapshot(
    scheduler: Scheduler, counters: Counters, running: tuple[str, ...], waiting: tuple[str, ...], now: float
) -> EngineStats:
    """Figures as of now. `running` and `waiting` are adapters' names."""
    residency, is_running = scheduler.residency, bool(scheduler.running)
    reasons = Counter(seq.wait for seq in scheduler.waiting)
    return EngineStats(
        num_waiting=len(scheduler.waiting),
        num_running=len(scheduler.running),
        num_pages=scheduler.pool.num_pages,
        num_free_pages=scheduler.pool.num_free,
        num_adapter_pages=residency.num_pages,
        page_tokens=scheduler.geometry.page_tokens,
        num_steps=counters.num_steps,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_output_tokens=counters.num_output_tokens,
        num_preemptions=scheduler.num_preemptions,
        num_adapter_loads=counters.num_adapter_loads,
        adapter_load_s=counters.adapter_load_s,
        num_adapter_evictions=residency.num_evictions,
        num_distinct_adapters=counters.num_distinct_adapters if is_running else 0,
        max_loras=scheduler.config.max_loras,
        running_adapters=running,
        waiting_adapters=waiting,
        resident_adapters=residency.resident,
        num_loading_adapters=len(residency.loading),
        num_failed_adapters=residency.num_failed(now),
        num_load_failures=counters.num_load_failures,
        num_adapter_reloads=residency.reloads.count,
        reload_pages=residency.reloads.missing_pages(),
        num_warm_starts=scheduler.starts.num_warm,
        num_cold_starts=scheduler.starts.num_cold,
        evictions_by_reason=tuple((reason.value, residency.evictions[reason]) for reason in EvictionReason),
        waiting_by_reason=tuple((reason.value, reasons[reason]) for reason in WaitReason),
        num_cached_pages=scheduler.cache.num_pages,
        num_prefix_evictions=scheduler.cache.num_evictions,
        num_prefix_tokens=scheduler.starts.num_prompt_tokens,
        num_cached_tokens=scheduler.starts.num_cached_tokens,
        sum_ranks=counters.sum_ranks if is_running else 0.0,
        queue_age_s=max(0.0, now - scheduler.waiting[0].arrival_s) if scheduler.waiting else 0.0,
    )
