"""A step's integers: written on the host in pinned memory, sent to the device in one copy, at addresses that stay."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.core import PageId, SequenceId
from loraplex.kernels.gpu.ops import Attention, BoundKv, KvPages
from loraplex.scheduler import UNKNOWN_TOKEN, StepPlan
from loraplex.scheduler import Sequence as SequenceState

_ROWS = ("tokens", "source", "row_pos", "row_page", "row_offset")


class StepTables:
    """Tables of the rows and sequences of a step, on both sides. Rows are those of the plan, in its order.

    `max_seqs` counts padded rows too; `num_listed`: most pages of all sequences together, where a page that several
    share counts for each.
    """

    def __init__(self, max_rows: int, max_seqs: int, num_listed: int, page_tokens: int, device: torch.device) -> None:
        self._page_tokens = page_tokens
        sizes = {**dict.fromkeys(_ROWS, max_rows), "logit_rows": max_seqs, "kv_pages": num_listed + max_seqs}
        total = sum(sizes.values())
        pinned = device.type == "cuda"
        self._host = torch.zeros(total, dtype=torch.int32, pin_memory=pinned)
        self._device = torch.zeros(total, dtype=torch.int32, device=device)
        self._host_views: dict[str, NDArray[np.int32]] = {}
        self._views: dict[str, Tensor] = {}
        start = 0
        for name, size in sizes.items():
            self._host_views[name] = self._host[start : start + size].numpy()
            self._views[name] = self._device[start : start + size]
            self._kv_at = start
            start += size
        self._starts = torch.zeros(max_seqs + 1, dtype=torch.int32, pin_memory=pinned)
        self._last_len = torch.zeros(max_seqs, dtype=torch.int32, pin_memory=pinned)
        self._row_starts = torch.zeros(max_seqs + 1, dtype=torch.int32)
        self._page_starts = np.zeros(max_rows, dtype=np.int32)  # of each row's sequence in kv_pages
        self._page_lists: dict[SequenceId, tuple[tuple[PageId, ...], NDArray[np.int32]]] = {}

    def device(self, name: str, size: int | None = None) -> Tensor:
        """A table on the device, or its first `size` entries."""
        return self._views[name][:size]

    def bound(self, num_rows: int, attention: Attention) -> BoundKv:
        """Where the first `num_rows` rows stand."""
        page, offset, position = (self.device(name, num_rows) for name in ("row_page", "row_offset", "row_pos"))
        return BoundKv(page, offset, position, attention)

    def fill(
        self,
        plan: StepPlan,
        sequences: Mapping[SequenceId, SequenceState],
        drawn_at: Mapping[SequenceId, int],
        pad: int,
    ) -> None:
        """Write a step on the host. `drawn_at`: place of each sequence's last draw among those of the step before.

        `pad` rows follow that belong to no sequence: they store nothing and attend to one token of page 0.
        """
        tokens: list[int] = []
        source: list[int] = []
        for chunk in plan.chunks:
            part = sequences[chunk.seq_id].token_ids[chunk.start : chunk.start + chunk.num_tokens]
            source.extend([-1] * len(part))
            if part[-1] == UNKNOWN_TOKEN:
                part[-1], source[-1] = 0, drawn_at[chunk.seq_id]
            tokens.extend(part)
        counts = np.array([chunk.num_tokens for chunk in plan.chunks])
        starts = np.array([chunk.start for chunk in plan.chunks])
        ends = np.cumsum(counts)
        num_rows, host = int(ends[-1]), self._host_views
        positions = np.arange(num_rows) + np.repeat(starts - (ends - counts), counts)
        host["tokens"][:num_rows], host["source"][:num_rows] = tokens, source
        host["row_pos"][:num_rows] = positions
        host["row_offset"][:num_rows] = positions % self._page_tokens
        self._pad(num_rows, pad)
        samples = np.array([chunk.samples for chunk in plan.chunks])
        host["logit_rows"][: samples.sum()] = ends[samples] - 1
        host["logit_rows"][samples.sum() :] = 0
        self._row_starts.numpy()[1 : len(ends) + 1] = ends
        first_page = np.repeat(self._fill_pages(plan, starts + counts, num_rows, pad), counts)
        self._page_starts[:num_rows] = first_page
        host["row_page"][:num_rows] = host["kv_pages"][first_page + positions // self._page_tokens]

    def fill_empty(self, num_rows: int) -> None:
        """Write a step of rows that belong to no sequence: what a graph is captured with."""
        self._pad(0, num_rows)
        self._pad_pages(0, 0, 0, num_rows)

    def _pad(self, first: int, count: int) -> None:
        rows = slice(first, first + count)
        for name, value in (("tokens", 0), ("source", -1), ("row_pos", 0), ("row_page", -1), ("row_offset", 0)):
            self._host_views[name][rows] = value

    def _pad_pages(self, num_pages: int, first_row: int, first: int, count: int) -> None:
        """Page lists of `count` rows from `first_row`, which stand for as many sequences from `first`."""
        self._host_views["kv_pages"][num_pages : num_pages + count] = 0
        self._page_starts[first_row : first_row + count] = num_pages + np.arange(count)
        self._starts.numpy()[first + 1 : first + count + 1] = num_pages + np.arange(1, count + 1)
        self._last_len.numpy()[first : first + count] = 1

    def _fill_pages(self, plan: StepPlan, lengths: NDArray[np.int64], num_rows: int, pad: int) -> NDArray[np.int64]:
        """Page lists of every sequence, and of `pad` rows of none; where each begins [num_seqs]."""
        kept = self._page_lists
        self._page_lists = {chunk.seq_id: self._page_list(chunk.pages, kept.get(chunk.seq_id)) for chunk in plan.chunks}
        used = -(-lengths // self._page_tokens)
        lists = [pages[:count] for (_, pages), count in zip(self._page_lists.values(), used.tolist(), strict=True)]
        ends, num_seqs = np.cumsum(used), len(lists)
        self._host_views["kv_pages"][: ends[-1]] = np.concatenate(lists)
        self._starts.numpy()[1 : num_seqs + 1] = ends
        self._last_len.numpy()[:num_seqs] = lengths - (used - 1) * self._page_tokens
        self._pad_pages(int(ends[-1]), num_rows, num_seqs, pad)
        return np.asarray(ends - used)

    @staticmethod
    def _page_list(
        pages: tuple[PageId, ...], kept: tuple[tuple[PageId, ...], NDArray[np.int32]] | None
    ) -> tuple[tuple[PageId, ...], NDArray[np.int32]]:
        """A sequence's pages as an array; the last step's where they are the same."""
        return kept if kept is not None and kept[0] == pages else (pages, np.array(pages, dtype=np.int32))

    def send(self, num_seqs: int) -> None:
        """One copy to the device, of all tables, and of the pages that `num_seqs` sequences use."""
        end = self._kv_at + int(self._starts[num_seqs])
        self._device[:end].copy_(self._host[:end], non_blocking=True)

    def kv_pages(self, num_seqs: int) -> KvPages:
        """The step's pages as attention is planned with."""
        starts = self._starts[: num_seqs + 1]
        return KvPages(starts, self._last_len[:num_seqs], self.device("kv_pages", int(starts[-1])))

    def contexts(self, num_rows: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """What each row attends to: where its sequence begins in the page lists, and tokens up to and with itself."""
        return self._page_starts[:num_rows], self._host_views["row_pos"][:num_rows].astype(np.int64) + 1

    def row_starts(self, num_seqs: int) -> Tensor:
        """First row of each sequence [num_seqs + 1] int32 on the host."""
        return self._row_starts[: num_seqs + 1]
