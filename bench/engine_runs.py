"""What the GPU benchmarks share: start an engine, run a fixed batch through it, describe the machine, keep results."""

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from llama8b import LLAMA8B, TINY, Shape, make_adapter, make_base, make_buffers
from loraplex.core import AdapterRef, Request, RequestId, SamplingParams
from loraplex.engine import Engine, EngineConfig, RequestFailed, load_base
from loraplex.model.checkpoint import FINGERPRINT_CACHE

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
POOL_SHARE = 0.92  # of the GPU's memory for base, workspace and pool: the reserve of BENCH.md 3.6
PACKED_PER_RANK = 2  # adapters with page images of their own in host memory
_started_at = time.perf_counter()
_ids = itertools.count()


def say(text: str) -> None:
    """A line of progress."""
    print(f"[{time.perf_counter() - _started_at:6.1f} s] {text}", flush=True)


# ---------------------------------------------------------------------- figures
@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of one thing."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(tuple(values))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def range(self) -> float:
        """Largest less smallest."""
        return max(self.values) - min(self.values)

    def as_json(self) -> dict[str, Any]:
        return {"median": self.median, "range": self.range, "values": list(self.values)}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, the first column to the left and the others to the right."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=max(100, 14 * len(columns)), highlight=False).print(table)
    sys.stdout.flush()


# ---------------------------------------------------------------------- engine
def shape_of(args: argparse.Namespace) -> Shape:
    """Llama-3-8B's, unless the benchmark has another."""
    shape: Shape = getattr(args, "shape", LLAMA8B)
    return TINY if args.tiny else shape


def prepare_base(args: argparse.Namespace) -> Path:
    """The base's directory, written first if it is not there."""
    shape = shape_of(args)
    default = Path(tempfile.gettempdir()) / f"loraplex-{shape.name.lower()}"
    directory: Path = args.base or default
    args.base = directory
    say(f"base of {shape.name} shapes in {directory}")
    seconds = make_base(directory, shape)
    args.base_written_s = round(seconds, 1)
    say(f"written in {seconds:.1f} s" if seconds else "it was there")
    return directory


def engine_settings(args: argparse.Namespace, **extra: Any) -> dict[str, Any]:
    """Settings of the engine; None in `extra` leaves a default."""
    device = args.device or ("cpu" if args.tiny else "auto")
    settings: dict[str, Any] = {"dtype": "bfloat16", "device": device, "max_loras": args.batch}
    settings |= {"memory_bytes": 256 * 2**20} if args.tiny else {"gpu_memory_utilization": POOL_SHARE}
    settings |= {name: value for name, value in extra.items() if value is not None}
    return settings


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds of a start. `weights_s`: config, tokenizer and all layers; `fingerprint_s`: from then to the loaded base;
    `pool_s`: scheduler, pool, and what comes before the first graph is done; `capture_s`: the other graphs."""

    import_s: float  # from the start of this process until the engine was imported
    weights_s: float
    fingerprint_s: float
    pool_s: float
    capture_s: float
    num_graphs: int
    fingerprint_was_cached: bool
    kernel_cache_files: dict[str, int]  # in each compiler's cache before: with none it had to compile

    @property
    def seconds(self) -> float:
        """The whole, imports and capture included."""
        return self.import_s + self.weights_s + self.fingerprint_s + self.pool_s + self.capture_s

    def as_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, **asdict(self)}


def _process_age() -> float:
    """Seconds since this process started."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


IMPORT_S = _process_age()


def _kernel_caches() -> dict[str, int]:
    home = Path.home()
    folders = {
        "triton": Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache")),
        "flashinfer": Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", home)) / ".cache" / "flashinfer",
    }
    return {name: sum(path.is_file() for path in folder.rglob("*")) for name, folder in folders.items()}


