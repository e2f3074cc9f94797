"""2,000 registered adapters, a pool that holds some 64 of them, 16 clients, on the CPU: SmolLM2-135M-Instruct.

`loraplex serve` runs as a user starts it, on a registry of random adapters (ranks 4, 8 and 16 on q, k, v and o) of 16
tenants; it is made at first use and kept. Popularity is Zipf's with exponent 1 over all of them.

Warm requests: 16 clients ask one request after the other, of a server whose pool has pages for 64 adapters of middling
size or for KV and cached prefixes instead, and of one whose pool holds all. Both get the same requests in turn; host
memory holds all adapters in both, and each is asked for once before. Compared is the 99th percentile of the time per
output token of those requests whose adapter was in the small pool. How many adapters lay in it at most is reported.

No cliff: requests arrive by a Poisson process on 32 adapters, about what fits beside KV and
prefixes, and at the same times on 256.

Usage: python bench/bench_many_adapters.py [--rounds 3] [--out FILE]
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import torch

from http_load import Answer, Ask, Load, Served, hardware, run_load
from loraplex.model.gguf_import import DEMO_NAME, ensure_demo_base
from registry_fleet import FleetSpec, describe, make_keys, make_registry

CLIENTS = 16
ZIPF = 1.0
TIMES_SLOTS = 8
BARS = {"warm_tpot_p99_over_all_warm": 1.15, "first_token_over_one_times_slots": 3.0}


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Bench:
    """Both servers and the keys of all tenants."""

    def __init__(self, args: argparse.Namespace, base: Path, folder: Path, keys: dict[str, str]) -> None:
        self.args = args
        self._keys = keys
        self._spec = args.spec
        self._rng = random.Random(args.seed)
        common = [str(base), "--data-dir", str(args.data), "--max-cpu-loras", str(2 * args.adapters)]
        common += ["--cpu-lora-memory", args.host_memory, "--max-loras", str(CLIENTS), "--public-metrics"]
        self.small = Served([*common, "--kv-pages", str(args.pages)], folder / "small.log")
        self.small.wait_ready()
        self.whole = Served([*common, "--kv-pages", str(args.all_pages)], folder / "whole.log")
        self.whole.wait_ready()

    def stop(self) -> None:
        self.small.stop()
        self.whole.stop()

    def ask(self, place: int, at_s: float = 0.0, *, is_short: bool = False) -> Ask:
        """A request on an adapter, for half to one and a half times the tokens of --output-len, or for one."""
        tenant, usual = self._spec.tenant(place), self.args.output_len
        prompt = tuple(self._rng.randrange(1000, 40_000) for _ in range(4 if is_short else self.args.prompt_len))
        output_len = 1 if is_short else self._rng.randint(usual // 2, usual + usual // 2)
        return Ask(self._spec.name(place), self._keys[tenant], prompt, output_len, at_s)

    def touch(self, server: Served, places: Sequence[int]) -> None:
        """A token from each adapter, so that its weights are in host memory, and in the pool if they fit."""
        load = run_load(server, [self.ask(place, is_short=True) for place in places], num_clients=CLIENTS)
        assert not load.failed, load.failed[0].error

    def run(self, server: Served, asks: Sequence[Ask], num_clients: int | None) -> Load:
        return run_load(server, asks, num_clients=num_clients, watch=lambda: server.gauge("loraplex_adapters_resident"))


# ---------------------------------------------------------------------- warm requests
def measure_warm(bench: Bench) -> dict[str, Any]:
    """The same requests of the server with the small pool and of the one that holds all, in turn."""
    args, rng = bench.args, np.random.default_rng(bench.args.seed)
    shares = 1.0 / np.arange(1, args.adapters + 1) ** ZIPF
    places = rng.permutation(args.adapters)[
        rng.choice(args.adapters, args.rounds * args.requests, p=shares / shares.sum())
    ]
    asked = list(dict.fromkeys(places.tolist()))
    for server in (bench.small, bench.whole):
        bench.touch(server, asked)
    rounds = []
    for number in range(args.rounds):
        asks = [bench.ask(int(p)) for p in places[number * args.requests :][: args.requests]]
        order = ("small", "whole") if number % 2 == 0 else ("whole", "small")
        rounds.append({name: bench.run(getattr(bench, name), asks, CLIENTS) for name in order})
        print(f"warm requests: round {number + 1} of {args.rounds}", flush=True)
    return _compare_warm(rounds) | {"distinct_adapters_asked": len(asked)}


def _compare_warm(rounds: Sequence[dict[str, Load]]) -> dict[str, Any]:
    """Answers of the small pool that were warm there, and the same requests of the whole one."""
    ratios, small, whole = [], [], []
    for loads in rounds:
        mine = [a for a in loads["small"].answers if a.error is None and not a.is_cold]
        other = [a for a in loads["whole"].answers if a.error is None]
        ratios.append(percentile([a.tpot_s for a in mine], 0.99) / percentile([a.tpot_s for a in other], 0.99))
        small, whole = small + mine, whole + other
    answers = [a for loads in rounds for a in loads["small"].answers]
    return {
        "requests": len(answers),
        "failed": sum(len(load.failed) for loads in rounds for load in loads.values()),
        "cold_share": sum(a.is_cold for a in answers) / len(answers),
        "cold_share_whole_pool": statistics.fmean(a.is_cold for loads in rounds for a in loads["whole"].answers),
        "most_resident": max(loads["small"].most for loads in rounds),
        "requests_s": {
            name: sum(len(r[name].answers) for r in rounds) / sum(r[name].seconds for r in rounds) for name in rounds[0]
        },
        "tpot_ms": {"small, warm": _spread(small, "tpot_s"), "whole": _spread(whole, "tpot_s")},
        "tpot_ms_cold": _spread([a for a in answers if a.error is None and a.is_cold], "tpot_s"),
        "first_token_ms": {
            "small, warm": _spread(small, "ttft_s"),
            "small, cold": _spread([a for a in answers if a.error is None and a.is_cold], "ttft_s"),
            "whole": _spread(whole, "ttft_s"),
        },
        "tpot_p99_over_whole": {
            "median_of_rounds": statistics.median(ratios),
            "rounds": ratios,
            "all_rounds_together": percentile([a.tpot_s for a in small], 0.99)
            / percentile([a.tpot_s for a in whole], 0.99),
        },
    }


def _spread(answers: Sequence[Answer], key: str) -> dict[str, float]:
    values = [1e3 * float(getattr(answer, key)) for answer in answers]
    if not values:
        return {"count": 0}
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {"count": len(values), **{name: percentile(values, share) for name, share in shares.items()}}


# ---------------------------------------------------------------------- no cliff
def measure_cliff(bench: Bench, rate: float) -> dict[str, Any]:
    """First-token times at `rate` requests a second on as many adapters as fit, and on 8 times as many."""
    args, rng = bench.args, np.random.default_rng(bench.args.seed + 1)
    at = np.cumsum(rng.exponential(1 / rate, args.arrivals)).tolist()
    few, many = args.slots, TIMES_SLOTS * args.slots
    bench.touch(bench.small, range(many))
    runs: dict[int, list[Load]] = {few: [], many: []}
    for number in range(args.rounds):
        for count in (few, many) if number % 2 == 0 else (many, few):
            bench.touch(bench.small, range(few))
            places = rng.integers(count, size=args.arrivals)
            asks = [bench.ask(int(place), at_s) for place, at_s in zip(places, at, strict=True)]
            runs[count].append(bench.run(bench.small, asks, None))
        print(f"no cliff: round {number + 1} of {args.rounds}", flush=True)
    medians = {count: [_median_first(load) for load in loads] for count, loads in runs.items()}
    return {
        "requests_s": rate,
        "arrivals": args.arrivals,
        "failed": sum(len(load.failed) for loads in runs.values() for load in loads),
        "most_resident": {str(count): max(load.most for load in loads) for count, loads in runs.items()},
        "cold_share": {
            str(count): statistics.fmean(a.is_cold for load in loads for a in load.answers)
            for count, loads in runs.items()
        },
        "first_token_ms": {
            str(count): _spread([a for load in loads for a in load.answers if a.error is None], "ttft_s")
            for count, loads in runs.items()
        },
        "median_first_token_over": {
            "median_of_rounds": statistics.median(b / a for a, b in zip(medians[few], medians[many], strict=True)),
            "rounds": [b / a for a, b in zip(medians[few], medians[many], strict=True)],
        },
    }


def _median_first(load: Load) -> float:
    return statistics.median(answer.ttft_s for answer in load.answers if answer.error is None)


# ---------------------------------------------------------------------- options
def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kept = platformdirs.user_cache_path("loraplex") / "bench-many-adapters"
    parser.add_argument("--data", type=Path, default=kept, help="directory of the registry (%(default)s)")
    parser.add_argument("--adapters", type=int, default=2000, help="registered (%(default)s)")
    parser.add_argument(
        "--slots", type=int, default=32, help="adapters beside which no other is in use, at first (%(default)s)"
    )
    parser.add_argument(
        "--pages", type=int, default=320, help="of the small pool: about 64 of the adapters, or KV (%(default)s)"
    )
    parser.add_argument("--all-pages", type=int, default=14_000, help="of the whole pool (%(default)s)")
    parser.add_argument("--host-memory", default="12G", help="of each server, for adapters (%(default)s)")
    parser.add_argument("--requests", type=int, default=200, help="of a round, closed loop (%(default)s)")
    parser.add_argument("--arrivals", type=int, default=120, help="of a round, open loop (%(default)s)")
    parser.add_argument("--load", type=float, default=0.5, help="of the closed loop's rate, open loop (%(default)s)")
    parser.add_argument("--prompt-len", type=int, default=32, help="tokens (%(default)s)")
    parser.add_argument("--output-len", type=int, default=24, help="mean tokens (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    args.spec = FleetSpec(args.adapters, 16, (4, 8, 16))
    return args


def show(result: dict[str, Any]) -> None:
    warm, cliff = result["warm"], result["cliff"]
    tpot, first = warm["tpot_ms"], warm["first_token_ms"]
    print(
        f"{warm['requests']} requests, {warm['failed']} failed; {warm['cold_share']:.0%} cold, at most "
        f"{warm['most_resident']:g} adapters in the small pool\n"
        f"TPOT p99 of warm requests {tpot['small, warm']['p99']:.1f} ms, whole pool {tpot['whole']['p99']:.1f}: "
        f"{warm['tpot_p99_over_whole']['median_of_rounds']:.3f} (rounds together "
        f"{warm['tpot_p99_over_whole']['all_rounds_together']:.3f})\n"
        f"first token p50 {first['small, warm']['p50']:.0f} ms warm, {first['small, cold'].get('p50', 0):.0f} cold, "
        f"{first['whole']['p50']:.0f} whole pool\n"
        f"at {cliff['requests_s']:.1f} requests a second, {cliff['failed']} failed, first token p50 by adapters: "
        + ", ".join(f"{count}: {one['p50']:.0f} ms" for count, one in cliff["first_token_ms"].items())
        + f"; ratio {cliff['median_first_token_over']['median_of_rounds']:.2f}",
        flush=True,
    )


def _environment() -> dict[str, Any]:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"date": time.strftime("%Y-%m-%d"), "commit": done.stdout.strip(), **hardware(), "versions": versions}


def main() -> None:
    args = read_options()
    base = ensure_demo_base(platformdirs.user_cache_path("loraplex") / DEMO_NAME.lower(), lambda done, total: None)
    print(f"registry of {args.adapters} adapters in {args.data}", flush=True)
    made = make_registry(args.data, args.spec, describe(base, DEMO_NAME))
    print("made" if made else "it was there", flush=True)
    options = {key: str(value).replace(str(Path.home()), "~") for key, value in vars(args).items()}
    result: dict[str, Any] = {**_environment(), "options": options, "bars": BARS}
    with tempfile.TemporaryDirectory(prefix="loraplex-many-") as folder:
        bench = Bench(args, base, Path(folder), make_keys(args.data, args.spec))
        try:
            result["warm"] = measure_warm(bench)
            result["cliff"] = measure_cliff(bench, args.load * result["warm"]["requests_s"]["small"])
        finally:
            bench.stop()
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


if __name__ == "__main__":
    main()
