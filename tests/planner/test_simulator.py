"""The scheduler and the pool on a virtual clock: 10,000 adapters, bursts, failures, and invariants after every step."""

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from loraplex.planner import (
    Policy,
    SimDevice,
    SimRequest,
    Simulation,
    Traffic,
    Workload,
    make_report,
    make_workload,
    simulate,
)
from loraplex.planner.report import jain, quantile, served_between
from loraplex.planner.workload import SimAdapter, adapter_digest
from loraplex.scheduler import WaitReason
from loraplex.scheduler.fairness import INPUT_WEIGHT, OUTPUT_WEIGHT

from ..idle import num_idle_pages

OURS = Policy("ours")
# Pages of 64 tokens: fewer to look at after every step. The pool holds about one adapter in a hundred.
SMALL = SimDevice(num_pages=1400, page_bytes=2**23, page_tokens=64)
MANY = Traffic(rate=14.0, duration_s=12.0, num_adapters=10_000, output_median=60.0, shared_len=96)


def check(run: Simulation) -> None:
    scheduler = run.scheduler
    scheduler.check_invariants()
    assert len(scheduler.running) <= scheduler.config.max_num_seqs
    bound = scheduler.config.max_load_pages
    assert bound is None or scheduler.residency.num_loading_pages <= bound


def check_end(run: Simulation) -> None:
    """Everything was answered or failed, and only idle pages are left."""
    scheduler = run.scheduler
    assert len(run.outcomes) == len(run.workload.requests)
    for outcome in run.outcomes:
        assert outcome.has_failed != (outcome.num_tokens == outcome.request.output_len)
        assert outcome.num_cached_tokens < outcome.request.prompt_len
    idle = num_idle_pages(scheduler.residency) + scheduler.cache.num_pages
    assert scheduler.pool.num_free + idle == scheduler.pool.num_pages


@pytest.mark.parametrize("alpha", [0.8, 1.0, 1.2])
def test_ten_thousand_adapters_with_bursts_and_failures(alpha: float) -> None:
    workload = make_workload(replace(MANY, alpha=alpha, burst=1.8, cv=2.0, period_s=6.0), seed=1)
    run = simulate(workload, OURS, replace(SMALL, failure_share=0.05), seed=2, after_step=check)
    check_end(run)
    assert run.num_failures > 0
    assert run.scheduler.residency.num_evictions > 0
    longest_s = max(outcome.ttft_s for outcome in run.outcomes if not outcome.has_failed)
    assert longest_s < 2.5, "somebody starved: a failed load is tried again after 2 s, and the run is far from full"


@dataclass
class Watch:
    """What a run of a full engine has come to: steps in which something waited for each reason, and out of patience."""

    reasons: Counter[WaitReason] = field(default_factory=Counter)
    num_impatient: int = 0
    most_running: int = 0

    def __call__(self, run: Simulation) -> None:
        check(run)
        scheduler = run.scheduler
        patience_s = scheduler.config.adapter_patience_s
        self.reasons.update(reason for reason, count in scheduler.waiting.num_by_reason().items() if count)
        self.num_impatient += any(
            seq.blocked_since_s is not None and run.now - seq.blocked_since_s > patience_s for seq in scheduler.waiting
        )
        self.most_running = max(self.most_running, len(scheduler.running))


@pytest.mark.parametrize(("alpha", "rate"), [(0.8, 9.0), (1.0, 10.0), (1.2, 11.0)])
def test_ten_thousand_adapters_near_capacity_wait_for_everything_and_nobody_starves(alpha: float, rate: float) -> None:
    """At about nine tenths of what the device can do, whose pages hold 26 of these adapters and no KV beside them."""
    traffic = replace(MANY, rate=rate, duration_s=20.0, output_median=400.0, alpha=alpha, burst=1.5, cv=1.5)
    workload, device = make_workload(replace(traffic, period_s=6.0), seed=1), replace(SMALL, num_pages=500)
    watch = Watch()
    run = simulate(workload, OURS, replace(device, failure_share=0.06), 2, watch, max_num_seqs=32, max_loras=16)
    check_end(run)
    assert {WaitReason.LOAD, WaitReason.SLOT, WaitReason.PAGES, WaitReason.BUDGET} <= watch.reasons.keys()
    assert watch.num_impatient > 0
    assert run.max_distinct == 16
    assert watch.most_running > 16
    assert run.num_failures > 0
    waits = [outcome.ttft_s for outcome in run.outcomes if not outcome.has_failed]
    assert max(waits) < 10.0, "somebody starved"
    assert run.now < traffic.duration_s + 5.0, "the load was beyond capacity: it says nothing about starvation"