def start_engine(
    directory: Path, settings: Mapping[str, Any], *, cold_fingerprint: bool = False
) -> tuple[Engine, Start]:
    """Load the base and capture every graph, with times. `cold_fingerprint` has the weights hashed again."""
    cache = directory / FINGERPRINT_CACHE
    if cold_fingerprint:
        cache.unlink(missing_ok=True)
    was_cached, caches = cache.exists(), _kernel_caches()
    stamps = [time.perf_counter()]
    layers: list[float] = []
    loaded = load_base(
        directory, EngineConfig(**settings), progress=lambda done, total: layers.append(time.perf_counter())
    )
    stamps += [layers[-1], time.perf_counter()]
    graphs: list[float] = []
    engine = Engine(loaded, progress=lambda done, total: graphs.append(time.perf_counter()))
    end = time.perf_counter()
    stamps += [graphs[0] if graphs else end, end]
    steps = [after - before for before, after in itertools.pairwise(stamps)]
    start = Start(IMPORT_S, steps[0], steps[1], steps[2], steps[3], len(graphs), was_cached, caches)
    say(
        f"{loaded.kernels}: started in {start.seconds:.1f} s (imports {start.import_s:.1f}, weights "
        f"{start.weights_s:.1f}, fingerprint {start.fingerprint_s:.1f}, pool and first graph {start.pool_s:.1f}, "
        f"other graphs {start.capture_s:.1f})"
    )
    say(f"{loaded.geometry.num_pages} pages of {loaded.geometry.page_bytes / 2**20:g} MiB, {len(graphs)} graphs")
    if loaded.note:
        say(f"note: {loaded.note}")
    return engine, start


class Adapters:
    """Random adapters of one engine by rank. Of each rank the first few are packed; the others share their page images
    in host memory (1000 adapters would not fit), but each has its own pages in the pool."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.buffers = make_buffers(engine.base.sites)
        self._refs: dict[int, list[AdapterRef]] = {}

    def take(self, rank: int, count: int) -> list[AdapterRef]:
        """The first `count` adapters of a rank, on all linears; made when first asked for."""
        refs = self._refs.setdefault(rank, [])
        while len(refs) < count:
            refs.append(self._make(rank, refs))
        return refs[:count]

    def _make(self, rank: int, before: list[AdapterRef]) -> AdapterRef:
        number, sites = len(before), self._engine.base.sites
        adapter = make_adapter(sites, rank, 1000 * rank + number, self.buffers)
        if number < PACKED_PER_RANK:
            self._engine.add_adapter(adapter)
        else:
            packed = self._engine.shelf.packed
            packed[adapter.digest] = packed[before[number % PACKED_PER_RANK].digest]
        return AdapterRef(f"r{rank}-{number}", 1, adapter.digest)


def spread_over(refs: Sequence[AdapterRef], batch: int) -> list[AdapterRef | None]:
    """An adapter for each of `batch` requests, in turn; none of them where there are none."""
    return [refs[i % len(refs)] if refs else None for i in range(batch)]


def make_requests(
    adapters: Sequence[AdapterRef | None], prompt_len: int, output_len: int, vocab: int, seed: int = 0
) -> list[Request]:
    """A greedy request of fixed lengths for each adapter."""
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    return [
        Request(
            RequestId(f"bench-{next(_ids)}"), tuple(rng.randrange(vocab) for _ in range(prompt_len)), params, adapter
        )
        for adapter in adapters
    ]


@dataclass(frozen=True, slots=True)
class BatchTiming:
    """One batch from the first step to the last. Decode steps are those in which every request gained a token."""

    tpot_ms: float  # from the first decode step's tokens to the last one's, over the steps between
    step_ms: tuple[float, ...]  # each of those
    request_tpot_ms: float  # (last - first token) / (tokens - 1), mean over requests: as servers are measured
    first_token_s: float  # until every request had one
    seconds: float
    num_loads: int  # adapters that were brought in


def run_batch(engine: Engine, requests: Sequence[Request]) -> BatchTiming:
    """Run requests as one batch. They must all fit."""
    assert not engine.scheduler.sequences
    before = engine.stats()
    if engine._decoder.device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for request in requests:
        engine.add_request(request, time.monotonic())
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    full: list[float] = []
    while engine.has_work:
        results = engine.step(time.monotonic())
        now = time.perf_counter()
        for result in results:
            if isinstance(result, RequestFailed):
                raise result.error
            first.setdefault(result.request_id, now)
            last[result.request_id] = now
        if len(results) == len(requests):
            full.append(now)
    after = engine.stats()
    assert after.num_preemptions == before.num_preemptions, "the batch did not fit in the pool"
    assert len(full) > 2 or max(r.params.max_tokens or 0 for r in requests) < 4, "the batch never ran as one"
    steps = [1e3 * (b - a) for a, b in itertools.pairwise(full)]
    spans = [(last[r.request_id] - first[r.request_id]) / max(1, (r.params.max_tokens or 2) - 1) for r in requests]
    return BatchTiming(
        tpot_ms=sum(steps) / max(1, len(steps)),
        step_ms=tuple(steps),
        request_tpot_ms=1e3 * statistics.fmean(spans),
        first_token_s=max(first.values()) - started,
        seconds=max(last.values()) - started,
        num_loads=after.num_adapter_loads - before.num_adapter_loads,
    )


def interleave(rounds: int, variants: Mapping[str, Callable[[], BatchTiming]]) -> dict[str, list[BatchTiming]]:
    """Run each variant once to warm up, then once a round, taking turns so that drift shows in all."""
    timings: dict[str, list[BatchTiming]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, run in variants.items():
            timing = run()
            if number:
                assert timing.num_loads == 0, f"{name}: adapters were loaded in a timed run"
                timings[name].append(timing)
        line = "  ".join(f"{name}: {runs[-1].tpot_ms:.3f}" for name, runs in timings.items() if runs)
        say(f"round {number} of {rounds}, ms a token  {line}" if number else "warmed up")
    return timings


# ---------------------------------------------------------------------- machine and files
def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _version(name: str, module: str) -> str | None:
    """Of an installed package, or of a module that was imported from elsewhere."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return getattr(sys.modules.get(module), "__version__", None)


