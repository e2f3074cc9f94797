"""Random inputs for the operations: a page pool with adapters and sequences scattered over it."""

from dataclasses import dataclass

import numpy as np
import torch

from loraplex.kernels import KvBatch, LoraBatch, LoraSite

# Largest error over the largest value of the exact result: one rounding of the output, and of what enters it.
RELATIVE_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def assert_close(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    error = (got.double() - exact.double()).abs().max() / exact.abs().max().clamp_min(1e-30)
    assert error <= RELATIVE_TOLERANCE[dtype], f"relative error {error:.2e}"


@dataclass
class LoraCase:
    """x, y and adapters: ranks[slot][site], rows[segment] rows of slot slots[segment]."""

    x: torch.Tensor
    y: torch.Tensor
    sites: tuple[LoraSite, ...]
    lora: LoraBatch
    a: dict[tuple[int, int], np.ndarray]
    b: dict[tuple[int, int], np.ndarray]

    def exact(self) -> torch.Tensor:
        """The row loop of the specification, in float64 numpy."""
        y, x = self.y.double().numpy().copy(), self.x.double().numpy()
        starts, slots = self.lora.seg_start.tolist(), self.lora.seg_slot.tolist()
        for segment, slot in enumerate(slots):
            for row in range(starts[segment], starts[segment + 1]):
                for site in self.sites:
                    if (slot, site.index) not in self.a:
                        continue
                    v = self.a[slot, site.index] @ x[row]
                    scale = float(self.lora.scale[slot, site.index])
                    y[row, site.out_offset : site.out_offset + site.d_out] += scale * (self.b[slot, site.index] @ v)
        return torch.from_numpy(y)


def make_lora_case(
    dtype: torch.dtype,
    *,
    d_in: int = 72,
    d_outs: tuple[int, ...] = (80, 24, 40),
    ranks: list[list[int]],
    slots: list[int],
    rows: list[int],
    chunk_rank: int = 16,
    seed: int = 0,
) -> LoraCase:
    """`ranks[slot]` has a rank for each site, 0 for none. Unused pool elements are NaN."""
    rng = np.random.default_rng(seed)
    offsets = np.cumsum((0, *d_outs))
    sites = tuple(LoraSite(i + 2, d_in, d, int(offsets[i])) for i, d in enumerate(d_outs))
    num_sites = len(sites) + 3  # the tables have other columns too
    a, b, pieces = {}, {}, []
    start, chunk_a, chunk_b, chunk_rank_of, cursor = [], [], [], [], 5
    for slot, site_ranks in enumerate(ranks):
        row = [len(chunk_a)] * 3
        for site, rank in zip(sites, site_ranks, strict=True):
            if rank:
                round_to = lambda values: torch.from_numpy(values).to(dtype).double().numpy()  # noqa: E731
                a[slot, site.index] = round_to(rng.normal(size=(rank, d_in)))
                b[slot, site.index] = round_to(rng.normal(size=(site.d_out, rank)) / rank)
            for first in range(0, rank, chunk_rank):
                part = slice(first, min(first + chunk_rank, rank))
                for values, where in ((a[slot, site.index][part], chunk_a), (b[slot, site.index].T[part], chunk_b)):
                    where.append(cursor)
                    pieces.append((cursor, values.ravel()))
                    cursor += values.size + 3
                chunk_rank_of.append(part.stop - part.start)
            row.append(len(chunk_a))
        start.append([*row, len(chunk_a)])
    pages = torch.full((cursor + 64,), float("nan"), dtype=dtype)
    for offset, values in pieces:
        pages[offset : offset + values.size] = torch.from_numpy(values.copy()).to(dtype)
    int32 = torch.int32
    lora = LoraBatch(
        pages=pages,
        seg_start=torch.tensor(np.cumsum((0, *rows)), dtype=int32),
        seg_slot=torch.tensor(slots, dtype=int32),
        chunk_start=torch.tensor(start, dtype=int32).reshape(len(ranks), num_sites + 1),
        chunk_a=torch.tensor(chunk_a, dtype=torch.int64),
        chunk_b=torch.tensor(chunk_b, dtype=torch.int64),
        chunk_rank=torch.tensor(chunk_rank_of, dtype=int32),
        scale=torch.from_numpy(rng.uniform(0.25, 4.0, (len(ranks), num_sites))).float(),
    )
    x = torch.from_numpy(rng.normal(size=(sum(rows), d_in))).to(dtype)
    y = torch.from_numpy(rng.normal(size=(sum(rows), int(offsets[-1])))).to(dtype)
    return LoraCase(x, y, sites, lora, a, b)


def make_kv_batch(
    dtype: torch.dtype,
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    page_tokens: int,
    lengths: list[int],
    new_rows: list[int],
    seed: int = 0,
) -> KvBatch:
    """Sequences of `lengths` tokens whose last `new_rows` are this step's rows. Pages are scattered and NaN."""
    rng = np.random.default_rng(seed)
    counts = [-(-length // page_tokens) for length in lengths]
    order = rng.permutation(sum(counts) + 3)
    table = np.zeros((len(lengths), max(counts)), dtype=np.int32)
    used = 0
    for seq, count in enumerate(counts):
        table[seq, :count] = order[used : used + count]
        used += count
    shape = (len(order), layers, 2, page_tokens, kv_heads, head_dim)
    row_pos = np.concatenate([np.arange(n - k, n) for n, k in zip(lengths, new_rows, strict=True)])
    return KvBatch(
        pages=torch.full(shape, float("nan"), dtype=dtype),
        page_table=torch.from_numpy(table),
        seq_start=torch.tensor(np.cumsum((0, *new_rows)), dtype=torch.int32),
        row_seq=torch.tensor(np.repeat(np.arange(len(lengths)), new_rows), dtype=torch.int32),
        row_pos=torch.tensor(row_pos, dtype=torch.int32),
    )
