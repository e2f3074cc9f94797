"""Where an adapter's rank chunks lie in its pages. A pure function of shapes, so it is done once, at registration.

A chunk is at most `chunk_rank` ranks of one site and has two pieces, A [rank, d_in] and B transposed [rank, d_out]
(docs/adr/0003). A piece never crosses a page. Cost follows the true rank; a site without an adapter takes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

OPEN_PAGES = 8  # unfilled pages a piece may still go to; at most one page over the minimum on Llama-3-8B shapes


@dataclass(frozen=True, slots=True)
class SiteRank:
    """An adapted site: its index among the base's sites, its sizes and the adapter's rank there."""

    site_idx: int
    d_in: int
    d_out: int
    rank: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Place of a piece: page of the adapter (0 .. num_pages - 1) and element offset in it."""

    page_idx: int
    offset: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Ranks [rank_start, rank_start + rank) of one site."""

    site_idx: int
    rank_start: int
    rank: int
    a: Piece
    b: Piece


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """All chunks in site order, and the pages they take."""

    chunks: tuple[Chunk, ...]
    num_pages: int


class _Packer:
    """First fit over the last few open pages."""

    __slots__ = ("num_pages", "open_pages", "page_elems")

    def __init__(self, page_elems: int) -> None:
        self.page_elems = page_elems
        self.open_pages: list[list[int]] = []  # [page_idx, used]
        self.num_pages = 0

    def place(self, elems: int) -> Piece:
        for page in self.open_pages:
            if page[1] + elems <= self.page_elems:
                piece = Piece(page[0], page[1])
                page[1] += elems
                return piece
        self.open_pages.append([self.num_pages, elems])
        if len(self.open_pages) > OPEN_PAGES:
            self.open_pages.pop(0)
        self.num_pages += 1
        return Piece(self.num_pages - 1, 0)


def plan_layout(sites: Sequence[SiteRank], page_elems: int, chunk_rank: int) -> AdapterLayout:
    """Place every chunk of `sites` (in order). Needs chunk_rank * max(d_in, d_out) <= page_elems."""
    packer = _Packer(page_elems)
    chunks = []
    for site in sites:
        for start in range(0, site.rank, chunk_rank):
            rank = min(chunk_rank, site.rank - start)
            a, b = packer.place(rank * site.d_in), packer.place(rank * site.d_out)
            chunks.append(Chunk(site.site_idx, start, rank, a, b))
    return AdapterLayout(tuple(chunks), packer.num_pages)
