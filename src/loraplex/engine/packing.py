"""From a validated adapter to page images: done once, at registration, so that a load is one copy a page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.adapters import Adapter, AdapterModule, TensorView
from loraplex.core import AdapterRefused, BaseSite, PageId, RefusalReason
from loraplex.engine.host_arena import HostPages, LeasedPages
from loraplex.pool import AdapterLayout, Piece, PoolGeometry, SiteRank, plan_layout

_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


Allocate = Callable[[int], LeasedPages]
"""Leases host memory for so many pages. Raises HostMemoryFull."""


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter in host memory in the form its pages have."""

    image: LeasedPages  # in the pool's dtype
    chunk_start: NDArray[np.int32]  # [num_sites + 1]
    chunk_rank: NDArray[np.int32]  # [num_chunks]
    piece_page: NDArray[np.int64]  # [2, num_chunks]: page of A and of B
    piece_offset: NDArray[np.int64]  # [2, num_chunks]: element in that page
    scale: NDArray[np.float32]  # [num_sites]

    @property
    def num_pages(self) -> int:
        return len(self.image)

    def rank(self, sites: Sequence[BaseSite]) -> float:
        """Ranks of all sites together that weigh as much as the adapter: what a step pays for it."""
        sizes = np.array([site.d_in + site.d_out for site in sites], dtype=np.int64)
        site_of = np.repeat(np.arange(len(sites)), np.diff(self.chunk_start))
        return float((sizes[site_of] * self.chunk_rank).sum() / sizes.sum()) if len(sites) else 0.0

    def chunk_offsets(self, pages: Sequence[PageId], page_elems: int) -> NDArray[np.int64]:
        """Element offsets of A and B in the pool [2, num_chunks], the adapter lying in `pages`."""
        offsets: NDArray[np.int64] = np.asarray(pages, dtype=np.int64)[self.piece_page] * page_elems + self.piece_offset
        return offsets


def find_packing_fault(packed: PackedAdapter, adapter: Adapter, sites: Sequence[BaseSite]) -> str | None:
    """Where packed pages and tables hold something else than this adapter, value by value; None if nowhere."""
    modules = {module.site.name: module for module in adapter.modules}
    expected = np.zeros(len(sites), dtype=np.float32)
    for index, site in enumerate(sites):
        module = modules.get(site.name)
        chunks = range(*packed.chunk_start[index : index + 2].tolist())
        if module is None:
            if chunks:
                return f"the pages hold weights of {site.name}, which the adapter has not"
        elif not _module_lies_in(packed, chunks, module):
            return f"the pages hold other weights of {site.name} than the adapter"
        else:
            expected[index] = module.scale
    wrong = np.flatnonzero(packed.scale != expected)
    return f"the tables hold another scale of {sites[int(wrong[0])].name} than the adapter" if len(wrong) else None


def _module_lies_in(packed: PackedAdapter, chunks: range, module: AdapterModule) -> bool:
    image, done = packed.image, 0
    a, b = (_cast(module, view, image.dtype) for view in (module.a, module.b))
    for chunk in chunks:
        ranks = slice(done, done + int(packed.chunk_rank[chunk]))
        done = ranks.stop
        for half, wanted in enumerate((a[ranks], b.T[ranks])):
            page, offset = int(packed.piece_page[half, chunk]), int(packed.piece_offset[half, chunk])
            if not torch.equal(image[page][offset : offset + wanted.numel()].view(wanted.shape), wanted):
                return False
    return done == module.rank


def as_tensor(view: TensorView) -> Tensor:
    """The tensor as stored, a copy."""
    return torch.frombuffer(bytearray(view.data), dtype=_TORCH_DTYPES[view.dtype]).reshape(view.shape)


def _cast(module: AdapterModule, view: TensorView, dtype: torch.dtype) -> Tensor:
    """The tensor in the pool's dtype. Raises AdapterRefused if a value does not fit it."""
    cast = as_tensor(view).to(dtype)
    if not bool(torch.isfinite(cast).all()):
        raise AdapterRefused(
            RefusalReason.NONFINITE,
            f"The tensor {view.name} has values beyond the range of {dtype}, in which {module.site.name} is served "
            "(--dtype).",
            view.name,
        )
    return cast


def check_fits(num_pages: int, geometry: PoolGeometry) -> None:
    """Raise AdapterRefused for an adapter of more pages than the pool can hold beside a request."""
    if num_pages >= geometry.num_pages:
        raise AdapterRefused(
            RefusalReason.TOO_LARGE,
            f"The adapter needs {num_pages} pages and must leave room for a request; the pool has "
            f"{geometry.num_pages} (--kv-pages, --memory).",
        )


def pack_adapter(
    adapter: Adapter, sites: Sequence[BaseSite], geometry: PoolGeometry, allocate: Allocate
) -> PackedAdapter:
    """Lay out and fill the page images, in the dtype of the pages that `allocate` gives.

    Raises AdapterRefused (NONFINITE, TOO_LARGE) and HostMemoryFull; then nothing is leased.
    """
    index = {site.name: i for i, site in enumerate(sites)}
    ranks = [SiteRank(index[m.site.name], m.site.d_in, m.site.d_out, m.rank) for m in adapter.modules]
    layout = plan_layout(ranks, geometry.page_elems, geometry.chunk_rank)
    check_fits(layout.num_pages, geometry)
    image = allocate(layout.num_pages)
    try:
        _fill(image, layout, {index[m.site.name]: m for m in adapter.modules})
    except BaseException:
        image.free()
        raise
    scale = np.zeros(len(sites), dtype=np.float32)
    for module in adapter.modules:
        scale[index[module.site.name]] = module.scale
    counts = np.bincount([chunk.site_idx for chunk in layout.chunks], minlength=len(sites))
    return PackedAdapter(
        image=image,
        chunk_start=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        chunk_rank=np.array([chunk.rank for chunk in layout.chunks], dtype=np.int32),
        piece_page=np.array([[c.a.page_idx for c in layout.chunks], [c.b.page_idx for c in layout.chunks]], np.int64),
        piece_offset=np.array([[c.a.offset for c in layout.chunks], [c.b.offset for c in layout.chunks]], np.int64),
        scale=scale,
    )


def _fill(image: HostPages, layout: AdapterLayout, modules: dict[int, AdapterModule]) -> None:
    """Copy every chunk's A [rank, d_in] and transposed B [rank, d_out] to its place."""
    current, a, b, dtype = -1, image[0], image[0], image.dtype
    for chunk in layout.chunks:
        if chunk.site_idx != current:
            current, module = chunk.site_idx, modules[chunk.site_idx]
            a, b = _cast(module, module.a, dtype), _cast(module, module.b, dtype).T
        ranks = slice(chunk.rank_start, chunk.rank_start + chunk.rank)
        _put(image, chunk.a, a[ranks])
        _put(image, chunk.b, b[ranks])


def _put(image: HostPages, piece: Piece, values: Tensor) -> None:
    image[piece.page_idx][piece.offset : piece.offset + values.numel()].view(values.shape).copy_(values)
