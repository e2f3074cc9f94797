"""Policies compared in the simulator: tail latency under load (P7), cold loads (P5), fairness (P8), and what a bound on
distinct adapters costs. No model, no GPU.

python -m bench.bench_simulation [--quick] [--out FILE]

The times are those of the cost model of a Llama-3-8B on one H200 (`scheduler.H200_8B`: physical limits, not a measured
engine), so only the ratios between policies mean something.
"""

import argparse
import json
import math
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from loraplex.planner import (
    Policy,
    Report,
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

OURS = Policy("loraplex")
POLICIES = (
    OURS,
    replace(OURS, name="synchronous loads", load_ahead=False),
    replace(OURS, name="least recently used", by_value=False),
    replace(OURS, name="no cache", keeps_idle=False, prefix_caching=False),
    Policy("FCFS, LRU, synchronous", load_ahead=False, fair_shares=False, by_value=False, prefix_caching=False),
    Policy("FCFS, no cache, synchronous", load_ahead=False, fair_shares=False, keeps_idle=False, prefix_caching=False),
)
SLO_TIMES = 5.0  # of the mean at low load
POOL = SimDevice(num_pages=16_000)  # 32 GiB: about 200 adapters of the mix, KV aside
SLOW_LINK = replace(POOL, load_bytes_per_s=5e9)  # a host that reads adapters from its disk


def as_row(report: Report) -> dict[str, Any]:
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in asdict(report).items()}


