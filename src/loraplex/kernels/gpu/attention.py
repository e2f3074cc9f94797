"""FlashInfer's attention over the page pool: a layer's keys and values are strided views of it, taken as they are."""

from collections.abc import Iterable
from subprocess import SubprocessError

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from loraplex.kernels.gpu.ops import KvPages
from loraplex.kernels.types import AttentionShape

_WORKSPACE_BYTES = 384 * 2**20  # partial results of sequences that are split over processors


class KernelsNotBuilt(RuntimeError):
    """A library could not compile what runs on the device."""


class PagedAttention:
    """Attention of steps with any number of rows a sequence, run launch by launch. `plan` it before each."""

    def __init__(
        self, shapes: Iterable[AttentionShape], dtype: torch.dtype, page_tokens: int, device: torch.device
    ) -> None:
        self._shapes = tuple({shape.window: shape for shape in shapes}.values())
        self._dtype = dtype
        self._page_tokens = page_tokens
        self._is_planned = False
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers = {
            shape.window: BatchPrefillWithPagedKVCacheWrapper(workspace, backend="fa2") for shape in self._shapes
        }

    def plan(self, kv: KvPages, row_starts: Tensor) -> None:
        """Spread the step's work over the device. row_starts [num_seqs + 1] int32 on the host.

        The first time FlashInfer compiles what its cache lacks. Raises KernelsNotBuilt.
        """
        try:
            self._plan(kv, row_starts)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, OSError, SubprocessError) as error:
            if self._is_planned:
                raise
            raise KernelsNotBuilt(f"FlashInfer cannot compile its prompt attention: {str(error)[-300:]}") from error
        self._is_planned = True

    def _plan(self, kv: KvPages, row_starts: Tensor) -> None:
        for shape in self._shapes:
            self._wrappers[shape.window].plan(
                row_starts,
                kv.starts,
                kv.pages,
                kv.last_len,
                shape.num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                self._page_tokens,
                causal=True,
                window_left=shape.window - 1 if shape.window else -1,  # FlashInfer's does not count the row itself
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
                sm_scale=shape.scale,
            )

    def run(self, q: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape, out: Tensor) -> None:
        """q and out [rows, heads, dim]; keys and values [pages, page_tokens, kv_heads, dim], strided."""
        self._wrappers[shape.window].run(q, (keys, values), out=out)
