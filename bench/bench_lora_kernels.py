"""LoRA kernels alone on Llama-3-8B shapes (BENCH.md P1): shrink and expand of 32 layers in one CUDA graph.

Batch 64, rank 16 on all seven projections, bfloat16, random weights scattered over a page pool of 64 adapters. Checks
against float64 first, times tile sizes for each fused linear (`--search`), then the whole with 1, 8, 32 and 64 distinct
adapters: alone, and beside the base products on a second stream in several arrangements. The last line of output is one
JSON object.

Usage: python bench/bench_lora_kernels.py [--search] [--out FILE]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

import loraplex  # noqa: F401  (before torch)
from loraplex.kernels import LoraBatch, LoraSite
from loraplex.kernels.gpu import (
    DECODE_ROWS,
    BoundLora,
    Tiles,
    WorkItems,
    choose_tiles,
    lora_delta,
    plan_items,
)
from loraplex.kernels.gpu.ops import CudaOps

LAYERS, HIDDEN, INNER, KV = 32, 4096, 14336, 1024
GROUPS: dict[str, tuple[int, tuple[int, ...]]] = {
    "qkv": (HIDDEN, (HIDDEN, KV, KV)),
    "o": (HIDDEN, (HIDDEN,)),
    "gate_up": (HIDDEN, (INNER, INNER)),
    "down": (INNER, (HIDDEN,)),
}
NAMES = tuple(GROUPS)
BATCH, RANK, ADAPTERS, DISTINCT = 64, 16, 64, (1, 8, 32, 64)
PART_ELEMS = 3 * 64 * BATCH * 16 * 16  # room for any tiles
OTHER_ROWS = 16  # another size of block than DECODE_ROWS
READ_TB_S = 4.38  # measured read bandwidth of an H200 here
Run = Callable[[], None]
TileTable = dict[str, Tiles]


@dataclass
class Shapes:
    """Sites of every layer, grouped by fused linear."""

    sites: dict[tuple[int, str], tuple[LoraSite, ...]]
    num_sites: int


def make_shapes() -> Shapes:
    sites, index = {}, 0
    for layer in range(LAYERS):
        for name, (d_in, widths) in GROUPS.items():
            group, offset = [], 0
            for width in widths:
                group.append(LoraSite(index, d_in, width, offset))
                index, offset = index + 1, offset + width
            sites[layer, name] = tuple(group)
    return Shapes(sites, index)


def make_tables(shapes: Shapes, rng: np.random.Generator) -> LoraBatch:
    """All adapters, one chunk a site, pieces in random order in the pool. Slots are the adapters."""
    flat = [site for group in shapes.sites.values() for site in group]
    sizes = np.array([size for _ in range(ADAPTERS) for s in flat for size in (RANK * s.d_in, RANK * s.d_out)])
    order = rng.permutation(len(sizes))
    offsets = np.empty(len(sizes), dtype=np.int64)
    offsets[order] = np.concatenate(([0], np.cumsum(sizes[order])[:-1]))
    pages = torch.empty(int(sizes.sum()), dtype=torch.bfloat16, device="cuda")
    pages.normal_(0, 0.02)
    pieces = offsets.reshape(-1, 2)
    chunks = np.arange(ADAPTERS)[:, None] * shapes.num_sites + np.arange(shapes.num_sites + 1)[None]
    return LoraBatch(
        pages=pages,
        seg_start=torch.zeros(1, dtype=torch.int32),
        seg_slot=torch.zeros(0, dtype=torch.int32),
        chunk_start=torch.from_numpy(chunks.astype(np.int32)),
        chunk_a=torch.from_numpy(pieces[:, 0].copy()),
        chunk_b=torch.from_numpy(pieces[:, 1].copy()),
        chunk_rank=torch.full((len(pieces),), RANK, dtype=torch.int32),
        scale=torch.full((ADAPTERS, shapes.num_sites), 2.0),
    )


def row_counts(distinct: int) -> list[int]:
    """Batch rows spread evenly over `distinct` adapters."""
    return [BATCH // distinct + (i < BATCH % distinct) for i in range(distinct)]


class Mixes:
    """Work lists of every mix on the device, and how long planning one takes."""

    def __init__(self, tables: LoraBatch, num_sites: int) -> None:
        self.tables = tables
        self.num_sites = num_sites
        self.part = torch.full((PART_ELEMS,), float("nan"), device="cuda")

    def _empty(self, device: str) -> WorkItems:
        return WorkItems.empty(self.num_sites, BATCH, BATCH, device, pin_memory=device == "cpu", align=8)

    def bind(self, distinct: int, block_rows: int = DECODE_ROWS, num_programs: int | None = None) -> BoundLora:
        """A mix with as many programs as items, unless `num_programs` says how many."""
        starts = torch.tensor(np.cumsum([0, *row_counts(distinct)]), dtype=torch.int32)
        batch = replace(self.tables, seg_start=starts, seg_slot=torch.arange(distinct, dtype=torch.int32))
        host, items = self._empty("cpu"), self._empty("cuda")
        longest = plan_items(batch, BATCH, block_rows, host)
        items.copy_(host, longest)
        torch.cuda.synchronize()
        return BoundLora(self.tables.pages, items, self.part, block_rows, num_programs or longest)

    def plan_ms(self, distinct: int) -> float:
        """Host time of planning and enqueueing the copy, median."""
        starts = torch.tensor(np.cumsum([0, *row_counts(distinct)]), dtype=torch.int32)
        batch = replace(self.tables, seg_start=starts, seg_slot=torch.arange(distinct, dtype=torch.int32))
        host, items, times = self._empty("cpu"), self._empty("cuda"), []
        for _ in range(20):
            start = time.perf_counter()
            items.copy_(host, plan_items(batch, BATCH, DECODE_ROWS, host))
            times.append(time.perf_counter() - start)
            torch.cuda.synchronize()
        return 1e3 * statistics.median(times)


def graph_ms(run: Run, repeats: int = 20, priority: int = 0) -> tuple[float, float]:
    """Median and spread of replays of one graph, milliseconds."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(priority=priority)):
        run()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times), max(times) - min(times)


