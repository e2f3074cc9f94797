"""LoRA kernels alone on Llama-3-8B shapes (BENCH.md P1): shrink and expand of 32 layers in one CUDA graph.

Batch 64, rank 16 on all seven projections, bfloat16, random weights scattered over a page pool of 64 adapters. Checks
against float64 first, searches tile sizes for each fused linear, then times the whole with 1, 8, 32 and 64 distinct
adapters, alone and beside the base products on a second stream. The last line of output is one JSON object.

Usage: python bench/bench_lora_kernels.py [--quick] [--out FILE]
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import loraplex  # noqa: F401  (before torch)
from loraplex.kernels import LoraBatch, LoraSite
from loraplex.kernels.gpu import BoundLora, Tiles, add_lora, bind

LAYERS, HIDDEN, INNER, KV = 32, 4096, 14336, 1024
GROUPS: dict[str, tuple[int, tuple[int, ...]]] = {
    "qkv": (HIDDEN, (HIDDEN, KV, KV)),
    "o": (HIDDEN, (HIDDEN,)),
    "gate_up": (HIDDEN, (INNER, INNER)),
    "down": (INNER, (HIDDEN,)),
}
BATCH, RANK, ADAPTERS, DISTINCT = 64, 16, 64, (1, 8, 32, 64)
MAX_SPLITS = 64  # room for partial sums
READ_TB_S = 4.38  # measured read bandwidth of an H200 here


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


def mix(tables: LoraBatch, distinct: int) -> BoundLora:
    """Batch rows spread evenly over `distinct` adapters."""
    counts = [BATCH // distinct + (i < BATCH % distinct) for i in range(distinct)]
    starts = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32)
    batch = replace(tables, seg_start=starts, seg_slot=torch.arange(distinct, dtype=torch.int32))
    return bind(batch, BATCH, MAX_SPLITS, capacity=BATCH)


def graph_ms(run: Any, repeats: int = 20) -> tuple[float, float]:
    """Median and spread of replays of one graph, milliseconds."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
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


