"""Output tokens a second of `loraplex.LLM`, end to end: Llama-3-8B shapes, random weights, greedy.

Batches of 64 requests of 64 prompt and 128 output tokens with 0, 1, 8, 32 and 64 distinct adapters of rank 16, resident
before the clock starts. Everything counts from the call until the last answer: admission, prefill, decode, text. Time
per output token is the difference between answers of 128 tokens and of one.

Usage: python bench/bench_offline.py [--base DIR] [--out FILE]
"""

import argparse
import time
from functools import partial
from typing import Any

from engine_runs import (
    Adapters,
    Report,
    Spread,
    add_options,
    engine_settings,
    make_requests,
    prepare_base,
    say,
    shape_of,
    show_table,
    spread_over,
)
from llama8b import ByteModel
from loraplex import LLM

DISTINCT = (0, 1, 8, 32, 64)


def _seconds(llm: LLM, adapters: Adapters, distinct: int, output_len: int, args: argparse.Namespace) -> float:
    """From the call until all answers are there."""
    refs = spread_over(adapters.take(args.rank, distinct), args.batch)
    requests = make_requests(refs, args.prompt_len, output_len, llm.engine.base.vocab_size)
    started = time.perf_counter()
    outputs = llm.run(requests)
    seconds = time.perf_counter() - started
    assert all(answers[-1].num_output_tokens == output_len for answers in outputs.values())
    return seconds


def measure_offline(llm: LLM, adapters: Adapters, args: argparse.Namespace) -> dict[str, Any]:
    """Interleaved rounds over the numbers of distinct adapters, the first to warm up."""
    counts = sorted({min(d, args.batch) for d in DISTINCT})
    whole: dict[str, list[float]] = {str(d): [] for d in counts}
    first: dict[str, list[float]] = {str(d): [] for d in counts}
    for number in range(args.repeats + 1):
        for d in counts:
            one = _seconds(llm, adapters, d, 1, args)
            all_of_it = _seconds(llm, adapters, d, args.output_len, args)
            if number:
                first[str(d)].append(one)
                whole[str(d)].append(all_of_it)
        say(f"round {number} of {args.repeats}" if number else "warmed up")
    tokens = args.batch * args.output_len
    rates = {name: Spread.of([tokens / s for s in seconds]) for name, seconds in whole.items()}
    tpot = {
        name: Spread.of([1e3 * (a - b) / (args.output_len - 1) for a, b in zip(whole[name], first[name], strict=True)])
        for name in whole
    }
    model, context = ByteModel.of(shape_of(args)), args.prompt_len + args.output_len / 2
    base = tpot["0"].median
    return {
        "batch": args.batch,
        "prompt_len": args.prompt_len,
        "output_len": args.output_len,
        "rank": args.rank,
        "output_tok_s": {name: one.as_json() for name, one in rates.items()},
        "tpot_ms": {name: one.as_json() for name, one in tpot.items()},
        "tpot_over_base": {name: one.median / base for name, one in tpot.items()},
        "first_token_batch_s": {name: Spread.of(seconds).as_json() for name, seconds in first.items()},
        "floor_ms": {str(d): model.step_ms(args.batch, context, d * args.rank) for d in counts},
    }


def show_offline(section: dict[str, Any]) -> None:
    rows = [
        [
            name,
            f"{rate['median']:.0f}",
            f"{rate['range']:.0f}",
            f"{section['tpot_ms'][name]['median']:.3f}",
            f"{section['tpot_ms'][name]['range']:.3f}",
            f"{section['tpot_over_base'][name]:.3f}",
            f"{section['floor_ms'][name]:.3f}",
            f"{1e3 * section['first_token_batch_s'][name]['median']:.1f}",
        ]
        for name, rate in section["output_tok_s"].items()
    ]
    show_table(
        f"LLM, batch {section['batch']}, {section['prompt_len']} + {section['output_len']} tokens, "
        f"rank {section['rank']}",
        ("distinct", "output tok/s", "range", "TPOT ms", "range", "over none", "floor ms", "1 token each, ms"),
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--rank", type=int, default=16, help="of every adapter (%(default)s)")
    args = parser.parse_args()
    directory = prepare_base(args)
    llm = LLM(directory, **engine_settings(args, max_num_seqs=args.batch))
    say("the LLM is up")
    report = Report(args, "offline")
    report.add("offline", partial(measure_offline, llm, Adapters(llm.engine), args))
    if not report.failed:
        show_offline(report.result["offline"])
    report.finish()


if __name__ == "__main__":
    main()
