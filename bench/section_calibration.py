"""What the engine measures of itself at start (`Engine.calibrate`), and how near its model comes to decode steps."""

import argparse
import time
from statistics import median
from typing import Any

from engine_runs import Adapters, BatchTiming, Spread, make_requests, run_batch, say, show_table, spread_over
from loraplex.engine import Engine
from loraplex.scheduler import CostModel, StepShape
from open_loop import evict_all

COEFFICIENTS = ("fixed_ms", "token_ms", "kv_token_ms", "rank_ms")
LONG_PROMPT = 384


def _decode(engine: Engine, adapters: Adapters, args: argparse.Namespace, distinct: int, prompt: int) -> BatchTiming:
    refs = spread_over(adapters.take(args.rank, distinct), args.batch)
    requests = make_requests(refs, prompt, args.output_len, engine.base.vocab_size)
    run_batch(engine, requests)  # brings the adapters into the pool
    return run_batch(engine, requests)


def measure_calibration(engine: Engine, adapters: Adapters, args: argparse.Namespace) -> dict[str, Any]:
    """Calibrate several times, then time decode steps that it did not see; its first model predicts them."""
    evict_all(engine)
    models, seconds = list[CostModel](), list[float]()
    for _ in range(args.repeats):
        began_s = time.perf_counter()
        engine.calibrate()
        seconds.append(time.perf_counter() - began_s)
        models.append(engine.scheduler.costs.model)
    most = 2 * args.prompt_len if args.tiny else LONG_PROMPT
    steps = {}
    few, short = args.batch // 2, args.prompt_len
    for distinct, prompt in ((0, short), (few, short), (args.batch, short), (0, most), (args.batch, most)):
        measured_ms = median(_decode(engine, adapters, args, distinct, prompt).step_ms)
        kv_tokens = int(args.batch * (prompt + args.output_len / 2))
        predicted_ms = models[0].step_ms(StepShape(args.batch, kv_tokens, float(distinct * args.rank)))
        name = f"{distinct} adapters, prompts of {prompt}"
        steps[name] = {"measured_ms": measured_ms, "predicted_ms": predicted_ms, "ratio": predicted_ms / measured_ms}
    evict_all(engine)
    say(f"calibrated in {seconds[0]:.2f} s")
    return {
        "seconds": Spread.of(seconds).as_json(),
        "coefficients": {
            name: Spread.of([getattr(model, name) for model in models]).as_json() for name in COEFFICIENTS
        },
        "steps": steps,
    }


def show_calibration(section: dict[str, Any]) -> None:
    rows = [
        [name, f"{one['measured_ms']:.3f}", f"{one['predicted_ms']:.3f}", f"{one['ratio']:.3f}"]
        for name, one in section["steps"].items()
    ]
    show_table("Decode steps, ms", ("batch", "measured", "predicted at start", "ratio"), rows)
    found = section["coefficients"]
    rows = [[name, *(f"{found[name][key]:.4g}" for key in ("median", "range"))] for name in COEFFICIENTS]
    show_table(f"Calibration, {section['seconds']['median']:.2f} s", ("coefficient", "ms", "range"), rows)