def test_answers_that_outgrow_the_pool_are_preempted_and_nobody_starves() -> None:
    """Keys and values of long answers fill the pool: a whole answer takes up to 18 of 220 pages."""
    traffic = replace(MANY, rate=8.0, duration_s=15.0, num_adapters=4, ranks=(8,), output_median=700.0, max_output=1100)
    watch = Watch()
    device = replace(SMALL, num_pages=220)
    run = simulate(make_workload(traffic, seed=1), OURS, device, 2, watch, max_num_seqs=32)
    check_end(run)
    assert run.scheduler.num_preemptions >= 5
    assert WaitReason.PAGES in watch.reasons
    assert max(outcome.ttft_s for outcome in run.outcomes) < 10.0


def test_as_many_adapters_a_step_as_sequences_know_no_cliff() -> None:
    """Eight times as many adapters as a step may have by default, at the same load; and what a lower bound costs."""
    traffic = Traffic(rate=25.0, duration_s=12.0, alpha=1.0, ranks=(16,), base_share=0.0, prompt_median=100.0)
    p50, p99 = {}, {}
    for num_adapters, max_loras in ((32, None), (256, None), (256, 8)):
        workload = make_workload(replace(traffic, num_adapters=num_adapters), seed=3)
        run = simulate(workload, OURS, max_num_seqs=32, max_loras=max_loras)
        check_end(run)
        waits = [outcome.ttft_s for outcome in run.outcomes]
        p50[num_adapters, max_loras], p99[num_adapters, max_loras] = quantile(waits, 0.5), quantile(waits, 0.99)
    assert p50[256, None] < 3.0 * p50[32, None]
    assert p99[256, None] < 3.0 * p99[32, None]
    assert p50[256, 8] > 10.0 * p50[256, None], "this load would not have shown a cliff"


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_adapters_that_share_few_places_are_served_in_turns_and_not_one_request_a_turn(alpha: float) -> None:
    """Four times as many adapters as places, all asked for, and many requests out of patience."""
    traffic = Traffic(rate=25.0, duration_s=12.0, num_adapters=16, alpha=alpha, ranks=(16,), base_share=0.0)
    workload = make_workload(traffic, seed=3)
    watch = Watch()
    whole = simulate(workload, OURS, max_num_seqs=32)
    bound = simulate(workload, OURS, SMALL, 0, watch, max_num_seqs=32, max_loras=4)
    check_end(bound)
    assert watch.num_impatient > 100
    assert bound.now < 1.5 * whole.now


def test_target_holds_for_steps_with_prompts() -> None:
    traffic = Traffic(rate=10.0, duration_s=8.0, num_adapters=40, ranks=(16,), prompt_median=1500.0, output_median=80.0)
    workload = make_workload(traffic, seed=9)
    gaps = {}
    for target_ms in (None, 9.0):
        run = simulate(workload, Policy("", tpot_target_ms=target_ms), max_num_seqs=32)
        gaps[target_ms] = 1e3 * quantile([outcome.longest_gap_s for outcome in run.outcomes], 0.9)
    assert gaps[None] > 30.0
    assert gaps[9.0] < 9.5


@pytest.mark.parametrize("target_ms", [3.4, 3.6])
def test_a_target_that_the_base_misses_does_not_make_adapters_wait(target_ms: float) -> None:
    traffic = Traffic(rate=12.0, duration_s=10.0, num_adapters=200, base_share=0.5, output_median=200.0)
    run = simulate(make_workload(traffic, seed=1), Policy("", tpot_target_ms=target_ms), max_num_seqs=64)
    assert make_report(run).ttft_p99_s < 0.5
    assert run.max_distinct > 4


def test_same_seed_gives_the_same_run() -> None:
    runs = [simulate(make_workload(MANY, seed=7), OURS, replace(SMALL, failure_share=0.1), seed=7) for _ in range(2)]
    traces = [[(o.first_token_s, o.ended_s, o.has_failed) for o in run.outcomes] for run in runs]
    assert traces[0] == traces[1]
    assert runs[0].served == runs[1].served
    other = simulate(make_workload(MANY, seed=8), OURS, SMALL, seed=7)
    assert [o.first_token_s for o in other.outcomes] != [t[0] for t in traces[0]]


