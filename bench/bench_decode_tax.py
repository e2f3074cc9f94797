"""What adapters cost a decode step (BENCH.md P2), through the engine: Llama-3-8B shapes, random weights, greedy.

A batch of 64 requests of 64 prompt and 128 output tokens with 0, 1, 8, 32 and 64 distinct adapters of rank 16 on all
seven linears, beside the bytes that each step must read. The same process measures the start, resident adapters, the
relative error of the logits, the prefill tax, the calibration and targets, each a section of its own (`--sections`).

Usage: python bench/bench_decode_tax.py [--base DIR] [--sections decode_tax,...] [--out FILE] [--plot FILE]
       python bench/bench_decode_tax.py --replot RESULT.json [--plot FILE]
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from decode_plot import plot_decode_tax
from engine_runs import (
    ROOT,
    Adapters,
    BatchTiming,
    Report,
    Spread,
    add_options,
    engine_settings,
    interleave,
    make_requests,
    percentile,
    prepare_base,
    run_batch,
    say,
    shape_of,
    show_table,
    spread_over,
    start_engine,
)
from llama8b import ByteModel
from loraplex.engine import Engine
from section_calibration import measure_calibration, show_calibration
from section_prefill import measure_beside, measure_prefill, show_beside, show_prefill
from section_rel_err import measure_rel_err, measure_rel_err_cut, show_rel_err
from section_resident import measure_resident, show_resident
from section_target import measure_target, show_target

PLOT = ROOT / "docs" / "images" / "h200_decode_tax.svg"
DISTINCT = (0, 1, 8, 32, 64)


def distinct_counts(batch: int) -> list[int]:
    """Numbers of distinct adapters to measure with a batch."""
    return sorted({min(d, batch) for d in DISTINCT})


def measure_decode_tax(engine: Engine, adapters: Adapters, args: argparse.Namespace) -> dict[str, Any]:
    """Time per output token by distinct adapters, with floors."""
    counts = distinct_counts(args.batch)

    def run(distinct: int) -> BatchTiming:
        refs = spread_over(adapters.take(args.rank, distinct), args.batch)
        return run_batch(engine, make_requests(refs, args.prompt_len, args.output_len, engine.base.vocab_size))

    timings = interleave(args.repeats, {str(d): partial(run, d) for d in counts})
    model = ByteModel.of(shape_of(args))
    context = args.prompt_len + args.output_len / 2
    floor = {str(d): model.step_ms(args.batch, context, d * args.rank) for d in counts}
    steps = {name: [ms for run in runs for ms in run.step_ms] for name, runs in timings.items()}
    tpot = {name: Spread.of([run.tpot_ms for run in runs]) for name, runs in timings.items()}
    base = tpot["0"].median
    return {
        "shape": shape_of(args).name,
        "batch": args.batch,
        "prompt_len": args.prompt_len,
        "output_len": args.output_len,
        "rank": args.rank,
        "tpot_ms": {name: one.as_json() for name, one in tpot.items()},
        "over_base": {name: one.median / base for name, one in tpot.items()},
        "median_step_ms": {name: Spread.of(values).median for name, values in steps.items()},
        "p95_step_ms": {name: percentile(values, 0.95) for name, values in steps.items()},
        "request_tpot_ms": {
            name: Spread.of([run.request_tpot_ms for run in runs]).median for name, runs in timings.items()
        },
        "first_token_s": {
            name: Spread.of([run.first_token_s for run in runs]).median for name, runs in timings.items()
        },
        "mean_context": context,
        "read_tb_s": model.tb_s,
        "floor_ms": floor,
        "floor_over_base": {name: ms / floor["0"] for name, ms in floor.items()},
        "efficiency": {name: floor[name] / one.median for name, one in tpot.items()},
    }


def show_decode_tax(section: dict[str, Any]) -> None:
    rows = [
        [
            name,
            f"{tpot['median']:.3f}",
            f"{tpot['range']:.3f}",
            f"{section['median_step_ms'][name]:.3f}",
            f"{section['p95_step_ms'][name]:.3f}",
            f"{section['over_base'][name]:.3f}",
            f"{section['floor_over_base'][name]:.3f}",
            f"{section['floor_ms'][name]:.3f}",
            f"{section['efficiency'][name]:.2f}",
        ]
        for name, tpot in section["tpot_ms"].items()
    ]
    show_table(
        f"Decode, batch {section['batch']}, {section['prompt_len']} + {section['output_len']} tokens, rank "
        f"{section['rank']}: ms a token (median of {len(section['tpot_ms']['0']['values'])} interleaved rounds)",
        ("distinct", "TPOT", "range", "median step", "p95 step", "over none", "bytes say", "floor ms", "efficiency"),
        rows,
    )


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the decode tax of a result."""
    section, versions = result["decode_tax"], result["versions"]
    title = (
        f"{section['shape']} shapes, {result['device']}, batch {section['batch']}, rank {section['rank']} on all "
        f"linears, {section['prompt_len']} + {section['output_len']} tokens\ntorch {versions['torch']}, triton "
        f"{versions['triton']}, commit {str(result['commit'])[:12]}, {result['date']}"
    )
    try:
        plot_decode_tax(section, title, path)
    except ImportError as error:
        say(f"no plot: {error}; draw it later with --replot")
    else:
        say(f"plot in {path}")


def replot(args: argparse.Namespace) -> None:
    plot(json.loads(args.replot.read_text()), args.plot or PLOT)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--rank", type=int, default=16, help="of every adapter (%(default)s)")
    parser.add_argument("--max-num-seqs", type=int, help="the engine's; fewer are fewer graphs to capture")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="what to measure (%(default)s)")
    parser.add_argument("--plot", type=Path, help=f"SVG file instead of {PLOT.relative_to(ROOT)} (none with --tiny)")
    parser.add_argument("--replot", type=Path, help="draw the plot of an earlier result and end")
    args = parser.parse_args()
    if unknown := set(args.sections.split(",")) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return args


SECTIONS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[[dict[str, Any]], None]]] = {
    "decode_tax": (measure_decode_tax, show_decode_tax),
    "prefill": (measure_prefill, show_prefill),
    "beside": (measure_beside, show_beside),
    "calibration": (measure_calibration, show_calibration),
    "target": (measure_target, show_target),
    "resident": (measure_resident, show_resident),
    "rel_err": (measure_rel_err, show_rel_err),
    "rel_err_cut": (measure_rel_err_cut, show_rel_err),
}


def main() -> None:
    args = read_options()
    if args.replot:
        return replot(args)
    directory = prepare_base(args)
    settings = engine_settings(args, max_num_seqs=args.max_num_seqs)
    engine, start = start_engine(directory, settings, cold_fingerprint=True)
    report = Report(args, "decode_tax")
    report.result["startup"] = start.as_json()
    adapters = Adapters(engine)
    for name in args.sections.split(","):
        report.add(name, partial(SECTIONS[name][0], engine, adapters, args))
    for name in args.sections.split(","):
        if name not in report.failed:
            SECTIONS[name][1](report.result[name])
    if "decode_tax" in report.result and "decode_tax" not in report.failed and (args.plot or not args.tiny):
        plot(report.result, args.plot or PLOT)
    return report.finish()


if __name__ == "__main__":
    main()
