"""S-LoRA's table on its own workload (BENCH.md P4): Llama-2-7B shapes, adapters on q, k, v and o.

Settings S1 (rank 8) and S2 (ranks 64, 32, 16, 8 in turn) with 5, 100, 1000 and 2000 adapters. Requests are those of
S-LoRA's generator (arXiv 2311.03285, `benchmarks/trace.py` of its repository): adapters by a power law, of which
exponent 1 is uniform, lengths uniform in [8, 512) tokens, Gamma arrivals, numpy's generator seeded with 42. Shortened
to `--seconds` of arrivals. Mode "rate" offers R requests a second and waits for all answers; mode "saturation" offers
more than can be served and counts in a window once the batch is full. Every run begins without adapters in the pool.

Usage: python bench/bench_slora.py [--base DIR] [--settings S1,S2] [--adapters 5,2000] [--modes rate,saturation]
"""

import argparse
import random
import sys
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from engine_runs import Report, add_options, engine_settings, prepare_base, say, shape_of, show_table, start_engine
from llama8b import Shape
from logical_adapters import LogicalAdapters
from loraplex.core import AdapterRef
from loraplex.engine import Engine
from open_loop import Arrival, Run, drive, evict_all, make_request, random_prompt, spread_ms

LLAMA2_7B = Shape("Llama-2-7B", 4096, 32, 32, 32, 11008, 32000, 4096)
SETTINGS = {"S1": (8,), "S2": (64, 32, 16, 8)}
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
MODES = ("rate", "saturation")
SLO_S = (6.0, 0.5)  # to the first token: S-LoRA's, and one of this hardware
TINY_OPTIONS = """--adapters 5,20 --lengths 4,24 --seconds 3 --rate 10 --saturation-rate 80 --window-from 1 --images 2
    --batch 8"""


# ---------------------------------------------------------------------- workload
@dataclass(frozen=True, slots=True)
class Drawn:
    """A request as the generator draws it."""

    at_s: float
    adapter: int
    prompt_len: int
    output_len: int


def draw_requests(
    num_adapters: int, rate: float, seconds: float, lengths: tuple[int, int], *, alpha: float, cv: float, seed: int
) -> list[Drawn]:
    """The same numbers as S-LoRA's generator draws, in its order: adapters, prompts, outputs, intervals."""
    rng, count = np.random.RandomState(seed), int(rate * seconds)
    adapters = (rng.power(alpha, count) * num_adapters).astype(int)
    prompts, outputs = rng.randint(*lengths, count), rng.randint(*lengths, count)
    at = np.cumsum(rng.gamma(1 / cv**2, cv**2 / rate, count))
    return [Drawn(*row) for row in zip(at.tolist(), adapters.tolist(), prompts.tolist(), outputs.tolist(), strict=True)]


def make_arrivals(engine: Engine, refs: list[AdapterRef], drawn: list[Drawn], seed: int) -> list[Arrival]:
    rng, vocab = random.Random(seed), engine.base.vocab_size
    return [
        Arrival(one.at_s, make_request(random_prompt(rng, one.prompt_len, vocab), one.output_len, refs[one.adapter]))
        for one in drawn
    ]


# ---------------------------------------------------------------------- a pool of which adapters get a part
class AdapterCap:
    """Called between steps: evicts idle adapters beyond so many pages (None: none), oldest first.

    Those that are waited for stay, also beyond.
    """

    def __init__(self, engine: Engine, num_pages: int | None) -> None:
        self._engine = engine
        self._num_pages = num_pages
        self.most_pages = 0

    def __call__(self, now_s: float) -> None:
        num_pages = self._engine.scheduler.residency.num_pages
        self.most_pages = max(self.most_pages, num_pages)
        if self._num_pages is not None and num_pages > self._num_pages:
            self._evict(num_pages - self._num_pages)

    def _evict(self, num_pages: int) -> None:
        residency, wanted = self._engine.scheduler.residency, {seq.adapter for seq in self._engine.scheduler.waiting}
        for digest in residency.resident:
            if num_pages <= 0:
                return
            if not residency.num_users(digest) and digest not in wanted:
                num_pages -= len(residency.pages(digest))
                residency.evict(digest)


# ---------------------------------------------------------------------- runs
@dataclass(frozen=True, slots=True)
class Case:
    """One run: a setting, its number of adapters, how requests are offered, and the share of adapters' bytes held."""

    setting: str
    num_adapters: int
    mode: str
    share: float  # of the setting's adapters that the pool may hold; 1: as many as fit

    @property
    def name(self) -> str:
        cap = f", {self.share:.0%} of them in the pool" if self.share < 1 else ""
        return f"{self.setting}, {self.num_adapters} adapters, {self.mode}{cap}"