def check(shapes: Shapes, mixes: Mixes, tiles: TileTable) -> float:
    """Largest relative error against float64 over groups and mixes; says where other blocks give other bits."""
    worst, tables = 0.0, mixes.tables
    for distinct in DISTINCT:
        bound = mixes.bind(distinct)
        starts = [0, *np.cumsum(row_counts(distinct)).tolist()]
        for name, (d_in, widths) in GROUPS.items():
            sites = shapes.sites[LAYERS - 1, name]
            x = torch.randn(BATCH, d_in, device="cuda").bfloat16()
            delta = torch.full((BATCH, sum(widths)), float("nan"), device="cuda").bfloat16()
            exact = torch.zeros(BATCH, sum(widths), device="cuda", dtype=torch.float64)
            for slot in range(distinct):
                rows = slice(starts[slot], starts[slot + 1])
                for site in sites:
                    chunk = slot * shapes.num_sites + site.index
                    at, bt = int(tables.chunk_a[chunk]), int(tables.chunk_b[chunk])
                    a = tables.pages[at : at + RANK * site.d_in].view(RANK, -1).double()
                    b = tables.pages[bt : bt + RANK * site.d_out].view(RANK, -1).double()
                    cols = slice(site.out_offset, site.out_offset + site.d_out)
                    exact[rows, cols] = 2.0 * (x[rows].double() @ a.T) @ b
            mixes.part.fill_(float("nan"))
            lora_delta(delta, x, sites, bound, tiles[name])
            again = torch.full_like(delta, float("nan"))
            lora_delta(again, x, sites, mixes.bind(distinct, OTHER_ROWS), tiles[name])
            if not torch.equal(again, delta):
                print(f"  {name}: other bits in blocks of {OTHER_ROWS} rows")
            worst = max(worst, ((delta.double() - exact).norm() / exact.norm()).item())
    return worst


@dataclass(frozen=True)
class Arrangement:
    """How the LoRA kernels stand beside the base products."""

    pdl: str = "none"  # programmatic dependent launch of: none, expand (when shrink ends: late), both
    first: str = "lora"  # which is launched first; serial: in one stream, the base after
    side: int = 0  # priorities of the side and the main stream
    main: int = 0

    def tiles(self, tiles: Tiles) -> Tiles:
        early = self.pdl != "late"
        return replace(tiles, shrink_pdl=self.pdl == "both", expand_pdl=self.pdl != "none", pdl_early=early)