def check(shapes: Shapes, tables: LoraBatch) -> float:
    """Largest relative error against float64 over groups and mixes."""
    worst = 0.0
    for distinct in DISTINCT:
        bound = mix(tables, distinct)
        counts = [BATCH // distinct + (i < BATCH % distinct) for i in range(distinct)]
        starts = [0, *np.cumsum(counts).tolist()]
        for name, (d_in, widths) in GROUPS.items():
            sites = shapes.sites[LAYERS - 1, name]
            x = torch.randn(BATCH, d_in, device="cuda").bfloat16()
            y = torch.randn(BATCH, sum(widths), device="cuda").bfloat16()
            exact = y.double()
            for slot in range(distinct):
                rows = slice(starts[slot], starts[slot + 1])
                for site in sites:
                    chunk = slot * shapes.num_sites + site.index
                    at, bt = int(tables.chunk_a[chunk]), int(tables.chunk_b[chunk])
                    a = tables.pages[at : at + RANK * site.d_in].view(RANK, -1).double()
                    b = tables.pages[bt : bt + RANK * site.d_out].view(RANK, -1).double()
                    cols = slice(site.out_offset, site.out_offset + site.d_out)
                    exact[rows, cols] += 2.0 * (x[rows].double() @ a.T) @ b
            delta = exact - y.double()
            before = y.double()
            add_lora(y, x, sites, bound)
            error = ((y.double() - before - delta).norm() / delta.norm()).item()
            worst = max(worst, error)
    return worst


class Workload:
    """Inputs and outputs of every fused linear, and runs over all layers."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.x = {d: torch.randn(BATCH, d, device="cuda").bfloat16() for d in (HIDDEN, INNER)}
        self.y = {name: torch.zeros(BATCH, sum(w), device="cuda").bfloat16() for name, (_, w) in GROUPS.items()}
        self.weights = {
            name: [(torch.randn(sum(w), d, device="cuda") * 0.02).bfloat16() for _ in range(LAYERS)]
            for name, (d, w) in GROUPS.items()
        }

    def lora(self, bound: BoundLora, names: tuple[str, ...], tiles: dict[str, Tiles]) -> Any:
        def run() -> None:
            for layer in range(LAYERS):
                for name in names:
                    x = self.x[GROUPS[name][0]]
                    add_lora(self.y[name], x, self.shapes.sites[layer, name], bound, tiles[name])

        return run

    def base(self, bound: BoundLora | None, tiles: dict[str, Tiles]) -> Any:
        """Base products; with `bound`, LoRA beside each on a second stream into a buffer of its own."""
        side = torch.cuda.Stream()
        delta = {name: torch.zeros_like(y) for name, y in self.y.items()}

        def run() -> None:
            main = torch.cuda.current_stream()
            for layer in range(LAYERS):
                for name in GROUPS:
                    x = self.x[GROUPS[name][0]]
                    if bound is not None:
                        side.wait_stream(main)
                        with torch.cuda.stream(side):
                            sites = self.shapes.sites[layer, name]
                            add_lora(delta[name], x, sites, bound, tiles[name])
                    torch.mm(x, self.weights[name][layer].T, out=self.y[name])
                    if bound is not None:
                        main.wait_stream(side)

        return run


def floor_ms(names: tuple[str, ...], distinct: int) -> float:
    elems = sum(d * len(w) + sum(w) for d, w in (GROUPS[name] for name in names)) * RANK
    return 2 * elems * LAYERS * distinct / (READ_TB_S * 1e9)


def candidates(name: str, quick: bool) -> list[Tiles]:
    """Shrink variants with one expand, then expand variants with one shrink."""
    shrinks = [(512, 1, 2), (512, 1, 4), (1024, 1, 4), (256, 1, 1)]
    expands = [(256, 1), (512, 2), (1024, 4), (128, 1)]
    if quick:
        shrinks, expands = shrinks[:2], expands[:2]
    base = Tiles(*shrinks[0][:2], expands[0][0], shrinks[0][2], expands[0][1], pdl=True)
    found = [replace(base, block_k=k, loops=n, shrink_warps=w) for k, n, w in shrinks]
    plain = replace(base, pdl=False)
    return [*found, *(replace(base, block_n=n, expand_warps=w) for n, w in expands[1:]), plain]


def _shrink_of(tiles: Tiles) -> tuple[int, int, int]:
    return tiles.block_k, tiles.loops, tiles.shrink_warps


def search(work: Workload, bounds: dict[int, BoundLora], quick: bool) -> tuple[dict[str, Tiles], dict[str, Any]]:
    """Best shrink and best expand tiles for each group, by the sum of relative times over the mixes."""
    chosen, log = {}, {}
    for name in GROUPS:
        rows = []
        for tiles in candidates(name, quick):
            try:
                ms = {d: graph_ms(work.lora(bounds[d], (name,), {name: tiles}), 8)[0] for d in DISTINCT}
            except Exception as error:  # a shape that the compiler or the chip does not take
                print(f"  {name} {tiles}: {type(error).__name__} {str(error)[:150]}")
                continue
            rows.append((tiles, ms))
            print(f"  {name:8} {tiles} " + " ".join(f"{d}:{v:.3f}" for d, v in ms.items()), flush=True)
        best = {d: min(ms[d] for _, ms in rows) for d in DISTINCT}
        first = rows[0][0]

        def cost(row: tuple[Tiles, dict[int, float]], best: dict[int, float] = best) -> float:
            return sum(row[1][d] / best[d] for d in DISTINCT)

        rows_pdl = [r for r in rows if r[0].pdl]
        shrink_rows = [r for r in rows_pdl if (r[0].block_n, r[0].expand_warps) == (first.block_n, first.expand_warps)]
        expand_rows = [r for r in rows_pdl if (r[0].block_k, r[0].loops, r[0].shrink_warps) == _shrink_of(first)]
        s, e = min(shrink_rows, key=cost)[0], min(expand_rows, key=cost)[0]
        chosen[name] = replace(s, block_n=e.block_n, expand_warps=e.expand_warps)
        log[name] = [(str(tiles), ms) for tiles, ms in rows]
    return chosen, log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two candidates a launch")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    torch.manual_seed(0)
    shapes = make_shapes()
    tables = make_tables(shapes, np.random.default_rng(0))
    error = check(shapes, tables)
    print(f"relative error against float64: {error:.2e}", flush=True)
    work = Workload(shapes)
    bounds = {d: mix(tables, d) for d in DISTINCT}
    chosen, log = search(work, bounds, args.quick)
    names = tuple(GROUPS)
    base_ms, base_spread = graph_ms(work.base(None, chosen))
    result: dict[str, Any] = {"rel_err": error, "base_matmul_ms": base_ms, "base_spread_ms": base_spread}
    result |= {"lora_kernels_ms": {}, "spread_ms": {}, "floor_ms": {}, "overlapped_ms": {}, "overlapped_over_base": {}}
    print("distinct  kernels ms  spread  floor ms  share  beside base ms  over base")
    for d in DISTINCT:
        ms, spread = graph_ms(work.lora(bounds[d], names, chosen))
        both, _ = graph_ms(work.base(bounds[d], chosen))
        result["lora_kernels_ms"][str(d)], result["spread_ms"][str(d)] = ms, spread
        result["floor_ms"][str(d)] = floor_ms(names, d)
        result["overlapped_ms"][str(d)], result["overlapped_over_base"][str(d)] = both, both / base_ms
        figures = f"{ms:10.3f}  {spread:6.3f}  {floor_ms(names, d):8.3f}  {floor_ms(names, d) / ms:5.2f}"
        print(f"{d:8}  {figures}  {both:14.3f}  {both / base_ms:9.3f}")
    result |= {
        "tiles": {name: str(tiles) for name, tiles in chosen.items()},
        "search": log,
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": "python bench/bench_lora_kernels.py",
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "search"}))


if __name__ == "__main__":
    main()
