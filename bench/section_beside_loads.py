"""Single cold requests beside warm ones, and decoding while adapters are loaded (BENCH.md P5)."""

import argparse
import itertools
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from bench_mixed_ranks import production_ranks
from engine_runs import say, show_table
from logical_adapters import Fleet, full_pool, pinned
from loraplex.core import AdapterRef, Request
from open_loop import STALL_S, Arrival, Record, Run, apart_ms, drive, make_request, random_prompt, spread_ms

WARM_PER_RANK = 4
SHORT_PROMPT = 16


def _start_running(fleet: Fleet, refs: Sequence[AdapterRef], args: argparse.Namespace) -> list[Request]:
    """Requests that decode until they are cancelled, all past their prompts."""
    engine, rng = fleet.engine, random.Random(args.seed)
    vocab = engine.base.vocab_size
    requests = [make_request(random_prompt(rng, 64, vocab), 3000, ref) for ref in refs]
    for request in requests:
        engine.add_request(request, time.monotonic())
    started = time.monotonic()
    while len(engine.step(time.monotonic())) < len(requests):
        assert time.monotonic() - started < STALL_S, f"{len(requests)} requests do not decode together"
    return requests


def _running_refs(fleet: Fleet, count: int) -> list[AdapterRef]:
    return fleet.of_ranks(production_ranks(count)) if count else []


# ---------------------------------------------------------------------- probes
def _probe(fleet: Fleet, num_running: int, args: argparse.Namespace) -> dict[str, Any]:
    """Cold requests, each followed by a warm one of its rank and length, one at a time beside requests that decode."""
    rng, busy = random.Random(args.seed), _running_refs(fleet, num_running)
    warm_refs = {fleet.rank(ref): ref for ref in fleet.of_ranks([4, 8, 16, 32], spared=busy)}
    with pinned(fleet, list(warm_refs.values())):
        running = _start_running(fleet, busy, args)
        arrivals, at_s = [], 0.05
        for ref in fleet.cold(args.probes, busy):
            for one in (ref, warm_refs[fleet.rank(ref)]):
                prompt = random_prompt(rng, args.probe_prompt, fleet.engine.base.vocab_size)
                arrivals.append(Arrival(at_s, make_request(prompt, 1, one)))
                at_s += args.probe_gap * (1 + 0.25 * rng.random())
        run = drive(fleet.engine, arrivals, running=running, end_s=at_s + 1.0)
    cold: dict[int, list[Record]] = defaultdict(list)
    warm: dict[int, list[Record]] = defaultdict(list)
    for place, arrival in enumerate(arrivals):
        record, ref = run.records[arrival.request.request_id], arrival.request.adapter
        assert ref is not None
        if record.token_s and record.is_cold == (place % 2 == 0):
            (cold if record.is_cold else warm)[fleet.rank(ref)].append(record)
    return _compare_probes(cold, warm) | {"asked": len(arrivals)}


def _compare_probes(cold: dict[int, list[Record]], warm: dict[int, list[Record]]) -> dict[str, Any]:
    def times(records: dict[int, list[Record]]) -> list[float]:
        return [record.ttft_s for ranked in records.values() for record in ranked]

    mine, other = times(cold), times(warm)
    return {
        "cold_ms": spread_ms(mine),
        "warm_ms": spread_ms(other),
        **apart_ms(mine, other),
        "mean_ms": 1e3 * (fmean(mine) - fmean(other)),
        "by_rank_ms": {
            str(rank): 1e3 * (median(r.ttft_s for r in cold[rank]) - median(r.ttft_s for r in warm[rank]))
            for rank in sorted(cold)
        },
        "load_ms_by_rank": {str(rank): 1e3 * median(r.load_s for r in cold[rank]) for rank in sorted(cold)},
    }