@pytest.mark.parametrize(
    "policy",
    [
        Policy("first come", fair_shares=False),
        Policy("least recently used", by_value=False),
        Policy("no cache", keeps_idle=False, prefix_caching=False),
        Policy("synchronous", load_ahead=False),
        Policy("target", tpot_target_ms=4.2),
    ],
    ids=lambda policy: policy.name,
)
def test_every_policy_answers_everything(policy: Policy) -> None:
    run = simulate(make_workload(replace(MANY, duration_s=5.0), seed=3), policy, SMALL, after_step=check)
    check_end(run)
    report = make_report(run)
    assert (report.num_requests, report.num_failed) == (len(run.workload.requests), 0)
    assert report.num_loads > 0
    assert (report.stall_s > 0) == (not policy.load_ahead)
    assert (report.cached_share > 0) == policy.prefix_caching


def test_loads_beside_steps_keep_the_time_between_tokens() -> None:
    """On a link of 2 GB/s a load takes up to 170 ms; the running requests must not see it."""
    traffic = Traffic(rate=10.0, duration_s=15.0, num_adapters=2000, alpha=0.8, prompt_median=40.0, max_prompt=64)
    workload, device = make_workload(traffic, seed=4), SimDevice(num_pages=8000, load_bytes_per_s=2e9)
    ahead, waiting = (make_report(simulate(workload, Policy("", load_ahead=on), device)) for on in (True, False))
    warm = make_report(simulate(workload, OURS, replace(device, load_bytes_per_s=1e15, load_fixed_s=0.0)))
    assert ahead.gap_p99_ms <= 1.15 * warm.gap_p99_ms
    assert waiting.gap_p99_ms > 10 * ahead.gap_p99_ms
    assert ahead.tpot_p99_ms < 0.5 * waiting.tpot_p99_ms


def backlog(*kinds: tuple[str, int, int, int, int], seconds: float) -> Workload:
    """Tenants that ask more than their share all the time: (name, rank, requests a second, prompt, output)."""
    adapters = tuple(SimAdapter(adapter_digest(i), kind[1]) for i, kind in enumerate(kinds))
    requests = [
        SimRequest(number / rate, name, index, prompt, output)
        for index, (name, _, rate, prompt, output) in enumerate(kinds)
        for number in range(int(rate * seconds))
    ]
    return Workload(adapters, tuple(sorted(requests, key=lambda request: request.arrival_s)))


def test_backlogged_tenants_are_served_within_the_bound_of_vtc() -> None:
    """Short and long requests, ranks 8 and 64, both beyond their half. First come, first served has no bound."""
    workload = backlog(("short", 8, 120, 32, 16), ("long", 64, 40, 256, 64), seconds=6.0)
    gaps = {}
    for fair in (True, False):
        worst = 0.0

        def watch(run: Simulation) -> None:
            nonlocal worst
            waiting = {seq.tenant for seq in run.scheduler.waiting}
            if waiting == {"short", "long"} and run.now > 1.0:
                shares = run.scheduler.shares
                worst = max(worst, abs(shares.served("short") - shares.served("long")))

        simulate(workload, Policy("", fair_shares=fair), SimDevice(), after_step=watch, max_num_seqs=16)
        gaps[fair] = worst
    bound = 2 * max(INPUT_WEIGHT * 256, OUTPUT_WEIGHT * 16 * (256 + 64))
    assert 0 < gaps[True] <= bound
    assert gaps[False] > 3 * gaps[True]


def test_victim_of_a_flood_is_served_as_if_nearly_alone() -> None:
    flood = ("flood", 16, 150, 64, 48)
    victim = ("victim", 16, 2, 64, 48)
    alone = simulate(backlog(victim, seconds=6.0), OURS, max_num_seqs=16)
    slow = {}
    for fair in (True, False):
        run = simulate(backlog(flood, victim, seconds=6.0), Policy("", fair_shares=fair), max_num_seqs=16)
        slow[fair] = quantile([o.ttft_s for o in run.outcomes if o.request.tenant == "victim"], 0.99)
    assert slow[True] < 0.5
    assert slow[True] < 0.1 * slow[False]
    assert quantile([o.ttft_s for o in alone.outcomes], 0.99) < slow[True]


