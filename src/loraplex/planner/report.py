"""Figures of a run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loraplex.planner.simulator import Simulation


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one run. Failed requests count as without a first token; times are of the virtual clock."""

    policy: str
    num_requests: int
    num_failed: int
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_max_s: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    gap_p99_ms: float  # of each request's longest gap between two tokens
    tokens_per_s: float
    cold_share: float
    num_loads: int
    num_evictions: int
    num_preemptions: int
    stall_s: float
    cached_share: float  # of prompt tokens
    max_distinct: int
    within_250_ms: float  # share of requests whose first token came by then
    within_1_s: float


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share lies; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def make_report(run: Simulation) -> Report:
    """Figures of a run that has ended."""
    outcomes = run.outcomes
    ttft = [outcome.ttft_s for outcome in outcomes]
    tpot = [1e3 * outcome.tpot_s for outcome in outcomes if outcome.tpot_s is not None]
    gaps = [1e3 * outcome.longest_gap_s for outcome in outcomes if outcome.num_tokens > 1]
    with_adapter = [outcome for outcome in outcomes if outcome.request.adapter is not None]
    prompts = sum(outcome.request.prompt_len for outcome in outcomes)
    count = max(len(outcomes), 1)
    return Report(
        policy=run.policy.name,
        num_requests=len(outcomes),
        num_failed=sum(outcome.has_failed for outcome in outcomes),
        ttft_p50_s=quantile(ttft, 0.5),
        ttft_p99_s=quantile(ttft, 0.99),
        ttft_max_s=max(ttft, default=0.0),
        tpot_p50_ms=quantile(tpot, 0.5),
        tpot_p99_ms=quantile(tpot, 0.99),
        gap_p99_ms=quantile(gaps, 0.99),
        tokens_per_s=sum(outcome.num_tokens for outcome in outcomes) / run.now if run.now else 0.0,
        cold_share=sum(outcome.is_cold for outcome in with_adapter) / max(len(with_adapter), 1),
        num_loads=run.num_loads,
        num_evictions=run.scheduler.residency.num_evictions,
        num_preemptions=run.scheduler.num_preemptions,
        stall_s=run.stall_s,
        cached_share=sum(outcome.num_cached_tokens for outcome in outcomes) / max(prompts, 1),
        max_distinct=run.max_distinct,
        within_250_ms=sum(value <= 0.25 for value in ttft) / count,
        within_1_s=sum(value <= 1.0 for value in ttft) / count,
    )


def served_between(run: Simulation, tenant: str, start_s: float, end_s: float) -> float:
    """What a tenant used of the device, in milliseconds of the cost model."""
    return sum(cost for time, cost in run.served.get(tenant, ()) if start_s <= time < end_s)


def jain(shares: Iterable[float]) -> float:
    """Jain's index: 1 where all are served alike, 1/n where one gets everything."""
    values = list(shares)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0
