"""What an adapter costs a chunk of 2048 prompt tokens (BENCH.md 3.4)."""

import argparse
from typing import Any

from engine_runs import Adapters, Spread, make_requests, run_batch, say, shape_of, show_table
from loraplex.engine import Engine

CHUNK = 2048
RANKS = (0, 16, 64)
MIN_ROUNDS = 5


def measure_prefill(engine: Engine, adapters: Adapters, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds from asking until the first token of one prompt that fills a chunk, without and with an adapter."""
    tokens = min(CHUNK, engine.scheduler.config.max_step_tokens)
    values: dict[int, list[float]] = {rank: [] for rank in RANKS}
    rounds = max(args.repeats, MIN_ROUNDS)
    for number in range(rounds + 1):
        for rank in RANKS:
            refs = adapters.take(rank, 1) if rank else [None]
            timing = run_batch(engine, make_requests(refs, tokens, 1, engine.base.vocab_size, seed=number))
            if number:
                values[rank].append(1e3 * timing.seconds)
    say("  ".join(f"rank {rank}: {Spread.of(ms).median:.2f} ms" for rank, ms in values.items()))
    spreads = {str(rank): Spread.of(ms) for rank, ms in values.items()}
    base, sites = spreads["0"].median, shape_of(args).sites
    per_rank = sum(s.d_in + s.d_out for s in sites) / sum(s.d_in * s.d_out for s in sites)
    return {
        "tokens": tokens,
        "ms": {name: one.as_json() for name, one in spreads.items()},
        "over_base": {name: one.median / base for name, one in spreads.items()},
        "arithmetic_over_base": {str(rank): 1 + rank * per_rank for rank in RANKS},
    }


def show_prefill(section: dict[str, Any]) -> None:
    rows = [
        [
            name if int(name) else "none",
            f"{ms['median']:.2f}",
            f"{ms['range']:.2f}",
            f"{section['over_base'][name]:.3f}",
            f"{section['arithmetic_over_base'][name]:.3f}",
        ]
        for name, ms in section["ms"].items()
    ]
    rounds = len(section["ms"]["0"]["values"])
    show_table(
        f"Prefill of {section['tokens']} tokens, one prompt, to its first token (median of {rounds} rounds)",
        ("rank", "ms", "range", "over none", "arithmetic says"),
        rows,
    )