def environment() -> dict[str, Any]:
    """Hardware, versions, commit, command line and date. LORAPLEX_COMMIT stands for the commit where git is not."""
    has_gpu = torch.cuda.is_available()
    query = "clocks.sm,clocks.mem,temperature.gpu,power.draw,driver_version"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("LORAPLEX_COMMIT") or _run("git", "describe", "--always", "--dirty"),
        "command": " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if has_gpu else "cpu",
        "device_memory_bytes": torch.cuda.get_device_properties(0).total_memory if has_gpu else None,
        "nvidia_smi": {query: _run("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")} if has_gpu else {},
        "cpu_cores": len(os.sched_getaffinity(0)),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": _version("triton", "triton"),
            "flashinfer": _version("flashinfer-python", "flashinfer"),
        },
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that every GPU benchmark has."""
    parser.add_argument("--base", type=Path, help="directory of the base; written if it is not there")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the script: no figures")
    parser.add_argument("--device", help="the engine's (auto, or cpu with --tiny)")
    parser.add_argument("--batch", type=int, default=64, help="requests in a batch (%(default)s)")
    parser.add_argument("--prompt-len", type=int, default=64, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of an answer (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds (%(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file or folder instead of bench/results (none with --tiny)")


def result_path(args: argparse.Namespace, name: str) -> Path | None:
    """Where results go: --out, or bench/results by name and date; None for tiny runs without --out."""
    device = "h200" if torch.cuda.is_available() and "H200" in torch.cuda.get_device_name() else "gpu"
    file = f"{'tiny' if args.tiny else device}_{name}_{time.strftime('%Y-%m-%d')}.json"
    if args.out is None:
        return None if args.tiny else RESULTS / file
    out: Path = args.out
    return out if out.suffix == ".json" else out / file


class Report:
    """Results as they come: written after each section, so that a later failure loses nothing."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        shape = shape_of(args)
        self.path = result_path(args, name)
        self.failed: list[str] = []
        self.result: dict[str, Any] = {
            "weights": f"random, {shape.name} shapes, bfloat16; adapters on all seven linears, distinct in the pool, "
            "their host images partly shared",
            **environment(),
            "options": {key: str(value) for key, value in vars(args).items() if value is not None},
        }

    def add(self, name: str, section: Callable[[], Any]) -> None:
        """Run a section and keep what it returns; a failure is noted and the next section runs."""
        say(f"section {name}")
        try:
            self.result[name] = section()
        except Exception as error:
            traceback.print_exc()
            self.failed.append(name)
            self.result[name] = {"error": f"{type(error).__name__}: {error}"}
        self.write()

    def write(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.result, indent=1) + "\n")

    def finish(self) -> None:
        """Say where results are; ends the process with an error where a section failed."""
        if self.path is not None:
            say(f"results in {self.path}")
        if self.failed:
            sys.exit(f"failed: {', '.join(self.failed)}")