ARRANGEMENTS = [
    Arrangement(),
    Arrangement("both"),
    Arrangement("both", "base"),
    Arrangement("none", "base", main=-5),
    Arrangement("late", "base", main=-5),
    Arrangement("both", "base", main=-5),
    Arrangement("both", "serial"),
]


class Workload:
    """Inputs and outputs of every fused linear, and runs over all layers."""

    def __init__(self, shapes: Shapes, batch: LoraBatch) -> None:
        self.shapes, self.batch = shapes, batch
        self.x = {d: torch.randn(BATCH, d, device="cuda").bfloat16() for d in (HIDDEN, INNER)}
        self.y = {name: torch.zeros(BATCH, sum(w), device="cuda").bfloat16() for name, (_, w) in GROUPS.items()}
        self.delta = {name: torch.zeros_like(y) for name, y in self.y.items()}
        self.weights = {
            name: [(torch.randn(sum(w), d, device="cuda") * 0.02).bfloat16() for _ in range(LAYERS)]
            for name, (d, w) in GROUPS.items()
        }
        self.tiny = torch.zeros(32, device="cuda")

    def _pair(self, layer: int, name: str, bound: BoundLora, tiles: TileTable) -> None:
        x, sites = self.x[GROUPS[name][0]], self.shapes.sites[layer, name]
        lora_delta(self.delta[name], x, sites, bound, tiles[name])

    def lora(self, bound: BoundLora, tiles: TileTable, names: tuple[str, ...] = NAMES) -> Run:
        def run() -> None:
            for layer in range(LAYERS):
                for name in names:
                    self._pair(layer, name, bound, tiles)

        return run

    def base(self) -> Run:
        def run() -> None:
            for layer in range(LAYERS):
                for name in NAMES:
                    self._product(layer, name)

        return run

    def _product(self, layer: int, name: str) -> None:
        torch.mm(self.x[GROUPS[name][0]], self.weights[name][layer].T, out=self.y[name])

    def beside(self, how: Arrangement, work: Callable[[int, str], None]) -> Run:
        """Base products with `work` of each linear on a second stream, joined before the next linear."""
        side = torch.cuda.Stream(priority=how.side)

        def run() -> None:
            main = torch.cuda.current_stream()
            for layer in range(LAYERS):
                for name in NAMES:
                    if how.first == "serial":
                        work(layer, name)
                        self._product(layer, name)
                        continue
                    side.wait_stream(main)
                    if how.first == "base":
                        self._product(layer, name)
                    with torch.cuda.stream(side):
                        work(layer, name)
                    if how.first == "lora":
                        self._product(layer, name)
                    main.wait_stream(side)

        return run

    def overlapped(self, bound: BoundLora, tiles: TileTable, how: Arrangement) -> float:
        chosen = {name: how.tiles(t) for name, t in tiles.items()}
        run = self.beside(how, lambda layer, name: self._pair(layer, name, bound, chosen))
        return graph_ms(run, 12, how.main)[0]

    def as_the_engine(self, bound: BoundLora) -> tuple[float, float]:
        """Products with and without adapters as `CudaOps.linear` runs them, in the runner's stream. Milliseconds."""
        ops = CudaOps(torch.device("cuda"))
        linears = {
            (layer, name): ops.prepare_linear(self.weights[name][layer], None, sites)
            for (layer, name), sites in self.shapes.sites.items()
        }
        ops.reserve(BATCH, torch.bfloat16)
        batch = replace(self.batch, native=bound)

        def run(lora: LoraBatch | None) -> None:
            for (_, name), linear in linears.items():
                ops.linear(self.x[GROUPS[name][0]], linear, self.y[name], lora)

        with torch.inference_mode():
            return graph_ms(lambda: run(batch), 20, -5)[0], graph_ms(lambda: run(None), 20, -5)[0]

    def fork_and_join(self) -> float:
        """Base products with two empty kernels beside each: what the arrangement itself costs."""

        def work(layer: int, name: str) -> None:
            self.tiny.add_(1)
            self.tiny.add_(1)

        return graph_ms(self.beside(Arrangement(), work))[0]


def floor_ms(names: tuple[str, ...], distinct: int) -> float:
    elems = sum(d * len(w) + sum(w) for d, w in (GROUPS[name] for name in names)) * RANK
    return 2 * elems * LAYERS * distinct / (READ_TB_S * 1e9)