def test_target_bounds_the_time_of_a_token() -> None:
    traffic = Traffic(rate=40.0, duration_s=8.0, num_adapters=400, alpha=0.5, ranks=(64,), prompt_median=20.0)
    workload = make_workload(replace(traffic, max_prompt=64), seed=5)
    free, bound = (
        make_report(simulate(workload, Policy("", tpot_target_ms=target), max_loras=64)) for target in (None, 4.5)
    )
    assert free.tpot_p50_ms > 4.8
    assert bound.tpot_p50_ms <= 4.6
    assert bound.max_distinct < free.max_distinct


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_pool_larger_by_the_figure_spares_about_nine_in_ten_reloads(prefix_caching: bool) -> None:
    """Cached prefixes push adapters out too, and a pool that kept an adapter would keep its prefixes: so they count."""
    traffic = Traffic(rate=20.0, duration_s=30.0, num_adapters=300, ranks=(8, 16), base_share=0.0, prompt_median=300.0)
    workload, policy = make_workload(traffic, seed=1), Policy("", prefix_caching=prefix_caching)

    def reloads(num_pages: int) -> tuple[int, int]:
        run = simulate(workload, policy, SimDevice(num_pages=num_pages))
        return run.scheduler.residency.reloads.count, run.scheduler.residency.reloads.missing(run.now)

    count, missing = reloads(3000)
    assert count > 30
    assert reloads(3000 + missing)[0] <= 0.2 * count
    assert reloads(3000 + missing // 4)[0] > 0.3 * count, "a quarter of it would have done"


def test_shared_beginnings_are_computed_once() -> None:
    traffic = Traffic(rate=20.0, duration_s=6.0, num_adapters=20, shared_len=512, prompt_median=40.0)
    workload = make_workload(traffic, seed=6)
    cached, plain = (make_report(simulate(workload, Policy("", prefix_caching=on))) for on in (True, False))
    assert cached.cached_share > 0.5
    assert cached.ttft_p50_s < 0.7 * plain.ttft_p50_s


def test_deadlines_end_what_is_late_and_nothing_else() -> None:
    workload = backlog(("a", 8, 200, 64, 64), seconds=1.5)
    requests = tuple(replace(request, deadline_s=0.8 if i % 2 else None) for i, request in enumerate(workload.requests))
    run = simulate(replace(workload, requests=requests), OURS, after_step=check, max_num_seqs=8)
    failed = [o for o in run.outcomes if o.has_failed]
    assert failed
    assert all(o.request.deadline_s is not None for o in failed)
    assert all(o.ended_s - o.request.arrival_s < 0.85 for o in run.outcomes if o.request.deadline_s and o.ended_s)
    check_end(run)


# ---------------------------------------------------------------------- workload and figures
def test_workload_has_the_rate_and_the_skew_it_is_asked_for() -> None:
    workload = make_workload(Traffic(rate=50.0, duration_s=60.0, num_adapters=1000, alpha=1.0, base_share=0.1), seed=0)
    assert len(workload.requests) == pytest.approx(3000, rel=0.1)
    counts: dict[int | None, int] = {}
    for request in workload.requests:
        counts[request.adapter] = counts.get(request.adapter, 0) + 1
    assert counts.pop(None) == pytest.approx(300, rel=0.25)
    assert max(counts.values()) / 2700 == pytest.approx(1 / 7.485, rel=0.2), "the share of the first of 1000 at Zipf 1"
    assert workload == make_workload(Traffic(rate=50.0, duration_s=60.0, alpha=1.0, base_share=0.1), seed=0)


def test_prompts_share_what_they_are_said_to_share() -> None:
    one, two = (
        SimRequest(0.0, "t", adapter, 10, 1, shared_len=6).prompt(number) for adapter, number in ((1, 5), (1, 6))
    )
    assert (len(one), one[:6] == two[:6], one[6:] == two[6:]) == (10, True, False)
    assert SimRequest(0.0, "t", 2, 10, 1, shared_len=6).prompt(7)[:6] != one[:6]


def test_figures() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([], 0.5) == 0.0
    assert jain([1.0, 1.0]) == 1.0
    assert jain([1.0, 0.0]) == 0.5
    run = simulate(backlog(("a", 8, 10, 8, 4), seconds=1.0), OURS)
    total = served_between(run, "a", 0.0, run.now + 1.0)
    halves = served_between(run, "a", 0.0, 0.5) + served_between(run, "a", 0.5, run.now + 1.0)
    assert total == pytest.approx(halves)
    assert total > 0
    assert served_between(run, "b", 0.0, 9.0) == 0.0
