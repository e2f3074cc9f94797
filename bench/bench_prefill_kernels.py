"""Where a prompt chunk's time goes with one adapter: layers of Llama-3-8B shapes without attention, on one NVIDIA GPU.

Linears and the operations between them run as the engine runs them. Prints milliseconds of 32 layers for each rank: all
of it, shrink alone, expand alone, and shrink before the product instead of beside it; with --search, other tiles.
"""

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraplex.kernels import AttentionShape, KvBatch, Linear, LoraBatch, LoraDelta, LoraSite, RopeTable
from loraplex.kernels.gpu import PREFILL_ROWS, BoundPrefill, RowBlocks, plan_blocks, prefill, prefill_room
from loraplex.kernels.gpu.ops import BoundKv, CudaOps

HIDDEN, WIDE, HEADS, KV_HEADS, DIM = 4096, 14336, 32, 8, 128
GROUPS = [
    (HIDDEN, (HIDDEN, KV_HEADS * DIM, KV_HEADS * DIM)),
    (HIDDEN, (HIDDEN,)),
    (HIDDEN, (WIDE, WIDE)),
    (WIDE, (HIDDEN,)),
]
LAYERS, WEIGHTS = 32, 4  # layers that run, and that have weights of their own
DTYPE = torch.bfloat16
FIELDS = {
    "shrink": ("shrink_rows", "shrink_warps", "shrink_k", "shrink_stages"),
    "add": ("add_rows", "add_n", "add_warps", "add_registers"),
    "silu_and_mul": ("silu_rows", "silu_n", "silu_tiles", "silu_stages", "silu_warps", "silu_registers"),
    "rope_and_store": ("rope_rows", "rope_heads", "rope_warps", "rope_registers"),
}
SEARCH: dict[str, list[tuple[int | None, ...]]] = {
    "shrink": [(64, 4, 64, 3), (64, 4, 128, 3), (64, 4, 64, 4), (128, 8, 64, 4), (128, 8, 128, 3), (128, 4, 64, 3)],
    "add": [
        (64, 128, 8, 80),
        (64, 64, 4, 128),
        (64, 128, 4, 168),
        (64, 64, 8, 64),
        (128, 128, 8, 168),
        (128, 64, 8, 80),
    ],
    "silu_and_mul": [
        (64, 64, 1, 4, 128),
        (64, 64, 1, 8, 80),
        (64, 64, 4, 8, 80),
        (128, 64, 1, 8, 128),
        (128, 64, 4, 8, 128),
        (128, 64, 7, 8, 128),
        (128, 64, 2, 8, 168),
        (128, 128, 1, 16, 128),
        (128, 32, 4, 8, 80),
    ],
    "rope_and_store": [(64, 2, 8, 128), (64, 8, 8, 128), (64, 1, 8, 80), (64, 4, 4, 255), (128, 4, 8, 255)],
}


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device="cuda") * 0.02


class Before(CudaOps):
    """Shrink before the product, on its stream."""

    def linear(self, x: Tensor, linear: Linear, out: Tensor, lora: LoraBatch | None = None) -> LoraDelta | None:
        delta = None if lora is None or not linear.sites else self._delta_of(x, linear, out, lora.native)
        self._product(x, linear, out)
        return delta