def _default(name: str) -> Tiles:
    d_in, widths = GROUPS[name]
    return choose_tiles(d_in, sum(widths), pdl=True)


def candidates(name: str) -> list[Tiles]:
    """Shrink variants with one expand, then expand variants with one shrink."""
    base = _default(name)
    # Slice of K, groups, registers; columns, warps, registers.
    shrinks = [(512, 2, None), (512, 4, None), (1024, 4, None), (1024, 4, 96), (2048, 8, None)]
    expands = [(256, 1, None), (256, 1, 160), (128, 1, None), (512, 4, None)]
    found = [replace(base, block_k=k, groups=g, shrink_registers=r) for k, g, r in shrinks]
    found += [replace(base, block_n=n, expand_warps=w, expand_registers=r) for n, w, r in expands]
    return list(dict.fromkeys([base, *found]))


def _shrink_of(tiles: Tiles) -> tuple[int | None, ...]:
    return tiles.block_k, tiles.groups, tiles.shrink_registers


def _expand_of(tiles: Tiles) -> tuple[int | None, ...]:
    return tiles.block_n, tiles.expand_warps, tiles.expand_registers


def compile_one(name: str, tiles: Tiles, block_rows: int) -> None:
    """Compile a variant into Triton's cache on disk: a launch with empty lists."""
    d_in, widths = GROUPS[name]
    sites = make_shapes().sites[0, name]
    items = WorkItems.empty(7 * LAYERS, BATCH, BATCH, "cuda", align=8)
    part = torch.empty(PART_ELEMS, device="cuda")
    pages = torch.empty(64, dtype=torch.bfloat16, device="cuda")
    x, delta = (torch.empty(BATCH, d, dtype=torch.bfloat16, device="cuda") for d in (d_in, sum(widths)))
    lora_delta(delta, x, sites, BoundLora(pages, items, part, block_rows, 1), tiles)
    torch.cuda.synchronize()


def compile_all(variants: list[tuple[str, Tiles, int]]) -> None:
    workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(compile_one, *variant) for variant in variants]
        for job, variant in zip(jobs, variants, strict=True):
            if error := job.exception():
                print(f"  {variant}: {type(error).__name__} {str(error)[:200]}")


def search(work: Workload, bounds: dict[int, BoundLora]) -> tuple[TileTable, list[dict[str, Any]]]:
    """Best shrink and best expand for each group, by the sum of relative times over the mixes."""
    chosen, log = {}, []
    for name in NAMES:
        times: dict[Tiles, dict[int, float]] = {}
        for tiles in candidates(name):
            try:
                ms = {d: graph_ms(work.lora(bounds[d], {name: tiles}, (name,)), 8)[0] for d in DISTINCT}
            except Exception as error:  # a shape that the compiler or the chip does not take
                print(f"  {name} {tiles}: {type(error).__name__} {str(error)[:150]}")
                continue
            label = f"{name:8} shrink {_shrink_of(tiles)} expand {_expand_of(tiles)}"
            print(f"  {label} " + " ".join(f"{d}:{v:.3f}" for d, v in ms.items()), flush=True)
            log.append({"linear": name, "tiles": str(tiles), "ms": ms})
            times[tiles] = ms
        base = candidates(name)[0]
        best = {d: min(ms[d] for ms in times.values()) for d in DISTINCT}
        cost = {tiles: sum(ms[d] / best[d] for d in DISTINCT) for tiles, ms in times.items()}
        shrink = _shrink_of(min((t for t in cost if _expand_of(t) == _expand_of(base)), key=cost.__getitem__))
        expand = _expand_of(min((t for t in cost if _shrink_of(t) == _shrink_of(base)), key=cost.__getitem__))
        chosen[name] = replace(
            base,
            **dict(zip(("block_k", "groups", "shrink_registers"), shrink, strict=True)),
            **dict(zip(("block_n", "expand_warps", "expand_registers"), expand, strict=True)),
        )
    return chosen, log


