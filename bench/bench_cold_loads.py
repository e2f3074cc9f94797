"""What a request pays whose adapter is not on the GPU, and what the others pay (BENCH.md P5): Llama-3-8B shapes.

2000 adapters are registered, of ranks as in production, on all seven linears; the pool holds 25 % of their bytes, KV
included. Requests arrive by a Poisson process in real time, popularity is Zipf's. The same requests run with every
adapter that they ask for in the pool, with loads ahead of the step that needs them (the engine's way), and with loads
inside the step. Then single requests, cold and warm in turn, on an idle engine and beside others; and the decoding of
running requests while adapters are loaded 50 times a second; and requests whose adapter is on disk alone.

Usage: python bench/bench_cold_loads.py [--base DIR] [--sections arrivals,probes,decode,disk] [--out FILE]
"""

import argparse
import random
import sys
from collections.abc import Callable
from functools import partial
from statistics import fmean, median
from typing import Any

import numpy as np

from engine_runs import (
    Report,
    add_options,
    engine_settings,
    percentile,
    prepare_base,
    say,
    show_table,
    start_engine,
)
from logical_adapters import SMALL_RANK, Fleet, make_fleet
from open_loop import (
    Arrival,
    Record,
    Run,
    apart_ms,
    cap_pool,
    drive,
    evict_all,
    make_request,
    random_prompt,
    spread_ms,
    touch,
    zipf_shares,
)
from section_beside_loads import measure_decode, measure_probes, show_decode, show_probes
from section_disk import measure_disk, show_disk
from synchronous_loads import SynchronousLoads

BARS = {"cold_p50_ms": 2.0, "cold_p99_ms": 5.0, "tpot_p99_over": 1.1, "latency_over_resident": 1.03}
TINY_OPTIONS = """--adapters 200 --images 2 --history 300 --seconds 2 --rate 10 --prompts 16,64 --outputs 4,16
    --batch 16 --probes 6 --probe-prompt 32 --probe-gap 0.1 --running 5
    --loads-rate 20 --loads-seconds 1 --stretches 1 --window 4"""


# ---------------------------------------------------------------------- arrivals
def make_arrivals(fleet: Fleet, exponent: float, args: argparse.Namespace) -> list[Arrival]:
    """Poisson arrivals for `--seconds`; adapters by Zipf's law, lengths uniform."""
    rng, words = np.random.default_rng(args.seed), random.Random(args.seed)
    count, vocab = int(args.rate * args.seconds), fleet.engine.base.vocab_size
    at = np.cumsum(rng.exponential(1.0 / args.rate, count)).tolist()
    asked = rng.choice(len(fleet.refs), count, p=zipf_shares(len(fleet.refs), exponent))
    prompts, outputs = rng.integers(*args.prompts, count), rng.integers(*args.outputs, count)
    requests = [
        make_request(random_prompt(words, int(prompt), vocab), int(output), fleet.refs[place])
        for prompt, output, place in zip(prompts, outputs, asked, strict=True)
    ]
    return [Arrival(at_s, request) for at_s, request in zip(at, requests, strict=True)]


def _remember(fleet: Fleet, exponent: float, args: argparse.Namespace) -> None:
    """Fill the pool as earlier requests of the same popularity leave it."""
    rng, shares = np.random.default_rng(args.seed + 1), zipf_shares(len(fleet.refs), exponent)
    touch(fleet.engine, [fleet.refs[place] for place in rng.choice(len(shares), args.history, p=shares)])


def _run_resident(fleet: Fleet, arrivals: list[Arrival], exponent: float, args: argparse.Namespace) -> Run:
    """Every adapter that is asked for lies in the whole pool before."""
    evict_all(fleet.engine)
    touch(fleet.engine, list({a.request.adapter: None for a in arrivals if a.request.adapter is not None}))
    run = drive(fleet.engine, arrivals)
    assert run.num_loads == 0, "the whole pool does not hold all that is asked for: lower --seconds or --rate"
    return run


def _run_ahead(fleet: Fleet, arrivals: list[Arrival], exponent: float, args: argparse.Namespace) -> Run:
    """The pool cut to its share, as the history left it."""
    evict_all(fleet.engine)
    lease = cap_pool(fleet.engine, fleet.pool_pages)
    try:
        _remember(fleet, exponent, args)
        return drive(fleet.engine, arrivals)
    finally:
        lease.release()


def _run_synchronous(fleet: Fleet, arrivals: list[Arrival], exponent: float, args: argparse.Namespace) -> Run:
    """The same, where the step that needs an adapter copies it and waits."""
    evict_all(fleet.engine)
    lease = cap_pool(fleet.engine, fleet.pool_pages)
    try:
        _remember(fleet, exponent, args)
        with SynchronousLoads(fleet.engine) as loads:
            run = drive(fleet.engine, arrivals)
        run.num_loads = loads.num_loads
        return run
    finally:
        lease.release()


