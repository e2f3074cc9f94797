"""What each linear adds for an adapter, site by site: sharper than logits, in which rounding hides a single site.

Random rows go through every linear with and without the adapter, by the same tables and operations as in a step, but
with pages of their own. What came in between is compared with scale * (x A^T) B^T of the adapter's file in float32.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from loraplex.adapters import Adapter, AdapterModule
from loraplex.core import BaseSite, PageId, SequenceId
from loraplex.engine.batch import BatchBuilder, PageBuffer
from loraplex.engine.packing import PackedAdapter, as_tensor
from loraplex.kernels import Linear, LoraBatch
from loraplex.model import Decoder
from loraplex.pool import PoolGeometry
from loraplex.scheduler import ScheduledChunk, StepPlan

_BASE_ROWS, _ROWS = 3, 16  # without the adapter, then with it
_SHARE = 0.05  # of what a site adds: by how much its size may be off, beside what rounding explains
_DEVIATIONS = 6.0  # of rounding
_SEED = 20_260_731


class SiteCheck:
    """The check of one adapter, a layer at a time, so that requests' steps run between. Made in any thread.

    Not for operations whose batches are bound to a runner's buffers (`Ops.in_graphs`).
    """

    def __init__(
        self,
        decoder: Decoder,
        geometry: PoolGeometry,
        packed: PackedAdapter,
        adapter: Adapter,
        sites: Sequence[BaseSite],
    ) -> None:
        self._decoder = decoder
        self._sites = sites
        self._modules = {module.site.name: module for module in adapter.modules}
        self._lora = _one_adapter(decoder, geometry, packed, adapter)
        self._random = torch.Generator().manual_seed(_SEED)
        self.num_layers = len(decoder.layers)

    @torch.inference_mode()
    def find_fault(self, layer: int) -> str | None:
        """Where a layer's linears add something else than the adapter's file says. For the thread that steps."""
        own = self._decoder.layers[layer]
        lora = self._decoder.ops.bind_lora(self._lora)
        faults = (self._fault_of(linear, lora) for linear in (own.qkv, own.output, own.gate_up, own.down))
        return next((fault for fault in faults if fault is not None), None)

    def _fault_of(self, linear: Linear, lora: LoraBatch) -> str | None:
        rows = torch.randn(_BASE_ROWS + _ROWS, linear.d_in, generator=self._random)
        x = rows.to(self._decoder.device, self._decoder.dtype)
        plain, adapted = (x.new_empty(len(x), linear.d_out) for _ in range(2))
        self._decoder.ops.linear(x, linear, plain)
        self._decoder.ops.linear(x, linear, adapted, lora)
        if not torch.equal(plain[:_BASE_ROWS], adapted[:_BASE_ROWS]):
            return f"{self._sites[linear.sites[0].index].name} changes rows of the base"
        for site in linear.sites:
            name, columns = self._sites[site.index].name, slice(site.out_offset, site.out_offset + site.d_out)
            before, after = plain[_BASE_ROWS:, columns], adapted[_BASE_ROWS:, columns]
            if not _is_sum(before, after, x[_BASE_ROWS:], self._modules.get(name)):
                return f"{name} adds something else than the adapter"
        return None


def _one_adapter(decoder: Decoder, geometry: PoolGeometry, packed: PackedAdapter, adapter: Adapter) -> LoraBatch:
    """A step of rows without and with the adapter, in a pool that holds nothing else."""
    buffer = PageBuffer(replace(geometry, num_pages=packed.num_pages), decoder.dtype, decoder.device)
    pages = tuple(PageId(page) for page in range(packed.num_pages))
    buffer.fill(pages, packed.image)
    chunks = (
        ScheduledChunk(SequenceId(0), 0, _BASE_ROWS, False, None, ()),
        ScheduledChunk(SequenceId(1), 0, _ROWS, False, adapter.digest, ()),
    )
    plan = StepPlan(chunks, ((adapter.digest, pages),), (), 0)
    return BatchBuilder(buffer).lora(plan, {adapter.digest: packed})


def _is_sum(before: Tensor, after: Tensor, x: Tensor, module: AdapterModule | None) -> bool:
    """Whether after = before + what the module adds, but for rounding. Values that are not finite: the logits tell."""
    if module is None:
        return torch.equal(before, after)
    a, b = (as_tensor(view).to(x.device, torch.float32) for view in (module.a, module.b))
    wanted = module.scale * ((x.float() @ a.T) @ b.T)
    got = after.float() - before.float()
    size = float(wanted.norm())
    if not math.isfinite(size) or not bool(torch.isfinite(after).all()):
        return True
    rounding = torch.finfo(before.dtype).eps * float(torch.maximum(before.float().abs(), after.float().abs()).norm())
    if not size:
        return float(got.norm()) <= rounding
    along = float((got * wanted).sum()) / size**2  # 1 where they agree; rounding has no direction
    off = _DEVIATIONS * rounding / size / math.sqrt(wanted.numel())
    return abs(along - 1.0) <= _SHARE + off and float((got - wanted).norm()) <= _SHARE * size + 2 * rounding