def measure(work: Workload, mixes: Mixes, tiles: TileTable, result: dict[str, Any]) -> None:
    """The whole, alone and beside the base products, into `result`."""
    base_ms, base_spread = graph_ms(work.base())
    fork_ms = work.fork_and_join()
    result |= {"base_matmul_ms": base_ms, "base_spread_ms": base_spread, "fork_and_join_ms": fork_ms}
    print(f"base products {base_ms:.3f} ms; with empty kernels beside them {fork_ms / base_ms:.3f} of that")
    keys = ("lora_kernels_ms", "no_pdl_ms", "spread_ms", "floor_ms", "plan_ms", "by_programs_ms", "over_base")
    result |= {key: {} for key in keys}
    plain = {name: replace(t, shrink_pdl=False, expand_pdl=False) for name, t in tiles.items()}
    print("distinct  kernels ms  spread  floor ms  share  without PDL  plan ms  by programs")
    for d in DISTINCT:
        bound = mixes.bind(d)
        ms, spread = graph_ms(work.lora(bound, tiles))
        no_pdl, _ = graph_ms(work.lora(bound, plain))
        by = {n: graph_ms(work.lora(replace(bound, num_programs=n), tiles), 8)[0] for n in (8, 16, 32, 64)}
        values = (ms, no_pdl, spread, floor_ms(NAMES, d), mixes.plan_ms(d), by)
        for key, value in zip(keys, values, strict=False):
            result[key][str(d)] = value
        line = f"{d:8}  {ms:10.3f}  {spread:6.3f}  {values[3]:8.3f}  {values[3] / ms:5.2f}  {no_pdl:11.3f}"
        print(f"{line}  {values[4]:7.2f}  " + " ".join(f"{n}:{v:.3f}" for n, v in by.items()), flush=True)
    print("beside the base products, over base alone: " + " ".join(map(str, DISTINCT)))
    bases = [base_ms]
    for how in ARRANGEMENTS:
        both = {str(d): work.overlapped(mixes.bind(d), tiles, how) for d in DISTINCT}
        bases.append(graph_ms(work.base())[0])
        near = (bases[-2] + bases[-1]) / 2  # the chip's clock drifts: base just before and just after
        result["over_base"][str(how)] = {d: ms / near for d, ms in both.items()}
        label = f"pdl {how.pdl:6} first {how.first:6} priority {how.side:2} {how.main:2}"
        print(f"  {label}  " + " ".join(f"{ms / near:.3f}" for ms in both.values()) + f"  base {near:.3f}", flush=True)
    result["base_matmul_ms_all"] = bases
    engine = {str(d): work.as_the_engine(mixes.bind(d)) for d in DISTINCT}
    result["overlapped_over_base"] = {d: ms / alone for d, (ms, alone) in engine.items()}
    result["overlapped_arrangement"] = "CudaOps.linear, as the engine runs it"
    print("  as the engine runs them  " + " ".join(f"{r:.3f}" for r in result["overlapped_over_base"].values()))


def commit() -> str:
    """LORAPLEX_COMMIT stands for the commit where git is not."""
    named = os.environ.get("LORAPLEX_COMMIT")
    return (
        named
        or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--search", action="store_true", help="time other tile sizes first")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    torch.manual_seed(0)
    tiles = {name: _default(name) for name in NAMES}
    started = time.monotonic()
    variants = [(name, t, rows) for name, t in tiles.items() for rows in (DECODE_ROWS, OTHER_ROWS)]
    if args.search:
        variants = [(n, t, DECODE_ROWS) for n in NAMES for t in candidates(n)]
    compile_all(variants)
    print(f"{len(variants)} variants compiled in {time.monotonic() - started:.0f} s", flush=True)
    shapes = make_shapes()
    mixes = Mixes(make_tables(shapes, np.random.default_rng(0)), shapes.num_sites)
    result: dict[str, Any] = {"rel_err": check(shapes, mixes, tiles)}
    print(f"relative error against float64: {result['rel_err']:.2e}", flush=True)
    work = Workload(shapes, mixes.tables)
    if args.search:
        bounds = {d: mixes.bind(d) for d in DISTINCT}
        found, result["search"] = search(work, bounds)
        result["search_best"] = {name: str(t) for name, t in found.items()}
        print("best by the search: " + "; ".join(f"{n} {_shrink_of(t)} {_expand_of(t)}" for n, t in found.items()))
    measure(work, mixes, tiles, result)
    result |= {
        "tiles": {name: str(t) for name, t in tiles.items()},
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
        "command": "python " + " ".join(sys.argv),
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k not in ("search", "over_base", "by_programs_ms")}))


if __name__ == "__main__":
    main()