class Bench:
    """An engine with the adapters of all settings."""

    def __init__(self, engine: Engine, args: argparse.Namespace) -> None:
        self.engine = engine
        self.args = args
        self.adapters = LogicalAdapters(engine, args.images, MODULES)
        most = max(args.adapters)
        self.refs = {
            name: [self.adapters.add(f"{name}-{i}", ranks[i % len(ranks)]) for i in range(most)]
            for name, ranks in SETTINGS.items()
            if name in args.settings
        }
        say(f"{most} adapters a setting; {self.adapters.host_bytes / 1e9:.1f} GB of images in host memory")

    def run(self, case: Case) -> dict[str, Any]:
        """Run a case; its figures."""
        args, refs = self.args, self.refs[case.setting][: case.num_adapters]
        rate = args.rate if case.mode == "rate" else args.saturation_rate
        drawn = draw_requests(len(refs), rate, args.seconds, args.lengths, alpha=args.alpha, cv=args.cv, seed=args.seed)
        evict_all(self.engine)
        num_pages = sum(self.adapters.num_pages(ref) for ref in refs)
        cap = AdapterCap(self.engine, int(case.share * num_pages) if case.share < 1 else None)
        end_s = args.seconds if case.mode == "saturation" else float("inf")
        run = drive(self.engine, make_arrivals(self.engine, refs, drawn, args.seed), end_s=end_s, after_step=cap)
        figures = _of_window(run, drawn, args) if case.mode == "saturation" else _of_rate(run, drawn)
        figures |= self._about(case, run, num_pages, cap.most_pages)
        figures |= {"offered_req_s": rate, "distinct_asked": len({one.adapter for one in drawn})}
        first_ms = figures["first_token_ms"]["mean"]
        say(f"{case.name}: {figures['req_s']:.2f} requests a second, first token {first_ms:.0f} ms")
        return figures

    def _about(self, case: Case, run: Run, num_pages: int, most_pages: int) -> dict[str, Any]:
        page_gb = self.engine._geometry.page_bytes / 1e9
        return {
            "setting": case.setting,
            "adapters": case.num_adapters,
            "mode": case.mode,
            "pool_share": case.share,
            "adapters_gb": num_pages * page_gb,
            "most_adapters_gb_in_pool": most_pages * page_gb,
            "loads": run.num_loads,
            "evictions": run.num_evictions,
            "preemptions": run.num_preemptions,
            "steps": run.num_steps,
            "cold_share": fmean(record.is_cold for record in run.started),
        }


def _of_rate(run: Run, drawn: list[Drawn]) -> dict[str, Any]:
    """All requests, over the time from the start to the last answer, as S-LoRA counts."""
    records = list(run.records.values())
    assert all(record.is_done for record in records), "a request has no answer"
    ttft = [record.ttft_s for record in records]
    prompts, outputs = sum(one.prompt_len for one in drawn), sum(len(record.token_s) for record in records)
    return {
        "requests": len(records),
        "seconds": run.seconds,
        "req_s": len(records) / run.seconds,
        "tok_s": (prompts + outputs) / run.seconds,
        "output_tok_s": outputs / run.seconds,
        "first_token_ms": spread_ms(ttft),
        "tpot_ms": spread_ms([record.tpot_s for record in records]),
        "latency_ms": spread_ms([record.latency_s for record in records]),
        "attainment": {f"{slo:g} s": sum(t <= slo for t in ttft) / len(ttft) for slo in SLO_S},
    }


def _of_window(run: Run, drawn: list[Drawn], args: argparse.Namespace) -> dict[str, Any]:
    """From `--window-from` until the end of the arrivals, in which the queue must never have been empty."""
    first_s, last_s = args.window_from, run.seconds
    records, seconds = run.started, last_s - first_s

    def is_in(at_s: float) -> bool:
        return first_s <= at_s < last_s

    finished = sum(record.is_done and is_in(record.token_s[-1]) for record in records)
    outputs = sum(is_in(at_s) for record in records for at_s in record.token_s)
    prompts = sum(record.prompt_len for record in records if is_in(record.token_s[0]))
    queue = [waiting for at_s, waiting in run.queue if is_in(at_s)]
    return {
        "requests": len(run.records),
        "seconds": seconds,
        "req_s": finished / seconds,
        "tok_s": (prompts + outputs) / seconds,
        "output_tok_s": outputs / seconds,
        "req_s_by_tokens": (prompts + outputs) / seconds / fmean(one.prompt_len + one.output_len for one in drawn),
        "first_token_ms": spread_ms([record.ttft_s for record in records]),
        "tpot_ms": spread_ms([record.tpot_s for record in records if record.is_done]),
        "step_ms": 1e3 * seconds / max(1, len(queue)),
        "shortest_queue": min(queue, default=0),
        "is_saturated": bool(queue) and min(queue) > 0,
    }


