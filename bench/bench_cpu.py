"""Throughput on two cores: SmolLM2-135M-Instruct in bfloat16, 16 requests of 64 prompt and 64 output tokens.

No adapter, one adapter (rank 16, all projections) and 16 distinct adapters (ranks 4, 8, 16, 32, 64 in turn, all seven
projections, random weights), beside PEFT in the same run: `__base__` rows, `set_adapter`, and mixed `adapter_names`.
Variants take turns; figures are medians. The last line of output is one JSON object.

Usage: python bench/bench_cpu.py [--rounds 3] [--no-peft] [--out FILE]
"""

import argparse
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loraplex import LLM, LoRARequest, SamplingParams  # isort: skip  (before torch: sets how OpenMP threads wait)

import platformdirs
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from loraplex.model import list_sites, read_config
from loraplex.model.gguf_import import DEMO_NAME, ensure_demo_base

NUM_REQUESTS, PROMPT_LEN, OUTPUT_LEN = 16, 64, 64
RANKS = (4, 8, 16, 32, 64)
MIXED_RANKS = tuple(RANKS[i % len(RANKS)] for i in range(NUM_REQUESTS))
PARAMS = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=OUTPUT_LEN, temperature=1.0, top_p=0.95, seed=0, ignore_eos=True)
LONG_PROMPT_LEN = 4000


def write_adapter(directory: Path, base: Path, rank: int, seed: int) -> None:
    """A PEFT directory with random A and B for all seven projections."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    sites = list_sites(read_config(base))
    tensors = {}
    for site in sites:
        prefix = f"base_model.model.{site.name}"
        a = torch.randn(rank, site.d_in, generator=generator) * site.d_in**-0.5
        b = torch.randn(site.d_out, rank, generator=generator) * 0.02
        tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"] = a.bfloat16(), b.bfloat16()
    save_file(tensors, str(directory / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": DEMO_NAME,
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({site.module for site in sites}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))


def make_prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(1000, 40000) for _ in range(PROMPT_LEN)] for _ in range(NUM_REQUESTS)]


class Ours:
    """The engine, offline."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.llm = LLM(base, dtype="bfloat16", memory_bytes=800 * 2**20, max_loras=NUM_REQUESTS)
        self.one = LoRARequest("one", 1, str(folder / "one"))
        self.mixed = [LoRARequest(f"mixed{i}", i, str(folder / f"mixed{i}")) for i in range(NUM_REQUESTS)]
        self.prompts = make_prompts()

    def run(self, lora: Any, params: SamplingParams = PARAMS) -> float:
        """Output tokens per second."""
        started = time.perf_counter()
        outputs = self.llm.generate(self.prompts, params, lora)
        seconds = time.perf_counter() - started
        assert all(len(one.outputs[0].token_ids) == OUTPUT_LEN for one in outputs)
        return NUM_REQUESTS * OUTPUT_LEN / seconds

    def long_prefill(self) -> float:
        """Prompt tokens per second of one long prompt, to its first token."""
        rng = random.Random(1)
        prompt = [rng.randrange(1000, 40000) for _ in range(LONG_PROMPT_LEN)]
        started = time.perf_counter()
        self.llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0))
        return LONG_PROMPT_LEN / (time.perf_counter() - started)

    def single_stream_tpot_ms(self) -> float:
        """Milliseconds a token of one request alone, after its first."""
        engine = self.llm.engine
        engine.add_request(self.llm._request(self.prompts[0], PARAMS, None), time.monotonic())
        engine.step(time.monotonic())
        started = time.perf_counter()
        while engine.has_work:
            engine.step(time.monotonic())
        return 1e3 * (time.perf_counter() - started) / (OUTPUT_LEN - 1)


