"""What the operations take: tensors of one step, and the fixed description of a layer's linears."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GPU_MAX_GROUP = 16  # query heads of a key head that decode attention takes: a tile of the matrix units


@dataclass(frozen=True, slots=True)
class LoraSite:
    """A linear that an adapter may adapt; several may share one fused output (q, k and v; gate and up)."""

    index: int  # column in the tables of a LoraBatch
    d_in: int
    d_out: int
    out_offset: int  # first column in the fused output


@dataclass(frozen=True, slots=True)
class Linear:
    """A dense layer as an implementation keeps it. `weight` is its own layout; `bias` may be None."""

    weight: Tensor
    bias: Tensor | None
    d_in: int
    d_out: int
    sites: tuple[LoraSite, ...] = ()


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """The adapters of one step. Rows are ordered by adapter: segment i is rows [seg_start[i], seg_start[i + 1]).

    Chunks of (slot, site) are chunk_start[slot, site] .. chunk_start[slot, site + 1]; each has `rank` ranks of
    A [rank, d_in] and of B transposed [rank, d_out], contiguous in `pages` at the element offsets given.
    """

    pages: Tensor  # [num_pages * page_elems], the pool
    seg_start: Tensor  # [num_segments + 1] int32
    seg_slot: Tensor  # [num_segments] int32; -1 is no adapter
    chunk_start: Tensor  # [num_slots, num_sites + 1] int32
    chunk_a: Tensor  # [num_chunks] int64
    chunk_b: Tensor  # [num_chunks] int64
    chunk_rank: Tensor  # [num_chunks] int32
    scale: Tensor  # [num_slots, num_sites] float32
    native: Any = None  # the same as a native call takes it


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """What adapters add to a linear's output, for the operation that reads it next; defined only where `covered`."""

    values: Tensor  # [rows, width of the fused output]
    covered: Tensor  # [num_sites, most rows] int8: 1 where a row's adapter has the site
    sites: tuple[LoraSite, ...]
    shrunk: Any = None  # where the reader expands itself: tables of the step (gpu/prefill.py), and `values` is v


@dataclass(frozen=True, slots=True)
class KvBatch:
    """Where the rows of one step stand in their sequences, and where the keys and values of those lie."""

    pages: Tensor  # [num_pages, num_layers, 2, page_tokens, kv_heads, head_dim], the pool
    page_table: Tensor  # [num_seqs, max_pages] int32
    seq_start: Tensor  # [num_seqs + 1] int32: rows of each sequence
    row_seq: Tensor  # [num_rows] int32
    row_pos: Tensor  # [num_rows] int32
    native: Any = None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of one layer's attention. `window` 0 is none, else how many positions a row sees, itself included."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0 is none


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin of every position, attention factor included. Dims of a head after `rotary_dim` are not rotated."""

    cosine: Tensor  # [max_len, rotary_dim / 2] float32
    sine: Tensor  # [max_len, rotary_dim / 2] float32

    def to(self, device: torch.device) -> "RopeTable":
        """The table on a device."""
        return RopeTable(self.cosine.to(device), self.sine.to(device))


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Per-head RMS norms of q and k (Qwen3, Gemma 3)."""

    q_weight: Tensor  # [head_dim]; float32 where the family adds 1 to it
    k_weight: Tensor  # [head_dim]; likewise
    eps: float
