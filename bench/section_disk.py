"""The first token of requests whose adapter is on disk alone, packed, beside those whose adapter is warm (BENCH.md P5).

On an idle engine: the file is read into pinned pages and copied into the pool, then the prompt runs. As the operating
system has the files, and with its page cache asked to let them go.
"""

import argparse
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from engine_runs import show_table
from logical_adapters import Fleet
from loraplex.core import AdapterRef
from loraplex.engine import Engine
from loraplex.engine.packed_files import PackedFiles
from open_loop import apart_ms, make_request, random_prompt, spread_ms, touch

RANKS = (4, 8, 16, 32)
MAX_BYTES = 64 * 2**30


@contextmanager
def _packed_files(engine: Engine, refs: Sequence[AdapterRef]) -> Iterator[Path]:
    """The directory in which these adapters lie, and where the engine looks for them meanwhile."""
    with tempfile.TemporaryDirectory() as name:
        directory, before = Path(name), engine.shelf._files
        engine.shelf._files = PackedFiles(directory, MAX_BYTES, "bench")
        try:
            for ref in refs:
                engine.store_adapter(ref.digest)
            yield directory
        finally:
            engine.shelf._files = before


def _leave_page_cache(directory: Path) -> None:
    for path in directory.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _first_token(engine: Engine, ref: AdapterRef, prompt: list[int]) -> tuple[float, float]:
    """Seconds until the first token, and those that reading the file took of them."""
    began_s = time.perf_counter()
    engine.restore_adapter(ref.digest)
    read_s = time.perf_counter() - began_s
    engine.add_request(make_request(prompt, 1, ref), time.monotonic())
    while not engine.step(time.monotonic()):
        pass
    seconds = time.perf_counter() - began_s
    while engine.has_work:
        engine.step(time.monotonic())
    return seconds, read_s


def _from_disk(fleet: Fleet, ref: AdapterRef, prompt: list[int]) -> tuple[float, float]:
    """The first token with an adapter that is in the file only. Its image in host memory is many adapters' here."""
    engine, shared = fleet.engine, fleet.engine.shelf.packed.pop(ref.digest)
    engine.scheduler.residency.evict(ref.digest)
    try:
        times = _first_token(engine, ref, prompt)
        restored = engine.shelf.packed[ref.digest]
        assert restored is not shared and restored.num_pages == shared.num_pages
        restored.image.free()
    finally:
        engine.shelf.packed[ref.digest] = shared
    return times


def measure_disk(fleet: Fleet, args: argparse.Namespace) -> dict[str, Any]:
    """Adapters of small ranks, each once as the page cache has it, once without it, and once warm."""
    rng, vocab = random.Random(args.seed), fleet.engine.base.vocab_size
    refs = fleet.of_ranks([RANKS[i % len(RANKS)] for i in range(args.probes)])
    touch(fleet.engine, refs)
    times: dict[str, list[tuple[float, float]]] = {"page cache": [], "disk": [], "warm": []}
    with _packed_files(fleet.engine, refs) as directory:
        for name, taken in times.items():
            if name == "disk":
                _leave_page_cache(directory)
            for ref in refs:
                prompt = random_prompt(rng, args.probe_prompt, vocab)
                is_warm = name == "warm"
                taken.append(_first_token(fleet.engine, ref, prompt) if is_warm else _from_disk(fleet, ref, prompt))
    return {"probes": len(refs)} | _figures(fleet, refs, times)


def _figures(fleet: Fleet, refs: list[AdapterRef], times: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    page_bytes = fleet.engine._geometry.page_bytes
    num_bytes = sum(fleet.adapters.num_pages(ref) for ref in refs) * page_bytes
    warm = [first_s for first_s, _ in times["warm"]]
    figures: dict[str, Any] = {"warm_ms": spread_ms(warm)}
    for name in ("page cache", "disk"):
        cold, read = [first_s for first_s, _ in times[name]], [read_s for _, read_s in times[name]]
        ranked = [(seconds, fleet.rank(ref)) for seconds, ref in zip(cold, refs, strict=True)]
        figures[name] = {
            "first_token_ms": spread_ms(cold),
            **apart_ms(cold, warm),
            "read_gb_s": num_bytes / sum(read) / 1e9,
            "by_rank_ms": {
                str(rank): 1e3 * (median(seconds for seconds, own in ranked if own == rank) - median(warm))
                for rank in RANKS
            },
        }
    return figures


def show_disk(section: dict[str, Any]) -> None:
    rows = [
        [
            name,
            f"{section['warm_ms']['p50']:.2f}",
            f"{one['first_token_ms']['p50']:.2f}",
            *(f"{one[key]:+.2f}" for key in ("p50_ms", "p99_ms")),
            f"{one['read_gb_s']:.2f}",
            "  ".join(f"{rank}: {ms:+.2f}" for rank, ms in one["by_rank_ms"].items()),
        ]
        for name, one in section.items()
        if name in ("page cache", "disk")
    ]
    columns = ("files in", "warm p50", "cold p50", "p50", "p99", "read GB/s", "p50 by rank")
    show_table(f"First token with adapters on disk, ms; {section['probes']} of each, cold less warm", columns, rows)