class Layers:
    """The buffers of a step of `rows` rows."""

    def __init__(self, rows: int) -> None:
        self.ops, self.before = CudaOps(torch.device("cuda")), Before(torch.device("cuda"))
        self.rows = rows
        self.linears, index = [], 0
        for _ in range(WEIGHTS):
            layer = []
            for d_in, widths in GROUPS:
                offsets = [sum(widths[:i]) for i in range(len(widths))]
                sites = tuple(
                    LoraSite(index + i, d_in, d, at) for i, (d, at) in enumerate(zip(widths, offsets, strict=True))
                )
                index += len(sites)
                layer.append(self.ops.prepare_linear(randn(sum(widths), d_in), None, sites))
            self.linears.append(layer)
        self.residual = torch.zeros(rows, HIDDEN, device="cuda")
        self.hidden, self.update, self.heads = (randn(rows, HIDDEN) for _ in range(3))
        self.qkv, self.gate_up, self.activated = (
            randn(rows, HIDDEN + 2 * KV_HEADS * DIM),
            randn(rows, 2 * WIDE),
            randn(rows, WIDE),
        )
        self.norm = torch.ones(HIDDEN, dtype=DTYPE, device="cuda")
        table = torch.ones(rows, DIM // 2, device="cuda")
        self.rope, self.shape = RopeTable(table, table), AttentionShape(HEADS, KV_HEADS, DIM, DIM**-0.5, 0)
        position = torch.arange(rows, dtype=torch.int32, device="cuda")
        pages = torch.zeros(-(-rows // 16), 1, 2, 16, KV_HEADS, DIM, dtype=DTYPE, device="cuda")
        bound: Any = BoundKv(position // 16, position % 16, position, None)  # type: ignore[arg-type]
        self.kv = KvBatch(pages, position, position, position, position, bound)

    def adapter(self, rank: int, block_rows: int) -> LoraBatch:
        """One adapter of a rank on every linear of every row, chunk by chunk in a pool of its own."""
        sites = [site for layer in self.linears for linear in layer for site in linear.sites]
        chunks, at = -(-rank // 16), 0
        a, b, ranks = [], [], []
        for site in sites:
            for first in range(0, rank, 16):
                size = min(16, rank - first)
                a.append(at)
                b.append(at + size * site.d_in)
                at += size * (site.d_in + site.d_out)
                ranks.append(size)
        starts = torch.arange(0, len(a) + 1, chunks, dtype=torch.int32).view(1, -1)
        seg = torch.tensor([0, self.rows], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        tables = torch.tensor(a), torch.tensor(b), torch.tensor(ranks, dtype=torch.int32), torch.ones(1, len(sites))
        batch = LoraBatch(randn(at), *seg, starts, *tables)
        sizes = len(sites), -(-self.rows // block_rows), chunks
        host, on_device = RowBlocks.empty(*sizes, align=8), RowBlocks.empty(*sizes, "cuda", align=8)
        counts = plan_blocks(batch, block_rows, host)
        on_device.copy_(host, counts.entries)
        part, v = prefill_room([linear.sites for linear in self.linears[0]], counts, block_rows)
        room = torch.zeros(part, device="cuda"), torch.zeros(v, dtype=DTYPE, device="cuda")
        return replace(batch, native=BoundPrefill(batch.pages, on_device, counts, *room, block_rows))

    def run(self, lora: LoraBatch | None, *, before: bool = False, expands: bool = True) -> None:
        ops = self.before if before else self.ops

        def read(delta: LoraDelta | None) -> LoraDelta | None:
            return delta if expands else None

        delta = None
        for number in range(LAYERS):
            qkv, output, gate_up, down = self.linears[number % WEIGHTS]
            ops.add_rms_norm(self.residual, self.update, self.norm, 1e-5, self.hidden, delta)
            delta = read(ops.linear(self.hidden, qkv, self.qkv, lora))
            ops.rope_and_store(self.qkv, 0, self.shape, self.rope, None, self.kv, delta)
            delta = read(ops.linear(self.heads, output, self.update, lora))
            ops.add_rms_norm(self.residual, self.update, self.norm, 1e-5, self.hidden, delta)
            delta = read(ops.linear(self.hidden, gate_up, self.gate_up, lora))
            ops.silu_and_mul(self.gate_up, self.activated, delta)
            delta = read(ops.linear(self.activated, down, self.update, lora))


@contextmanager
def patched(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """A function of `prefill` replaced."""
    original = getattr(prefill, name)
    setattr(prefill, name, function)
    try:
        yield
    finally:
        setattr(prefill, name, original)


def no_shrink(x: Tensor, sites: tuple[LoraSite, ...], bound: BoundPrefill) -> LoraDelta:
    return LoraDelta(bound.v, bound.v[:0], sites, bound)


def timed(run: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def compare(variants: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 2):
        for name, run in variants.items():
            took = timed(run)
            if number > 1:
                times[name].append(took)
    return {name: statistics.median(values) for name, values in times.items()}


def with_tiles(layers: Layers, lora: LoraBatch, name: str, tiles: prefill.PrefillTiles) -> None:
    with patched(name, functools.partial(getattr(prefill, name), tiles=tiles)):
        layers.run(lora)


def expand_only(layers: Layers, lora: LoraBatch) -> None:
    with patched("shrink", no_shrink):
        layers.run(lora)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--block-rows", type=int, default=PREFILL_ROWS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    layers, variants = Layers(args.rows), {}
    variants["none"] = lambda: layers.run(None)
    stream = torch.cuda.Stream(priority=-5)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream), torch.inference_mode():
        for rank in (16, 64):
            lora = layers.adapter(rank, args.block_rows)
            of: dict[str, Callable[[], None]] = {
                "": functools.partial(layers.run, lora),
                ", shrink alone": functools.partial(layers.run, lora, expands=False),
                ", expand alone": functools.partial(expand_only, layers, lora),
                ", shrink before": functools.partial(layers.run, lora, before=True),
            }
            for name, options in SEARCH.items() if args.search else ():
                for option in options:
                    tiles = replace(prefill.TILES, **dict(zip(FIELDS[name], option, strict=True)))
                    of[f", {name} {option}"] = functools.partial(with_tiles, layers, lora, name, tiles)
            variants |= {f"rank {rank}{name}": run for name, run in of.items()}
        found = compare(variants, args.rounds)
    for name, took in found.items():
        print(f"{took:8.3f} ms  {took / found['none']:.4f}  {name}")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
