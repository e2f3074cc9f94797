"""What a rank costs a decode step when ranks are mixed (BENCH.md P3), through the engine: Llama-3-8B shapes.

Batch 64, ranks 4 to 128 on all seven linears: uniform, as in production, and random mixes of fewer distinct adapters.
The time of a step is fitted against the sum of the ranks of the distinct adapters. Besides: 64 adapters that all have
the largest rank (what slots padded to it read), and one request of rank 8 beside one of rank 128.

Usage: python bench/bench_mixed_ranks.py [--base DIR] [--out FILE]
"""

import argparse
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from engine_runs import (
    Adapters,
    BatchTiming,
    Report,
    Spread,
    add_options,
    engine_settings,
    interleave,
    make_requests,
    prepare_base,
    run_batch,
    shape_of,
    show_table,
    spread_over,
    start_engine,
)
from llama8b import ByteModel
from loraplex.engine import Engine
from section_resident import MIX

RANKS = tuple(MIX)
NUM_RANDOM = 8


@dataclass(frozen=True, slots=True)
class Fit:
    """y = intercept + slope x by least squares."""

    slope: float
    intercept: float
    r2: float


def fit_line(x: Sequence[float], y: Sequence[float]) -> Fit:
    """Least squares; r2 is the share of y's variance that the line explains."""
    slope, intercept = np.polyfit(np.asarray(x, float), np.asarray(y, float), 1)
    residual = np.asarray(y) - (intercept + slope * np.asarray(x, float))
    spread = np.asarray(y) - np.mean(y)
    return Fit(float(slope), float(intercept), 1 - float(residual @ residual) / float(spread @ spread))


def production_ranks(count: int) -> list[int]:
    """`count` ranks in the shares of MIX, largest remainders first."""
    exact = {rank: count * share / sum(MIX.values()) for rank, share in MIX.items()}
    counts = {rank: int(value) for rank, value in exact.items()}
    for rank in sorted(exact, key=lambda r: counts[r] - exact[r])[: count - sum(counts.values())]:
        counts[rank] += 1
    return [rank for rank, n in counts.items() for _ in range(n)]