RUNS: dict[str, Callable[..., Run]] = {
    "resident": _run_resident,
    "ahead": _run_ahead,
    "synchronous": _run_synchronous,
}


def describe(run: Run, seconds: float) -> dict[str, Any]:
    """Figures of one run of arrivals over `seconds`."""
    records = run.started
    return {
        "requests": len(run.records),
        "first_token_ms": spread_ms([record.ttft_s for record in records]),
        "latency_ms": spread_ms([record.latency_s for record in records]),
        "tpot_ms": spread_ms([record.tpot_s for record in records]),
        "hit_rate": 1 - sum(record.is_cold for record in records) / len(records),
        "loads": run.num_loads,
        "loads_s": run.num_loads / seconds,
        "evictions": run.num_evictions,
        "preemptions": run.num_preemptions,
        "mean_running_at_arrival": fmean(record.num_running for record in records),
        "longest_queue": max((waiting for _, waiting in run.queue), default=0),
        "load_ms": spread_ms([record.load_s for record in records if record.is_cold and record.load_s]),
    }


def compare(run: Run, ideal: Run, chosen: Callable[[int, Record], bool]) -> dict[str, Any]:
    """First-token times of the same requests in two runs, those that `chosen` takes (place, record in `run`).

    `p50_ms` and `p99_ms` are differences of percentiles of the two runs over these requests; `paired` are percentiles
    of the differences request by request, in which is also at which moment of a step each happened to come.
    """
    pairs = [
        (ours.ttft_s, theirs.ttft_s)
        for place, (ours, theirs) in enumerate(zip(run.started, ideal.started, strict=True))
        if chosen(place, ours)
    ]
    if not pairs:
        return {"count": 0}
    mine, other = [a for a, _ in pairs], [b for _, b in pairs]
    differences = [a - b for a, b in pairs]
    return {
        "count": len(pairs),
        **apart_ms(mine, other),
        "mean_ms": 1e3 * fmean(differences),
        "paired_p50_ms": 1e3 * median(differences),
        "paired_p99_ms": 1e3 * percentile(differences, 0.99),
    }


def compare_all(run: Run, ideal: Run, ranks: list[int], most_running: int) -> dict[str, Any]:
    """Cold and warm requests against the ideal run; but for one entry, of small ranks that found a place to run."""

    def is_meant(place: int, record: Record) -> bool:
        return ranks[place] <= SMALL_RANK and record.num_running < most_running

    return {
        "cold": compare(run, ideal, lambda i, r: is_meant(i, r) and r.is_cold),
        "cold_beside_others": compare(run, ideal, lambda i, r: is_meant(i, r) and r.is_cold and r.num_running > 0),
        "cold_on_an_idle_engine": compare(run, ideal, lambda i, r: is_meant(i, r) and r.is_cold and not r.num_running),
        "cold_of_every_rank": compare(run, ideal, lambda i, r: r.is_cold),
        "warm": compare(run, ideal, lambda i, r: is_meant(i, r) and not r.is_cold),
        "latency_over_resident": fmean(r.latency_s for r in run.started) / fmean(r.latency_s for r in ideal.started),
    }


def measure_arrivals(fleet: Fleet, exponent: float, args: argparse.Namespace) -> dict[str, Any]:
    """The three runs over the same requests."""
    arrivals = make_arrivals(fleet, exponent, args)
    refs = [a.request.adapter for a in arrivals if a.request.adapter is not None]
    runs: dict[str, Run] = {}
    for name, how in RUNS.items():
        runs[name] = how(fleet, arrivals, exponent, args)
        say(f"Zipf {exponent:g}, {name}: {runs[name].seconds:.1f} s, {runs[name].num_loads} loads")
    ideal = runs["resident"]
    return {
        "zipf": exponent,
        "requests_s": args.rate,
        "prompt_tokens": list(args.prompts),
        "output_tokens": list(args.outputs),
        "distinct_adapters_asked": len(set(refs)),
        "pool_pages": fleet.pool_pages,
        "runs": {name: describe(run, arrivals[-1].at_s) for name, run in runs.items()},
        "over_resident": {
            name: compare_all(run, ideal, [fleet.rank(ref) for ref in refs], args.batch)
            for name, run in runs.items()
            if name != "resident"
        },
    }


def show_arrivals(section: dict[str, Any]) -> None:
    rows = [
        [
            name,
            f"{run['hit_rate']:.2f}",
            f"{run['loads_s']:.1f}",
            *(f"{run['first_token_ms'][key]:.1f}" for key in ("p50", "p99")),
            *(f"{run['tpot_ms'][key]:.2f}" for key in ("p50", "p99")),
            f"{run['latency_ms']['mean']:.0f}",
            f"{run['mean_running_at_arrival']:.1f}",
        ]
        for name, run in section["runs"].items()
    ]
    show_table(
        f"{section['requests_s']:g} requests a second, Zipf {section['zipf']:g}: ms",
        ("adapters", "hits", "loads/s", "first p50", "first p99", "TPOT p50", "TPOT p99", "whole", "beside"),
        rows,
    )
    for name, over in section["over_resident"].items():
        for kind in ("cold", "cold_beside_others", "cold_on_an_idle_engine", "warm"):
            if (one := over[kind])["count"]:
                print(
                    f"{name}, {kind.replace('_', ' ')} ({one['count']} requests): first token {one['p50_ms']:+.2f} ms "
                    f"p50, {one['p99_ms']:+.2f} p99, {one['mean_ms']:+.2f} mean; pairs {one['paired_p50_ms']:+.2f} p50"
                )
        print(f"{name}: whole requests take {over['latency_over_resident']:.4f} of all resident", flush=True)