class Peft:
    """PEFT on transformers, the baseline."""

    def __init__(self, base: Path, folder: Path) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        self.model = PeftModel.from_pretrained(model, str(folder / "one"), adapter_name="one")
        for i in range(NUM_REQUESTS):
            self.model.load_adapter(str(folder / f"mixed{i}"), adapter_name=f"mixed{i}")
        self.model.eval()
        self.prompts = torch.tensor(make_prompts())

    def run(self, names: list[str] | None) -> float:
        """Output tokens per second; None runs the adapter that is set."""
        extra = {"adapter_names": names} if names else {}
        started = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=self.prompts,
                attention_mask=torch.ones_like(self.prompts),
                max_new_tokens=OUTPUT_LEN,
                min_new_tokens=OUTPUT_LEN,
                do_sample=False,
                pad_token_id=0,
                **extra,
            )
        seconds = time.perf_counter() - started
        assert out.shape[1] == PROMPT_LEN + OUTPUT_LEN
        return NUM_REQUESTS * OUTPUT_LEN / seconds


def startup_seconds(base: Path, folder: Path) -> float:
    """From `loraplex serve` with 16 adapters to its first answer, everything on disk."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    modules = [f"mixed{i}={folder / f'mixed{i}'}" for i in range(NUM_REQUESTS)]
    command = [str(Path(sys.executable).with_name("loraplex")), "serve", str(base), "--port", str(port)]
    started = time.perf_counter()
    process = subprocess.Popen([*command, "--lora-modules", *modules], stderr=subprocess.DEVNULL)
    try:
        body = json.dumps({"model": "mixed3", "prompt": "Hello", "max_tokens": 1}).encode()
        url = f"http://127.0.0.1:{port}/v1/completions"
        while True:
            try:
                request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=60):
                    return time.perf_counter() - started
            except OSError:
                assert process.poll() is None, "the server ended"
                assert time.perf_counter() - started < 120, "no answer in 120 s"
                time.sleep(0.02)
    finally:
        process.terminate()
        process.wait()


def byte_model(base: Path) -> dict[str, float]:
    """Bytes of weights a decode step reads, and what they say of the throughput with 16 distinct adapters."""
    config = read_config(base)
    sites = list_sites(config)
    per_rank = 2 * sum(site.d_in + site.d_out for site in sites)
    base_bytes = 2 * (sum(site.d_in * site.d_out for site in sites) + config.vocab_size * config.hidden_size)
    adapter_bytes = per_rank * sum(MIXED_RANKS)
    return {
        "base_bytes": base_bytes,
        "adapter_bytes": adapter_bytes,
        "byte_model_distinct16_ratio": base_bytes / (base_bytes + adapter_bytes),
    }


def measure(rounds: int, variants: dict[str, Callable[[], float]], console: Console) -> dict[str, list[float]]:
    """Each variant once to warm up, then once a round, taking turns."""
    for run in variants.values():
        run()
    results: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        for name, run in variants.items():
            results[name].append(run())
        console.print(f"round {number + 1} of {rounds} done", style="dim")
    return results


def bars(figures: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(what, measured, bar); the last two are ceilings."""
    model = figures["byte_model_distinct16_ratio"]
    rows = [("16 distinct over no adapter, share of the byte model", figures["distinct16_share_of_byte_model"], 0.8)]
    if "peft_base_tok_s" in figures:
        rows += [
            ("no adapter over PEFT __base__", figures["base_tok_s"] / figures["peft_base_tok_s"], 2.2),
            ("one adapter over PEFT", figures["one_tok_s"] / figures["peft_one_tok_s"], 2.2),
            ("16 distinct over PEFT mixed", figures["distinct16_tok_s"] / figures["peft_distinct16_tok_s"], 4.0),
        ]
    assert 0 < model < 1
    return [
        *rows,
        ("one request alone, ms a token", figures["single_stream_tpot_ms"], 25.0),
        ("start to first answer, s", figures["startup_s"], 10.0),
    ]