def make_mixes(batch: int, seed: int = 0) -> dict[str, list[int]]:
    """Ranks of the distinct adapters of each mix. "none" has none."""
    rng = random.Random(seed)
    mixes = {
        "none": [],
        "uniform": [RANKS[i % len(RANKS)] for i in range(batch)],
        "production": production_ranks(batch),
    }
    for number in range(NUM_RANDOM):
        distinct = max(1, batch * (number + 1) // NUM_RANDOM)
        mixes[f"random {distinct}"] = [rng.choice(RANKS) for _ in range(distinct)]
    return mixes


def run_mix(engine: Engine, adapters: Adapters, ranks: Sequence[int], args: argparse.Namespace) -> BatchTiming:
    """A batch over distinct adapters of these ranks, in turn."""
    counts = Counter(ranks)
    refs = [ref for rank, count in counts.items() for ref in adapters.take(rank, count)]
    requests = make_requests(spread_over(refs, args.batch), args.prompt_len, args.output_len, engine.base.vocab_size)
    return run_batch(engine, requests)


def measure_mixes(engine: Engine, adapters: Adapters, args: argparse.Namespace) -> dict[str, Any]:
    """Time per output token of every mix, and the fit over those with adapters."""
    mixes = make_mixes(args.batch)
    padded = "all of the largest"
    every = mixes | {padded: [max(RANKS)] * args.batch}
    timings = interleave(args.repeats, {name: partial(run_mix, engine, adapters, r, args) for name, r in every.items()})
    tpot = {name: Spread.of([run.tpot_ms for run in runs]) for name, runs in timings.items()}
    names = [name for name, ranks in mixes.items() if ranks]
    fit = fit_line([sum(mixes[name]) for name in names], [tpot[name].median for name in names])
    model, base = ByteModel.of(shape_of(args)), tpot["none"].median
    return {
        "batch": args.batch,
        "prompt_len": args.prompt_len,
        "output_len": args.output_len,
        "rank_sum": {name: sum(ranks) for name, ranks in every.items()},
        "num_distinct": {name: len(ranks) for name, ranks in every.items()},
        "ranks": {name: {str(r): n for r, n in sorted(Counter(ranks).items())} for name, ranks in every.items()},
        "tpot_ms": {name: one.as_json() for name, one in tpot.items()},
        "rank_unit_us": 1e3 * fit.slope,
        "floor_rank_unit_us": 1e3 * model.ms(model.rank_unit_bytes),
        "rank_fit_r2": fit.r2,
        "fit": asdict(fit),
        "fitted_without": ["none", padded],
        "intercept_over_base": fit.intercept / base,
        "base_ms": base,
        "padded_over_production_lora_time": (tpot[padded].median - base) / (tpot["production"].median - base),
    }


def measure_pair(engine: Engine, adapters: Adapters, args: argparse.Namespace) -> dict[str, Any]:
    """One request of rank 8: alone, beside another of rank 8, beside one of rank 128."""
    pair = argparse.Namespace(**vars(args) | {"batch": 2})
    variants: Mapping[str, tuple[list[int], int]] = {"8": ([8], 1), "8 and 8": ([8, 8], 2), "8 and 128": ([8, 128], 2)}

    def run(ranks: list[int], batch: int) -> BatchTiming:
        return run_mix(engine, adapters, ranks, argparse.Namespace(**vars(pair) | {"batch": batch}))

    timings = interleave(args.repeats, {name: partial(run, *how) for name, how in variants.items()})
    tpot = {name: Spread.of([one.tpot_ms for one in runs]) for name, runs in timings.items()}
    model, context = ByteModel.of(shape_of(args)), args.prompt_len + args.output_len / 2
    floor = {name: model.step_ms(batch, context, sum(ranks)) for name, (ranks, batch) in variants.items()}
    return {
        "tpot_ms": {name: one.as_json() for name, one in tpot.items()},
        "slowdown_beside_128_over_alone": tpot["8 and 128"].median / tpot["8"].median,
        "slowdown_beside_128_over_beside_8": tpot["8 and 128"].median / tpot["8 and 8"].median,
        "floor_slowdown_over_alone": floor["8 and 128"] / floor["8"],
        "floor_slowdown_over_beside_8": floor["8 and 128"] / floor["8 and 8"],
    }


def show_mixes(section: dict[str, Any]) -> None:
    fit, rows = section["fit"], []
    for name, tpot in section["tpot_ms"].items():
        total = section["rank_sum"][name]
        line = fit["intercept"] + fit["slope"] * total
        rows.append(
            [
                name,
                str(section["num_distinct"][name]),
                str(total),
                f"{tpot['median']:.3f}",
                f"{tpot['range']:.3f}",
                f"{line:.3f}",
                f"{tpot['median'] / section['base_ms']:.3f}",
            ]
        )
    show_table(
        f"Mixed ranks, batch {section['batch']}: ms a token",
        ("mix", "distinct", "sum of ranks", "TPOT", "range", "fitted", "over none"),
        rows,
    )
    print(
        f"{section['rank_unit_us']:.2f} µs a rank (bytes say {section['floor_rank_unit_us']:.2f}), R² "
        f"{section['rank_fit_r2']:.4f}, intercept {section['intercept_over_base']:.3f} of no adapter; all of rank "
        f"{max(RANKS)} take {section['padded_over_production_lora_time']:.2f} times the adapter time of production",
        flush=True,
    )


def show_pair(section: dict[str, Any]) -> None:
    print(
        f"rank 8 beside rank 128: {section['slowdown_beside_128_over_alone']:.3f} of alone (bytes say "
        f"{section['floor_slowdown_over_alone']:.3f}), {section['slowdown_beside_128_over_beside_8']:.3f} of beside "
        f"another rank 8 (bytes say {section['floor_slowdown_over_beside_8']:.3f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.set_defaults(output_len=48)
    args = parser.parse_args()
    directory = prepare_base(args)
    engine, start = start_engine(directory, engine_settings(args, max_num_seqs=args.batch))
    report = Report(args, "mixed_ranks")
    report.result["startup"] = start.as_json()
    adapters = Adapters(engine)
    report.add("mixes", partial(measure_mixes, engine, adapters, args))
    report.add("pair", partial(measure_pair, engine, adapters, args))
    for name, show in (("mixes", show_mixes), ("pair", show_pair)):
        if name not in report.failed:
            show(report.result[name])
    report.finish()


if __name__ == "__main__":
    main()
