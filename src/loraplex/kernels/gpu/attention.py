"""FlashInfer's attention over the page pool: a layer's keys and values are strided views of it, taken as they are."""

from collections.abc import Iterable

import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from loraplex.kernels.gpu.ops import KvPages
from loraplex.kernels.types import AttentionShape

_WORKSPACE_BYTES = 384 * 2**20  # partial results of sequences that are split over processors


def _window_left(shape: AttentionShape) -> int:
    """FlashInfer's window: positions a row sees to its left; -1 is all."""
    return shape.window - 1 if shape.window else -1


class StepAttention:
    """Attention of one step, or of every step of one CUDA graph. `plan` it before each."""

    def __init__(self, shared: "PagedAttention", num_seqs: int | None, pages: Tensor | None) -> None:
        self._shared = shared
        self._wrappers = {
            shape.window: shared.prefill_wrapper() if num_seqs is None else shared.decode_wrapper(num_seqs, pages)
            for shape in shared.shapes
        }
        self._is_decode = num_seqs is not None

    def plan(self, kv: KvPages, row_starts: Tensor | None = None) -> None:
        """Spread the work over the device. row_starts [num_seqs + 1] int32 on the host, where not one row each."""
        shared = self._shared
        for shape in shared.shapes:
            wrapper, sizes = self._wrappers[shape.window], (shape.num_heads, shape.num_kv_heads, shape.head_dim)
            options = {
                "window_left": _window_left(shape),
                "q_data_type": shared.dtype,
                "kv_data_type": shared.dtype,
                "sm_scale": shape.scale,
            }
            if self._is_decode:
                wrapper.plan(kv.starts, kv.pages, kv.last_len, *sizes, shared.page_tokens, **options)
            else:
                assert row_starts is not None
                wrapper.plan(
                    row_starts, kv.starts, kv.pages, kv.last_len, *sizes, shared.page_tokens, causal=True, **options
                )

    def run(self, q: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape, out: Tensor) -> None:
        """q and out [rows, heads, dim]; keys and values [pages, page_tokens, kv_heads, dim], strided."""
        self._wrappers[shape.window].run(q, (keys, values), out=out)


class PagedAttention:
    """What the attention of all steps shares: sizes, and one workspace, since steps run one after the other."""

    def __init__(
        self, shapes: Iterable[AttentionShape], dtype: torch.dtype, page_tokens: int, device: torch.device
    ) -> None:
        self.shapes = tuple({shape.window: shape for shape in shapes}.values())
        self.dtype = dtype
        self.page_tokens = page_tokens
        self._device = device
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def decode_wrapper(self, num_seqs: int, pages: Tensor | None) -> BatchDecodeWithPagedKVCacheWrapper:
        """For graphs of one row a sequence; `pages` is the buffer that `KvPages.pages` will be a part of."""

        def table(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self._device)

        return BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=table(num_seqs + 1),
            paged_kv_indices_buffer=pages,
            paged_kv_last_page_len_buffer=table(num_seqs),
            backend="fa2",
        )

    def prefill_wrapper(self) -> BatchPrefillWithPagedKVCacheWrapper:
        """For any rows; the same compiled module as decode's."""
        return BatchPrefillWithPagedKVCacheWrapper(self._workspace, backend="fa2")

    def for_graph(self, num_seqs: int, pages: Tensor) -> StepAttention:
        """Attention of a graph of `num_seqs` sequences of one row each."""
        return StepAttention(self, num_seqs, pages)

    def for_any(self) -> StepAttention:
        """Attention of steps that run without a graph."""
        return StepAttention(self, None, None)
