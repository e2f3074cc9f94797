"""Where an adapter lies in its pages."""

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.pool import AdapterLayout, SiteRank, plan_geometry, plan_layout

from .shapes import LLAMA_3_8B, SMOLLM2_1_7B, SMOLLM2_135M, ModelShape

RANKS = (1, 3, 4, 8, 16, 17, 64)


def check_layout(layout: AdapterLayout, sites: list[SiteRank], page_elems: int, chunk_rank: int) -> None:
    """Every rank of every site has its place, inside a page and alone there."""
    dims = {site.site_idx: (site.d_in, site.d_out) for site in sites}
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    ranks = []
    for chunk in layout.chunks:
        assert 1 <= chunk.rank <= chunk_rank
        ranks += [(chunk.site_idx, chunk.rank_start + i) for i in range(chunk.rank)]
        for piece, dim in zip((chunk.a, chunk.b), dims[chunk.site_idx], strict=True):
            spans[piece.page_idx].append((piece.offset, piece.offset + chunk.rank * dim))
    assert ranks == [(site.site_idx, rank) for site in sites for rank in range(site.rank)]
    assert sorted(spans) == list(range(layout.num_pages))
    for page_spans in spans.values():
        page_spans.sort()
        assert page_spans[0][0] >= 0
        assert page_spans[-1][1] <= page_elems
        for (_, end), (start, _) in pairwise(page_spans):
            assert end <= start, "two pieces overlap"


@st.composite
def adapters(draw: st.DrawFn) -> tuple[list[SiteRank], int, int]:
    page_elems = draw(st.integers(1, 400))
    chunk_rank = draw(st.integers(1, min(16, page_elems)))
    dims = st.integers(1, page_elems // chunk_rank)
    drawn = draw(st.lists(st.tuples(dims, dims, st.integers(0, 40)), max_size=12))
    sites = [SiteRank(3 * i, d_in, d_out, rank) for i, (d_in, d_out, rank) in enumerate(drawn)]
    return sites, page_elems, chunk_rank


@settings(deadline=None)
@given(adapters())
def test_every_rank_is_placed_once_inside_a_page(case: tuple[list[SiteRank], int, int]) -> None:
    sites, page_elems, chunk_rank = case
    layout = plan_layout(sites, page_elems, chunk_rank)
    check_layout(layout, sites, page_elems, chunk_rank)
    assert layout == plan_layout(tuple(sites), page_elems, chunk_rank), "the same shape gives the same layout"


@pytest.mark.parametrize("shape", [LLAMA_3_8B, SMOLLM2_135M, SMOLLM2_1_7B], ids=["llama-3-8b", "smollm2-135m", "1.7b"])
@pytest.mark.parametrize("rank", RANKS)
def test_real_adapters_take_at_most_one_page_over_the_minimum(shape: ModelShape, rank: int) -> None:
    geometry = plan_geometry(shape.kv, shape.max_site_dim, 2, num_pages=1, memory_bytes=0)
    sites = shape.sites(rank)
    layout = plan_layout(sites, geometry.page_elems, geometry.chunk_rank)
    check_layout(layout, sites, geometry.page_elems, geometry.chunk_rank)
    elems = sum(site.rank * (site.d_in + site.d_out) for site in sites)
    assert layout.num_pages <= -(-elems // geometry.page_elems) + 1


def test_llama_3_8b_pages_follow_the_true_rank() -> None:
    pages = [plan_layout(LLAMA_3_8B.sites(rank), 2**20, 16).num_pages for rank in (1, 4, 8, 16, 64)]
    assert pages == [3, 10, 20, 41, 161]  # the minimum is 2.5 a rank


def test_rank_64_is_four_chunks_and_rank_4_is_one() -> None:
    layout = plan_layout([SiteRank(0, 8, 8, 64), SiteRank(1, 8, 8, 4), SiteRank(2, 8, 8, 17)], 1024, 16)
    sizes = [(chunk.site_idx, chunk.rank_start, chunk.rank) for chunk in layout.chunks]
    assert sizes == [(0, 0, 16), (0, 16, 16), (0, 32, 16), (0, 48, 16), (1, 0, 4), (2, 0, 16), (2, 16, 1)]


def test_an_absent_site_costs_nothing() -> None:
    site = SiteRank(5, 8, 8, 16)
    assert plan_layout([SiteRank(4, 8, 8, 0), site], 128, 16) == plan_layout([site], 128, 16)
    assert plan_layout([], 128, 16) == AdapterLayout((), 0)


def test_a_piece_may_fill_a_page_exactly() -> None:
    layout = plan_layout([SiteRank(0, 8, 8, 16)], 128, 16)
    assert layout.num_pages == 2
    assert [(c.a.page_idx, c.a.offset, c.b.page_idx, c.b.offset) for c in layout.chunks] == [(0, 0, 1, 0)]