def show(console: Console, results: dict[str, list[float]], figures: dict[str, Any]) -> None:
    table = Table(title=f"{DEMO_NAME}, bfloat16, {torch.get_num_threads()} threads: output tokens per second")
    for column in ("", "loraplex", "spread", "PEFT", "spread", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for label, key in (
        ("no adapter", "base"),
        ("1 adapter, rank 16", "one"),
        ("16 distinct, ranks 4..64", "distinct16"),
    ):
        ours, peft = results[key], results.get(f"peft_{key}")
        row = [label, f"{statistics.median(ours):.1f}", f"{min(ours):.0f}..{max(ours):.0f}"]
        if peft:
            ratio = statistics.median(ours) / statistics.median(peft)
            row += [f"{statistics.median(peft):.1f}", f"{min(peft):.1f}..{max(peft):.1f}", f"{ratio:.2f}"]
        table.add_row(*row)
    console.print(table)
    checks = Table(title="Bars")
    for column in ("", "measured", "bar", ""):
        checks.add_column(column, justify="right" if column in ("measured", "bar") else "left")
    for what, value, bar in bars(figures):
        is_ceiling = bar in (25.0, 10.0)
        met = value <= bar if is_ceiling else value >= bar
        checks.add_row(what, f"{value:.2f}", f"{'<=' if is_ceiling else '>='} {bar:g}", "met" if met else "MISSED")
    console.print(checks)
    console.print(
        f"byte model: 16 distinct at {figures['byte_model_distinct16_ratio']:.3f} of no adapter; "
        f"measured {figures['distinct16_over_base']:.3f}\n"
        f"no adapter, temperature 1 and top-p 0.95: {figures['base_sampled_tok_s']:.0f} tokens/s; a prompt of "
        f"{LONG_PROMPT_LEN} tokens: {figures['long_prefill_tok_s']:.0f} prompt tokens/s",
        highlight=False,
    )


def environment(load_before: float, rounds: int) -> dict[str, Any]:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("peft", "transformers"):
        module = sys.modules.get(name)
        if module is not None:
            versions[name] = module.__version__
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "command": f"python bench/bench_cpu.py --rounds {rounds}",
        "cpu": cpu.split(":")[-1].strip(),
        "threads": torch.get_num_threads(),
        "load_before": load_before,
        "versions": versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peft", action="store_true", help="skip the baseline")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    console = Console(stderr=False)
    load_before = os.getloadavg()[0]
    base = ensure_demo_base(platformdirs.user_cache_path("loraplex") / DEMO_NAME.lower())
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_adapter(folder / "one", base, 16, seed=100)
        for i, rank in enumerate(MIXED_RANKS):
            write_adapter(folder / f"mixed{i}", base, rank, seed=i)
        startup_s = min(startup_seconds(base, folder) for _ in range(2))
        ours = Ours(base, folder)
        variants: dict[str, Callable[[], float]] = {
            "base": lambda: ours.run(None),
            "one": lambda: ours.run(ours.one),
            "distinct16": lambda: ours.run(ours.mixed),
            "base_sampled": lambda: ours.run(None, SAMPLED),
            "long_prefill": ours.long_prefill,
            "single_stream_tpot_ms": ours.single_stream_tpot_ms,
        }
        if not args.no_peft:
            peft = Peft(base, folder)
            names = [f"mixed{i}" for i in range(NUM_REQUESTS)]
            variants["peft_base"] = lambda: peft.run(["__base__"] * NUM_REQUESTS)
            variants["peft_one"] = lambda: (peft.model.set_adapter("one"), peft.run(None))[1]
            variants["peft_distinct16"] = lambda: peft.run(names)
        results = measure(args.rounds, variants, console)
    medians = {name: statistics.median(values) for name, values in results.items()}
    figures: dict[str, Any] = {
        **{f"{name}_tok_s": value for name, value in medians.items() if name != "single_stream_tpot_ms"},
        "single_stream_tpot_ms": medians["single_stream_tpot_ms"],
        "startup_s": startup_s,
        **byte_model(base),
    }
    figures["distinct16_over_base"] = figures["distinct16_tok_s"] / figures["base_tok_s"]
    figures["distinct16_share_of_byte_model"] = figures["distinct16_over_base"] / figures["byte_model_distinct16_ratio"]
    figures |= {"rounds": results, "kernels": ours.llm.engine._decoder.ops.name}
    figures |= environment(load_before, args.rounds)
    show(console, results, figures)
    line = json.dumps(figures)
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(line)


if __name__ == "__main__":
    main()