# ---------------------------------------------------------------------- cold loads (P5)
def cold_loads(traffic: Traffic, seeds: Iterable[int]) -> list[dict[str, Any]]:
    """Every policy on the same requests, at half load, where adapters come over a link of 5 GB/s."""
    rows = []
    for policy in POLICIES:
        reports = [make_report(simulate(make_workload(traffic, seed), policy, SLOW_LINK, seed)) for seed in seeds]
        rows.append(as_row(sorted(reports, key=lambda report: report.gap_p99_ms)[len(reports) // 2]))
    return rows


# ---------------------------------------------------------------------- tail under load (P7)
def mean_ttft(run: Simulation) -> float:
    return sum(outcome.ttft_s for outcome in run.outcomes) / len(run.outcomes)


def largest_rate(traffic: Traffic, policy: Policy, slo_s: float, seed: int, rounds: int) -> float:
    """Requests a second up to which the 99th percentile of the first token keeps to the SLO."""
    low, high = 5.0, 120.0
    for _ in range(rounds):
        rate = math.sqrt(low * high)
        run = simulate(make_workload(replace(traffic, rate=rate), seed), policy, POOL, seed)
        is_kept = quantile([outcome.ttft_s for outcome in run.outcomes], 0.99) <= slo_s
        low, high = (rate, high) if is_kept else (low, rate)
    return low


def tail(traffic: Traffic, seed: int, rounds: int) -> dict[str, Any]:
    idle = simulate(make_workload(replace(traffic, rate=1.0, duration_s=60.0), seed), OURS, POOL, seed)
    slo_s = SLO_TIMES * mean_ttft(idle)
    rates = {policy.name: round(largest_rate(traffic, policy, slo_s, seed, rounds), 2) for policy in POLICIES}
    return {"slo_s": round(slo_s, 4), "largest_rate": rates}


# ---------------------------------------------------------------------- fairness (P8)
def steady(kinds: dict[str, tuple[int, float, int, int]], seconds: float) -> Workload:
    """Tenants (rank, requests a second, prompt, output) that ask at a steady rate."""
    adapters = tuple(SimAdapter(adapter_digest(i), kind[0]) for i, kind in enumerate(kinds.values()))
    requests = [
        SimRequest((number + index / len(kinds)) / rate, name, index, prompt, output)
        for index, (name, (_, rate, prompt, output)) in enumerate(kinds.items())
        for number in range(int(rate * seconds))
    ]
    return Workload(adapters, tuple(sorted(requests, key=lambda request: request.arrival_s)))


def overload(seconds: float) -> list[dict[str, Any]]:
    """Two tenants beyond their half, ranks 8 and 64: what each is served in windows while both wait."""
    workload = steady({"rank 8": (8, 200.0, 256, 64), "rank 64": (64, 40.0, 256, 128)}, seconds)
    rows = []
    for policy in (OURS, replace(OURS, name="FCFS", fair_shares=False)):
        run = simulate(workload, policy, POOL, max_num_seqs=32)
        windows = [(start, start + 2.0) for start in range(2, int(seconds) - 2, 2)]
        pairs = [[served_between(run, tenant, *window) for tenant in ("rank 8", "rank 64")] for window in windows]
        rows.append(
            {
                "policy": policy.name,
                "largest_gap_ms_of_2_s": round(max(abs(a - b) for a, b in pairs), 1),
                "jain": round(jain([sum(pair[i] for pair in pairs) for i in (0, 1)]), 4),
                "tokens_per_s": round(make_report(run).tokens_per_s, 1),
            }
        )
    return rows


def aggressors(traffic: Traffic, seed: int) -> list[dict[str, Any]]:
    """1000 tenants, Zipf 1.0, beside five that ask ten times the most popular one's rate."""
    quiet = make_workload(traffic, seed)
    each = 10.0 * traffic.rate / 7.485 / 5
    first = len(quiet.adapters)
    loud = steady({f"loud {i}": (16, each, 180, 120) for i in range(5)}, traffic.duration_s)
    extra = tuple(SimAdapter(adapter_digest(first + i), 16) for i in range(5))
    moved = [replace(request, adapter=first + (request.adapter or 0)) for request in loud.requests]
    everyone = sorted((*quiet.requests, *moved), key=lambda request: request.arrival_s)
    workload = Workload((*quiet.adapters, *extra), tuple(everyone))
    alone = quantile([outcome.ttft_s for outcome in simulate(quiet, OURS, POOL, seed).outcomes], 0.99)
    asked = Counter(request.tenant for request in quiet.requests)
    # The most popular tenants ask for a fair share themselves, in bursts; these do not.
    small = {tenant for tenant, count in asked.items() if count <= 0.02 * len(quiet.requests)}
    rows = []
    for policy in (OURS, replace(OURS, name="FCFS", fair_shares=False)):
        run = simulate(workload, policy, POOL, seed)
        victims = [outcome.ttft_s for outcome in run.outcomes if outcome.request.tenant in asked]
        few = [outcome.ttft_s for outcome in run.outcomes if outcome.request.tenant in small]
        rows.append(
            {
                "policy": policy.name,
                "victim_ttft_p99_s": round(quantile(victims, 0.99), 4),
                "small_victim_ttft_p99_s": round(
                    quantile(few, 0.99), 4
                ),  # who ask at most 2 % of the victims' requests
                "alone_s": round(alone, 4),
                "victims_over_10_s": sum(value > 10.0 for value in victims),
                "tokens_per_s": round(make_report(run).tokens_per_s, 1),
            }
        )
    return rows


# ---------------------------------------------------------------------- distinct adapters
def few_places(seconds: float, seed: int) -> list[dict[str, Any]]:
    """First tokens of 8 and 64 adapters under bounds of distinct adapters in a step, 32 sequences, at two rates."""
    traffic = Traffic(duration_s=seconds, ranks=(16,), base_share=0.0, prompt_median=100.0)
    rows = []
    for rate in (12.0, 25.0):
        for num_adapters, max_loras in ((8, 8), (64, 8), (64, 16), (64, None)):
            workload = make_workload(replace(traffic, rate=rate, num_adapters=num_adapters), seed)
            run = simulate(workload, OURS, POOL, seed, max_num_seqs=32, max_loras=max_loras)
            waits = [outcome.ttft_s for outcome in run.outcomes]
            rows.append(
                {
                    "requests_per_s": rate,
                    "adapters": num_adapters,
                    "max_loras": max_loras or "none",
                    "ttft_p50_s": round(quantile(waits, 0.5), 4),
                    "ttft_p99_s": round(quantile(waits, 0.99), 4),
                    "last_answer_s": round(run.now, 2),
                }
            )
    return rows


# ---------------------------------------------------------------------- output
def table(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(f"{row[column]}" for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def timed(name: str, work: Callable[[], Any], results: dict[str, Any]) -> Any:
    started = time.perf_counter()
    results[name] = work()
    print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return results[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests, to see that it runs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    seconds = 4.0 if args.quick else 40.0
    seeds, rounds = ((1,), 2) if args.quick else ((1, 2, 3), 5)
    mixed = Traffic(rate=20.0, duration_s=seconds, num_adapters=2000, alpha=1.0, shared_len=64)
    results: dict[str, Any] = {
        "commit": commit(),
        "python": platform.python_version(),
        "device": "cost model of Llama-3-8B on one H200 (physical limits)",
        "seeds": list(seeds),
    }
    rows = timed("cold_loads", lambda: cold_loads(mixed, seeds), results)
    names = ("policy", "ttft_p50_s", "ttft_p99_s", "tpot_p99_ms", "gap_p99_ms", "cold_share", "num_loads", "stall_s")
    print(table(rows, names), end="\n\n")
    power = replace(mixed, num_adapters=500, alpha=0.9, ranks=(8, 16, 32, 64, 128), duration_s=seconds / 2.5)
    found = timed("tail", lambda: tail(power, 1, rounds), results)
    rates = [{"policy": name, "largest rate": rate} for name, rate in found["largest_rate"].items()]
    print(f"first token p99 within {found['slo_s']} s:\n" + table(rates, ("policy", "largest rate")), end="\n\n")
    rows = timed("overload", lambda: overload(8.0 if args.quick else 12.0), results)
    print(table(rows, tuple(rows[0])), end="\n\n")
    crowd = replace(mixed, rate=40.0, num_adapters=1000, duration_s=seconds / 2)
    rows = timed("aggressors", lambda: aggressors(crowd, 1), results)
    print(table(rows, tuple(rows[0])), end="\n\n")
    rows = timed("few_places", lambda: few_places(seconds / 2, 3), results)
    print(table(rows, tuple(rows[0])))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