def make_cases(args: argparse.Namespace) -> list[Case]:
    """In order of settings, shares and modes; numbers of adapters next to each other."""
    return [
        Case(setting, count, mode, share)
        for setting in args.settings
        for share in args.pool_shares
        for mode in args.modes
        for count in args.adapters
    ]


def ratios(cases: dict[str, Any]) -> dict[str, Any]:
    """Requests and tokens a second with the most adapters over those with the fewest, by setting, share and mode."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in cases.values():
        if "error" not in one:
            groups.setdefault(f"{one['setting']}, {one['mode']}, {one['pool_share']:g} of the adapters", []).append(one)
    found = {}
    for name, members in groups.items():
        few, many = min(members, key=lambda one: one["adapters"]), max(members, key=lambda one: one["adapters"])
        if few is not many:
            label = f"{name}: {many['adapters']} over {few['adapters']}"
            found[label] = {key: many[key] / few[key] for key in ("req_s", "tok_s")}
    return found


def show(cases: dict[str, Any], over: dict[str, Any]) -> None:
    rows = [
        [
            name,
            *(f"{one[key]:.{digits}f}" for key, digits in (("req_s", 2), ("tok_s", 0))),
            *(f"{one['first_token_ms'][key]:.0f}" for key in ("mean", "p99")),
            *(f"{one['attainment'][key]:.3f}" if "attainment" in one else "" for key in ("6 s", "0.5 s")),
            f"{one['tpot_ms'].get('p50', 0):.1f}",
            *(str(one[key]) for key in ("requests", "distinct_asked", "loads", "evictions")),
        ]
        for name, one in cases.items()
        if "error" not in one
    ]
    columns = ("run", "req/s", "tok/s", "first mean ms", "p99", "in 6 s", "in 0.5 s", "TPOT p50", "requests")
    columns += ("distinct", "loads", "evictions")
    show_table("S-LoRA's workload", columns, rows)
    for name, ratio in over.items():
        print(f"{name}: {ratio['req_s']:.3f} requests a second, {ratio['tok_s']:.3f} tokens", flush=True)


# ---------------------------------------------------------------------- options
def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.set_defaults(batch=256, shape=LLAMA2_7B)
    parser.add_argument("--settings", type=lambda text: text.split(","), default=list(SETTINGS), help="S1,S2")
    parser.add_argument("--adapters", type=_ints, default=[5, 100, 1000, 2000], help="5,100,1000,2000")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES), help="rate,saturation")
    parser.add_argument("--pool-shares", type=lambda text: [float(part) for part in text.split(",")], default=[1.0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals in each run (%(default)s)")
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second, mode rate (%(default)s)")
    parser.add_argument("--saturation-rate", type=float, default=60.0, help="the same, mode saturation (%(default)s)")
    parser.add_argument("--window-from", type=float, default=8.0, help="seconds, mode saturation (%(default)s)")
    parser.add_argument("--lengths", type=_ints, default=[8, 512], help="tokens, from and below (8,512)")
    parser.add_argument("--alpha", type=float, default=1.0, help="of the power law; 1 is uniform (%(default)s)")
    parser.add_argument("--cv", type=float, default=1.0, help="of the intervals (%(default)s)")
    parser.add_argument("--images", type=int, default=8, help="adapters in host memory a rank (%(default)s)")
    parser.add_argument("--seed", type=int, default=42)
    given = sys.argv[1:]
    args = parser.parse_args([*(TINY_OPTIONS.split() if "--tiny" in given else []), *given])
    for name, known in (("settings", SETTINGS), ("modes", MODES)):
        if unknown := set(getattr(args, name)) - set(known):
            parser.error(f"--{name}: no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return args


def main() -> None:
    args = read_options()
    directory = prepare_base(args)
    engine, start = start_engine(directory, engine_settings(args, max_num_seqs=args.batch, max_waiting=100_000))
    report = Report(args, "slora")
    report.result |= {
        "weights": f"random, {shape_of(args).name} shapes, bfloat16; adapters on {', '.join(MODULES)}, distinct in the "
        f"pool, {args.images} images a rank in host memory (fewer above rank 32)",
        "startup": start.as_json(),
        "pool_gb": engine._geometry.num_pages * engine._geometry.page_bytes / 1e9,
        "bar": "2000 adapters within 5 % of 5",
    }
    bench = Bench(engine, args)
    for case in make_cases(args):
        report.add(case.name, partial(bench.run, case))
    cases = {case.name: report.result[case.name] for case in make_cases(args)}
    report.result["over_fewest"] = ratios(cases)
    report.write()
    show(cases, report.result["over_fewest"])
    report.finish()


if __name__ == "__main__":
    main()
