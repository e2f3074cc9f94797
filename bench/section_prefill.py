"""What adapters cost a chunk of 2048 tokens: of one prompt, and of a prompt beside decoding rows."""

import argparse
import time
from collections.abc import Sequence
from typing import Any

from engine_runs import Adapters, Spread, make_requests, run_batch, say, shape_of, show_table
from loraplex.core import AdapterRef, RequestId, RequestOutput
from loraplex.engine import Engine

CHUNK = 2048
RANKS = (0, 16, 64)
MIN_ROUNDS = 5
BESIDE_TOKENS = (16, 128, 384, 1024)


def _beside_ms(engine: Engine, refs: Sequence[AdapterRef | None], tokens: int, seed: int) -> float:
    """Milliseconds from asking until the first token of a prompt of the first adapter, while the others decode."""
    vocab = engine.base.vocab_size
    decoding = make_requests(refs[1:], 16, 64, vocab, seed=seed)
    for request in decoding:
        engine.add_request(request, time.monotonic())
    num_tokens: dict[RequestId, int] = {}
    while len(num_tokens) < len(decoding) or min(num_tokens.values()) < 3:
        for result in engine.step(time.monotonic()):
            assert isinstance(result, RequestOutput)
            num_tokens[result.request_id] = result.num_output_tokens
    (prompt,) = make_requests(refs[:1], tokens, 1, vocab, seed=seed + 1)
    started = time.perf_counter()
    engine.add_request(prompt, time.monotonic())
    while not any(result.request_id == prompt.request_id for result in engine.step(time.monotonic())):
        pass
    seconds = time.perf_counter() - started
    for request in decoding:
        engine.abort(request.request_id)
    while engine.has_work:
        engine.step(time.monotonic())
    return 1e3 * seconds


def measure_beside(engine: Engine, adapters: Adapters, args: argparse.Namespace) -> dict[str, Any]:
    """Prompts of several lengths, the last what decoding rows leave of a chunk: no adapter, one for all, distinct."""
    whole = min(CHUNK, engine.scheduler.config.max_step_tokens) - args.batch
    every = adapters.take(16, args.batch)
    kinds: dict[str, list[AdapterRef | None]] = {
        "none": [None] * args.batch,
        "one": [every[0]] * args.batch,
        "distinct": [*every],
    }
    lengths = [*(tokens for tokens in BESIDE_TOKENS if tokens < whole), whole]
    values: dict[int, dict[str, list[float]]] = {tokens: {name: [] for name in kinds} for tokens in lengths}
    for number in range(max(args.repeats, MIN_ROUNDS) + 1):
        for tokens in lengths:
            for name, refs in kinds.items():
                took = _beside_ms(engine, refs, tokens, number)
                if number:
                    values[tokens][name].append(took)
    prompts = {}
    for tokens, by_kind in values.items():
        spreads = {name: Spread.of(ms) for name, ms in by_kind.items()}
        prompts[str(tokens)] = {
            "ms": {name: one.as_json() for name, one in spreads.items()},
            "over_none": {name: one.median / spreads["none"].median for name, one in spreads.items()},
        }
    return {"decoding": args.batch - 1, "rank": 16, "prompts": prompts}


def show_beside(section: dict[str, Any]) -> None:
    rows = [
        [
            tokens,
            *(f"{one['ms'][name]['median']:.2f} ± {one['ms'][name]['range'] / 2:.2f}" for name in one["ms"]),
            *(f"{one['over_none'][name]:.3f}" for name in ("one", "distinct")),
        ]
        for tokens, one in section["prompts"].items()
    ]
    show_table(
        f"First token of a prompt beside {section['decoding']} decoding rows, ms; adapters of rank 16",
        ("prompt tokens", "no adapter", "one for all", "distinct", "one over none", "distinct over none"),
        rows,
    )


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