def measure_probes(fleet: Fleet, args: argparse.Namespace) -> dict[str, Any]:
    """On an idle engine, and beside some and many requests that decode."""
    section: dict[str, Any] = {"prompt_tokens": args.probe_prompt, "beside": {}}
    for num_running in sorted({0, args.running // 5, args.running}):
        with full_pool(fleet):
            section["beside"][str(num_running)] = _probe(fleet, num_running, args)
    return section


def show_probes(section: dict[str, Any]) -> None:
    rows = [
        [
            beside,
            *(f"{one[key]['p50']:.2f}" for key in ("warm_ms", "cold_ms")),
            *(f"{one[key]:+.2f}" for key in ("p50_ms", "p99_ms", "mean_ms")),
            "  ".join(f"{rank}: {ms:+.2f}" for rank, ms in one["by_rank_ms"].items()),
        ]
        for beside, one in section["beside"].items()
    ]
    show_table(
        f"First token of single requests of {section['prompt_tokens']} tokens, ms; cold less warm",
        ("decoding beside", "warm p50", "cold p50", "p50", "p99", "mean", "p50 by rank"),
        rows,
    )


# ---------------------------------------------------------------------- decoding
def _shorts(fleet: Fleet, refs: Sequence[AdapterRef], args: argparse.Namespace) -> list[Arrival]:
    """A request of one token for each adapter, evenly spaced."""
    rng, vocab = random.Random(args.seed), fleet.engine.base.vocab_size
    return [
        Arrival(place / args.loads_rate, make_request(random_prompt(rng, SHORT_PROMPT, vocab), 1, ref))
        for place, ref in enumerate(refs)
    ]


def _warm_few(fleet: Fleet, spared: Sequence[AdapterRef]) -> dict[int, list[AdapterRef]]:
    """A few adapters of each small rank."""
    ranks = [rank for rank in (4, 8, 16, 32) for _ in range(WARM_PER_RANK)]
    few: dict[int, list[AdapterRef]] = defaultdict(list)
    for ref in fleet.of_ranks(ranks, spared=spared):
        few[fleet.rank(ref)].append(ref)
    return few


def _loads_alone(fleet: Fleet, refs: Sequence[AdapterRef], args: argparse.Namespace) -> Callable[[float], None]:
    """Called between steps: begins the loads that are due."""
    left = list(reversed(refs))

    def begin(now_s: float) -> None:
        while left and (len(refs) - len(left)) / args.loads_rate <= now_s and fleet.adapters.begin_load(left[-1]):
            left.pop()

    return begin


def _stretch(fleet: Fleet, kind: str, busy: Sequence[AdapterRef], args: argparse.Namespace) -> Run:
    """Some seconds of decoding. "nothing" beside it; "warm": short requests on adapters that are there; "cold": the
    same, each on one that must be loaded; "loads": only loads."""
    few = _warm_few(fleet, busy)
    with pinned(fleet, [ref for refs in few.values() for ref in refs]):
        running = _start_running(fleet, busy, args)
        refs = fleet.cold(int(args.loads_rate * args.loads_seconds), busy)
        if kind == "warm":
            asked = [few[fleet.rank(ref)][place % WARM_PER_RANK] for place, ref in enumerate(refs)]
        else:
            asked = refs if kind == "cold" else []
        after_step = _loads_alone(fleet, refs if kind == "loads" else (), args)
        arrivals = _shorts(fleet, asked, args)
        run = drive(fleet.engine, arrivals, running=running, end_s=args.loads_seconds, after_step=after_step)
    run.records = {request.request_id: run.records[request.request_id] for request in running}
    return run


def _figures(runs: Sequence[Run], args: argparse.Namespace) -> dict[str, Any]:
    gaps, windows = [], []
    for run in runs:
        for record in run.records.values():
            at = record.token_s
            gaps += [b - a for a, b in itertools.pairwise(at)]
            windows += [(b - a) / args.window for a, b in itertools.pairwise(at[:: args.window])]
    return {
        "tpot_ms": spread_ms(windows),
        "between_tokens_ms": spread_ms(gaps),
        "loads_s": sum(run.num_loads for run in runs) / sum(run.seconds for run in runs),
        "steps": sum(run.num_steps for run in runs),
        "stretches": len(runs),
    }


def measure_decode(fleet: Fleet, args: argparse.Namespace) -> dict[str, Any]:
    """Running requests' time per output token with and without loads, in turn."""
    kinds = ("nothing", "warm", "cold", "loads")
    runs: dict[str, list[Run]] = {kind: [] for kind in kinds}
    busy = _running_refs(fleet, args.running)
    with full_pool(fleet):
        for number in range(args.stretches):
            for kind in kinds if number % 2 == 0 else tuple(reversed(kinds)):
                runs[kind].append(_stretch(fleet, kind, busy, args))
            say(f"decoding beside loads: round {number + 1} of {args.stretches}")
    figures = {kind: _figures(runs[kind], args) for kind in kinds}
    return {
        "running": args.running,
        "ranks_of_running": sum(fleet.rank(ref) for ref in busy),
        "loads_asked_s": args.loads_rate,
        "window_tokens": args.window,
        "beside": figures,
        "tpot_p99_over": {
            "cold over warm short requests": _ratio(figures, "cold", "warm", "tpot_ms"),
            "loads over nothing": _ratio(figures, "loads", "nothing", "tpot_ms"),
        },
        "between_tokens_p99_over": {
            "cold over warm short requests": _ratio(figures, "cold", "warm", "between_tokens_ms"),
            "loads over nothing": _ratio(figures, "loads", "nothing", "between_tokens_ms"),
        },
    }


def _ratio(figures: dict[str, Any], above: str, below: str, key: str) -> float:
    return float(figures[above][key]["p99"] / figures[below][key]["p99"])


def show_decode(section: dict[str, Any]) -> None:
    rows = [
        [
            kind,
            f"{one['loads_s']:.1f}",
            *(f"{one['tpot_ms'][key]:.3f}" for key in ("p50", "p99")),
            *(f"{one['between_tokens_ms'][key]:.3f}" for key in ("p50", "p99", "max")),
        ]
        for kind, one in section["beside"].items()
    ]
    show_table(
        f"{section['running']} requests decode, ms a token (over {section['window_tokens']} tokens, and between two)",
        ("beside", "loads/s", "TPOT p50", "TPOT p99", "between p50", "between p99", "between max"),
        rows,
    )
    for name, ratio in section["tpot_p99_over"].items():
        print(f"TPOT p99, {name}: {ratio:.3f}; between two tokens: {section['between_tokens_p99_over'][name]:.3f}")
