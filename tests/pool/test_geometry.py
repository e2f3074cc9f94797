"""Sizes of pages and chunks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core import ConfigError
from loraplex.pool import KvShape, PoolGeometry, plan_geometry
from loraplex.pool.geometry import DEFAULT_PAGE_TOKENS, MAX_CHUNK_RANK, fit_page_tokens

from .shapes import LLAMA_3_8B

MIB = 2**20


def test_llama_3_8b_page_is_2_mib_of_bf16() -> None:
    geometry = plan_geometry(LLAMA_3_8B.kv, LLAMA_3_8B.max_site_dim, 2, num_pages=None, memory_bytes=100 * MIB)
    assert geometry == PoolGeometry(LLAMA_3_8B.kv, 50, page_tokens=16, chunk_rank=16, elem_bytes=2)
    assert geometry.page_bytes == 2 * MIB
    assert geometry.page_elems == MIB


def test_llama_3_8b_rank_costs_40_tokens_of_kv() -> None:
    rank_elems = sum(site.d_in + site.d_out for site in LLAMA_3_8B.sites(rank=1))
    assert 2 * rank_elems == 5_242_880
    assert rank_elems == 40 * LLAMA_3_8B.kv.elems_per_token


@pytest.mark.parametrize(
    ("max_site_dim", "page_tokens"),
    [(1, 16), (128, 16), (129, 32), (256, 32), (257, 64), (1024, 128), (1025, 256)],
)
def test_page_tokens_double_until_one_rank_fits(max_site_dim: int, page_tokens: int) -> None:
    assert fit_page_tokens(KvShape(1, 1, 4), max_site_dim) == page_tokens  # 8 elements a token


def test_chunk_rank_is_what_fits_a_page() -> None:
    def chunk_rank(max_site_dim: int) -> int:
        return plan_geometry(KvShape(1, 1, 4), max_site_dim, 4, num_pages=1, memory_bytes=0).chunk_rank

    assert [chunk_rank(dim) for dim in (8, 9, 64, 65, 128, 129)] == [16, 14, 2, 1, 1, 1]


@settings(deadline=None)
@given(
    layers=st.integers(1, 80),
    heads=st.integers(1, 32),
    head_dim=st.sampled_from([8, 64, 128]),
    dim=st.integers(1, 200_000),
)
def test_a_chunk_of_the_widest_site_always_fits(layers: int, heads: int, head_dim: int, dim: int) -> None:
    kv = KvShape(layers, heads, head_dim)
    geometry = plan_geometry(kv, dim, 2, num_pages=1, memory_bytes=0)
    assert 1 <= geometry.chunk_rank <= MAX_CHUNK_RANK
    assert geometry.chunk_rank * dim <= geometry.page_elems
    if geometry.page_tokens > DEFAULT_PAGE_TOKENS:
        assert geometry.page_elems < 2 * dim, "half the page would have been enough"


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_pages_for_tokens_rounds_up(num_tokens: int, num_pages: int) -> None:
    geometry = plan_geometry(KvShape(1, 1, 4), 8, 4, num_pages=1, memory_bytes=0)
    assert geometry.pages_for_tokens(num_tokens) == num_pages


def test_asked_pages_win_over_memory() -> None:
    assert plan_geometry(KvShape(1, 1, 4), 8, 4, num_pages=7, memory_bytes=0).num_pages == 7


def test_memory_is_filled_with_whole_pages() -> None:
    kv = KvShape(1, 1, 4)  # a page is 8 * 16 * 4 = 512 bytes
    counts = [plan_geometry(kv, 8, 4, num_pages=None, memory_bytes=n).num_pages for n in (512, 1023, 1024)]
    assert counts == [1, 1, 2]


@pytest.mark.parametrize(("num_pages", "memory_bytes", "shown"), [(0, 0, 0), (-3, 0, -3), (None, 511, 0), (None, 0, 0)])
def test_no_page_is_refused_with_sizes_and_knobs(num_pages: int | None, memory_bytes: int, shown: int) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_geometry(KvShape(1, 1, 4), 8, 4, num_pages=num_pages, memory_bytes=memory_bytes)
    message = caught.value.message
    for part in (f"{shown} pages", "a page is 512 bytes", f"{memory_bytes} bytes", "--memory", "--kv-pages"):
        assert part in message
