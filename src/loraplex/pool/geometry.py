"""Sizes of the page pool: one buffer whose pages hold KV of any sequence or rank chunks of any adapter."""

from dataclasses import dataclass

from loraplex.core import ConfigError

DEFAULT_PAGE_TOKENS = 16
MAX_CHUNK_RANK = 16


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token's keys and values take in a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def elems_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """A page is the KV of `page_tokens` tokens over all layers; an adapter's chunk has at most `chunk_rank` ranks."""

    kv: KvShape
    num_pages: int
    page_tokens: int
    chunk_rank: int
    elem_bytes: int

    @property
    def page_elems(self) -> int:
        return self.kv.elems_per_token * self.page_tokens

    @property
    def page_bytes(self) -> int:
        return self.page_elems * self.elem_bytes

    def pages_for_tokens(self, num_tokens: int) -> int:
        """Pages that hold the KV of `num_tokens` tokens."""
        return -(-num_tokens // self.page_tokens)


def fit_page_tokens(kv: KvShape, max_site_dim: int) -> int:
    """Tokens a page: 16, doubled until one rank of the widest site fits, since a piece never crosses a page."""
    page_tokens = DEFAULT_PAGE_TOKENS
    while kv.elems_per_token * page_tokens < max_site_dim:
        page_tokens *= 2
    return page_tokens


def plan_geometry(
    kv: KvShape, max_site_dim: int, elem_bytes: int, *, num_pages: int | None, memory_bytes: int
) -> PoolGeometry:
    """Geometry for `num_pages`, or for as many pages as `memory_bytes` holds. Raises ConfigError if that is none."""
    page_tokens = fit_page_tokens(kv, max_site_dim)
    page_elems = kv.elems_per_token * page_tokens
    chunk_rank = min(MAX_CHUNK_RANK, page_elems // max_site_dim)
    count = num_pages if num_pages is not None else memory_bytes // (page_elems * elem_bytes)
    if count < 1:
        raise ConfigError(
            f"The pool would have {count} pages: a page is {page_elems * elem_bytes} bytes and {memory_bytes} bytes "
            "are given; raise --memory or --kv-pages."
        )
    return PoolGeometry(kv, count, page_tokens, chunk_rank, elem_bytes)