# ---------------------------------------------------------------------- options
SECTIONS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[[dict[str, Any]], None]]] = {
    "probes": (measure_probes, show_probes),
    "decode": (measure_decode, show_decode),
    "disk": (measure_disk, show_disk),
}
NAMES = ("arrivals", *SECTIONS)


def _range(text: str) -> tuple[int, int]:
    low, high = (int(part) for part in text.split(","))
    return low, high


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--sections", default=",".join(NAMES), help="what to measure (%(default)s)")
    parser.add_argument("--adapters", type=int, default=2000, help="registered (%(default)s)")
    parser.add_argument("--images", type=int, default=8, help="in host memory a rank (%(default)s)")
    parser.add_argument("--pool-share", type=float, default=0.25, help="of all adapters' bytes (%(default)s)")
    parser.add_argument("--history", type=int, default=3000, help="requests before, to fill the pool (%(default)s)")
    parser.add_argument("--zipf", default="1.0", help="exponents, by commas (%(default)s)")
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second (%(default)s)")
    parser.add_argument("--seconds", type=float, default=18.0, help="of arrivals in each run (%(default)s)")
    parser.add_argument("--prompts", type=_range, default=(64, 1024), help="tokens, from and below (64,1024)")
    parser.add_argument("--outputs", type=_range, default=(16, 128), help="tokens, from and below (16,128)")
    parser.add_argument("--probes", type=int, default=60, help="cold ones, and as many warm (%(default)s)")
    parser.add_argument("--probe-prompt", type=int, default=256, help="tokens of such a request (%(default)s)")
    parser.add_argument("--probe-gap", type=float, default=0.06, help="seconds between two, or up to a quarter more")
    parser.add_argument("--running", type=int, default=40, help="requests that decode beside loads (%(default)s)")
    parser.add_argument("--loads-rate", type=float, default=50.0, help="a second (%(default)s)")
    parser.add_argument("--loads-seconds", type=float, default=4.0, help="of each stretch of decoding (%(default)s)")
    parser.add_argument("--stretches", type=int, default=2, help="of each kind of load (%(default)s)")
    parser.add_argument("--window", type=int, default=64, help="tokens of a time per output token (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    given = sys.argv[1:]
    args = parser.parse_args([*(TINY_OPTIONS.split() if "--tiny" in given else []), *given])
    if unknown := set(args.sections.split(",")) - set(NAMES):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    return args


def describe_fleet(fleet: Fleet, args: argparse.Namespace) -> dict[str, Any]:
    pages, geometry = [fleet.adapters.num_pages(ref) for ref in fleet.refs], fleet.engine._geometry
    return {
        "adapters": len(fleet.refs),
        "adapter_gb": sum(pages) * geometry.page_bytes / 1e9,
        "host_images_a_rank": args.images,
        "host_gb": fleet.adapters.host_bytes / 1e9,
        "note": "every adapter has its own digest and its own pages in the pool; host images are shared by many",
        "whole_pool_gb": geometry.num_pages * geometry.page_bytes / 1e9,
        "cut_pool_gb": fleet.pool_pages * geometry.page_bytes / 1e9,
        "cut_pool_share": args.pool_share,
        "garbage_collection": "what existed before a run is frozen, as serve does; collections go on",
        "bars": BARS,
    }


def main() -> None:
    args = read_options()
    directory = prepare_base(args)
    engine, start = start_engine(directory, engine_settings(args, max_num_seqs=args.batch, max_waiting=100_000))
    report = Report(args, "cold_loads")
    fleet = make_fleet(engine, args.adapters, args.images, args.pool_share, args.seed)
    report.result |= {"startup": start.as_json(), "fleet": describe_fleet(fleet, args)}
    wanted, shown = args.sections.split(","), {}
    for exponent in map(float, args.zipf.split(",")) if "arrivals" in wanted else ():
        name = f"arrivals_zipf_{exponent:g}"
        report.add(name, partial(measure_arrivals, fleet, exponent, args))
        shown[name] = show_arrivals
    for name in wanted:
        if name in SECTIONS:
            report.add(name, partial(SECTIONS[name][0], fleet, args))
            shown[name] = SECTIONS[name][1]
    for name, show in shown.items():
        if name not in report.failed:
            show(report.result[name])
    report.finish()


if __name__ == "__main__":
    main()
