"""What `--tpot-target-ms` does to an engine under load: times between tokens and to the first one, by target.

The bound is the scheduler's (`CostModel.max_ranks`, `max_tokens`), with the costs that the engine measures of itself.
"""

import argparse
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine_runs import Adapters, say, show_table
from loraplex.engine import Engine
from loraplex.scheduler import StepShape
from open_loop import Arrival, Run, drive, evict_all, make_request, random_prompt, spread_ms, touch, zipf_shares

RANK = 64
NUM_ADAPTERS = 100
RATE = 20.0  # requests a second
SECONDS = 6.0
PROMPT = (64, 1023)
OUTPUT = 256
TARGETS_MS = (None, 12.0, 9.0, 7.0, 5.0)


def _arrivals(engine: Engine, adapters: Adapters, args: argparse.Namespace) -> list[Arrival]:
    """Poisson arrivals, adapters by Zipf 1.0; the same for every target."""
    rng, num_adapters = random.Random(5), 8 if args.tiny else NUM_ADAPTERS
    refs = adapters.take(4 if args.tiny else RANK, num_adapters)
    shares, (least, most) = zipf_shares(num_adapters, 1.0), (4, 8) if args.tiny else PROMPT
    found, at_s = list[Arrival](), 0.0
    while (at_s := at_s + rng.expovariate(RATE)) < (1.0 if args.tiny else SECONDS):
        prompt = random_prompt(rng, rng.randint(least, most), engine.base.vocab_size)
        (ref,) = rng.choices(refs, shares)
        found.append(Arrival(at_s, make_request(prompt, 8 if args.tiny else OUTPUT, ref)))
    return found


def _watch(engine: Engine) -> tuple[dict[str, int], Callable[[float], None]]:
    """Most distinct adapters and sequences that ran at once, as they are seen between steps."""
    most = {"adapters": 0, "sequences": 0}

    def look(now_s: float) -> None:
        running = engine.scheduler.running
        most["sequences"] = max(most["sequences"], len(running))
        most["adapters"] = max(most["adapters"], len({seq.adapter for seq in running}))

    return most, look


def _figures(run: Run, most: dict[str, int]) -> dict[str, Any]:
    records = run.started
    gaps = [b - a for record in records for a, b in itertools.pairwise(record.token_s)]
    return {
        "between_tokens_ms": spread_ms(gaps),
        "tpot_ms": spread_ms([record.tpot_s for record in records]),
        "first_token_ms": spread_ms([record.ttft_s for record in records]),
        "tokens_s": sum(len(record.token_s) for record in records) / run.seconds,
        "most_at_once": most,
    }


def measure_target(engine: Engine, adapters: Adapters, args: argparse.Namespace) -> dict[str, Any]:
    """The same requests for each target, on adapters that are in the pool, after one run to warm up."""
    evict_all(engine)
    engine.calibrate()
    scheduler, before = engine.scheduler, engine.scheduler.config
    model = scheduler.costs.model
    touch(engine, adapters.take(4 if args.tiny else RANK, 8 if args.tiny else NUM_ADAPTERS))
    targets: dict[str, Any] = {}
    try:
        for number, target_ms in enumerate((None, *TARGETS_MS)):
            scheduler.config = replace(before, tpot_target_ms=target_ms)
            most, look = _watch(engine)
            run = drive(engine, _arrivals(engine, adapters, args), after_step=look)
            if number:
                targets["none" if target_ms is None else f"{target_ms:g}"] = _figures(run, most)
            say(f"target {target_ms}: {len(run.started)} requests in {run.seconds:.1f} s")
    finally:
        scheduler.config = before
    return {
        "rank": RANK,
        "adapters": NUM_ADAPTERS,
        "rate": RATE,
        "prompt_tokens": PROMPT,
        "output_tokens": OUTPUT,
        "step_of_one_ms": model.step_ms(StepShape(1, 1, 0.0)),
        "targets": targets,
    }


def show_target(section: dict[str, Any]) -> None:
    rows = [
        [
            name,
            *(f"{one['between_tokens_ms'][key]:.2f}" for key in ("p50", "p99")),
            *(f"{one['tpot_ms'][key]:.2f}" for key in ("p50", "p99")),
            *(f"{one['first_token_ms'][key]:.1f}" for key in ("p50", "p99")),
            f"{one['tokens_s']:.0f}",
            f"{one['most_at_once']['adapters']} / {one['most_at_once']['sequences']}",
        ]
        for name, one in section["targets"].items()
    ]
    show_table(
        f"{section['rate']:g} requests/s on {section['adapters']} adapters of rank {section['rank']}, ms; a step of "
        f"one token takes {section['step_of_one_ms']:.2f}",
        ("target", "gap p50", "gap p99", "TPOT p50", "TPOT p99", "TTFT p50", "TTFT p99", "tokens/s", "adapters/seqs"),
        rows,
    )
