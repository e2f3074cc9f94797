"""Join the newest results of the GPU benchmarks into bench/results/h200_summary.json, and print them as a table.

Figures are copied from the results named under `sources`; nothing is measured or set here. What no result has is left
out and said.

Usage: python bench/make_h200_summary.py [--results FOLDER] [--out FILE]
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
NAMES = ("lora_kernels", "decode_tax", "mixed_ranks", "offline", "cold_loads", "slora")
Json = Mapping[str, Any]


def newest(folder: Path, name: str) -> Path | None:
    """The result of a benchmark with the latest date in its name."""
    found = sorted(folder.glob(f"h200_{name}_*.json"), key=lambda path: (path.stem, path.stat().st_mtime))
    return found[-1] if found else None


def _section(result: Json | None, name: str) -> Json:
    """A section that was measured; empty where it was not, or failed."""
    section = (result or {}).get(name)
    return section if isinstance(section, Mapping) and "error" not in section else {}


def _medians(spreads: Json | None) -> dict[str, float]:
    return {name: one["median"] for name, one in (spreads or {}).items()}


def _arrangement(kernels: Json) -> dict[str, Any]:
    """Base products with LoRA beside them, over base products alone.

    Of the arrangement that the result names as the engine's, else of the one with the smallest mean, which is said.
    """
    if "overlapped_over_base" in kernels or "over_base" not in kernels:
        return {name: kernels.get(name) for name in ("overlapped_over_base", "overlapped_arrangement")}
    measured = kernels["over_base"]
    name, best = min(measured.items(), key=lambda item: sum(item[1].values()))
    return {"overlapped_over_base": best, "overlapped_arrangement": f"best of {len(measured)} measured: {name}"}


def _figures(results: Mapping[str, Json]) -> dict[str, Any]:
    kernels, decode = results.get("lora_kernels", {}), results.get("decode_tax")
    tax, mixes = _section(decode, "decode_tax"), _section(results.get("mixed_ranks"), "mixes")
    pair, offline = _section(results.get("mixed_ranks"), "pair"), _section(results.get("offline"), "offline")
    return {
        "lora_kernels_ms": kernels.get("lora_kernels_ms"),
        "decode_tpot_ms": _medians(tax.get("tpot_ms")),
        "decode_over_base": tax.get("over_base"),
        "decode_floor_ms": tax.get("floor_ms"),
        "decode_efficiency": tax.get("efficiency"),
        "base_matmul_ms": kernels.get("base_matmul_ms"),
        **_arrangement(kernels),
        "rank_unit_us": mixes.get("rank_unit_us"),
        "rank_fit_r2": mixes.get("rank_fit_r2"),
        "padded_over_production_lora_time": mixes.get("padded_over_production_lora_time"),
        "slowdown_beside_rank_128": pair.get("slowdown_beside_128_over_alone"),
        "resident_adapters": _section(decode, "resident").get("resident_adapters"),
        "rel_err": _section(decode, "rel_err").get("max"),
        "rel_err_torch_bfloat16": _section(decode, "rel_err").get("max_torch_bfloat16"),
        "rel_err_few_layers": _section(decode, "rel_err_cut").get("max"),
        "offline_tpot_over_base": offline.get("tpot_over_base"),
        "rank_fit_intercept_over_base": mixes.get("intercept_over_base"),
        "prefill_over_base": _section(decode, "prefill").get("over_base"),
        "startup_s": _section(decode, "startup").get("seconds"),
        "startup_parts_s": {k: v for k, v in _section(decode, "startup").items() if k.endswith("_s")},
        "offline_output_tok_s": _medians(offline.get("output_tok_s")),
    }


def _load_figures(result: Json | None) -> dict[str, Any]:
    """What cold adapters cost their own requests and the others, of the exponent of Zipf's law that was run first."""
    arrivals = next((_section(result, name) for name in result or () if name.startswith("arrivals_zipf")), {})
    ahead, synchronous = (arrivals.get("over_resident", {}).get(name, {}) for name in ("ahead", "synchronous"))
    probes, decode = _section(result, "probes"), _section(result, "decode")
    differences = ("p50_ms", "p99_ms", "mean_ms")

    def first_token(over: Json) -> dict[str, float]:
        return {key: over["cold"][key] for key in differences if key in over.get("cold", {})}

    return {
        "cold_ttft_ms": first_token(ahead),
        "cold_ttft_ms_synchronous": first_token(synchronous),
        "cold_ttft_ms_beside": {
            name: {key: one[key] for key in differences} for name, one in probes.get("beside", {}).items()
        },
        "latency_over_resident": {
            name: over["latency_over_resident"] for name, over in arrivals.get("over_resident", {}).items()
        },
        "hit_rate": arrivals.get("runs", {}).get("ahead", {}).get("hit_rate"),
        "tpot_under_loads": decode.get("tpot_p99_over"),
        "tokens_apart_under_loads": decode.get("between_tokens_p99_over"),
        "loads_s": {name: one["loads_s"] for name, one in decode.get("beside", {}).items()},
    }


def _slora_figures(result: Json | None) -> dict[str, Any]:
    """S-LoRA's table by run."""
    cases = {name: _section(result, name) for name in result or ()}
    cases = {name: one for name, one in cases.items() if "req_s" in one and "setting" in one}
    return {
        "slora_rps": {name: one["req_s"] for name, one in cases.items()},
        "slora_ttft_ms": {name: one["first_token_ms"]["mean"] for name, one in cases.items() if one["mode"] == "rate"},
        "slora_attainment": {name: one["attainment"] for name, one in cases.items() if "attainment" in one},
        "slora_over_fewest": (result or {}).get("over_fewest"),
    }


def make_summary(results: Mapping[str, Json]) -> dict[str, Any]:
    """The summary of results by name of the benchmark; `missing` lists the figures that none of them has."""
    figures = _figures(results) | _load_figures(results.get("cold_loads")) | _slora_figures(results.get("slora"))
    main = results.get("decode_tax") or next(iter(results.values()))
    return {
        **{name: value for name, value in figures.items() if value not in (None, {})},
        "missing": sorted(name for name, value in figures.items() if value in (None, {})),
        "hardware": {name: result.get("device") for name, result in results.items()},
        "versions": main.get("versions") or {key: main.get(key) for key in ("torch", "triton")},
        "commit": main.get("commit"),
        "commits": {name: result.get("commit") for name, result in results.items()},
        "dates": {name: result.get("date") for name, result in results.items()},
        "commands": {name: result.get("command") for name, result in results.items()},
        "weights": main.get("weights"),
    }


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show(summary: Json) -> None:
    for name, value in summary.items():
        is_table = isinstance(value, Mapping)
        shown = "  ".join(f"{key}: {_short(one)}" for key, one in value.items()) if is_table else _short(value)
        print(f"{name:34}{shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results (%(default)s)")
    parser.add_argument("--out", type=Path, help="file to write instead of h200_summary.json in that folder")
    args = parser.parse_args()
    paths = {name: path for name in NAMES if (path := newest(args.results, name)) is not None}
    if not paths:
        sys.exit(f"no h200_*.json in {args.results}")
    summary = make_summary({name: json.loads(path.read_text()) for name, path in paths.items()})
    summary["sources"] = {name: path.name for name, path in paths.items()}
    show(summary)
    out = args.out or args.results / "h200_summary.json"
    out.write_text(json.dumps(summary, indent=1) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
