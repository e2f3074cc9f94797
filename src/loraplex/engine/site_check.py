"""What each linear adds for an adapter, site by site: sharper than logits, in which rounding hides a single site.

Random rows go through every linear with and without the adapter, by the same tables and operations as in a step, but
with pages of their own. What came in between is compared with scale * (x A^T) B^T of the adapter's file in float32.
"""

import math
from collections.abc import Iterator, Sequence
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


@torch.inference_mode()
def adds_exactly(
    decoder: Decoder, geometry: PoolGeometry, packed: PackedAdapter, adapter: Adapter, sites: Sequence[BaseSite]
) -> bool:
    """Whether every linear adds what the adapter's file says, and nothing else. For the thread that steps.

    Not for operations whose batches are bound to a runner's buffers (`Ops.in_graphs`).
    """
    ops, random = decoder.ops, torch.Generator().manual_seed(_SEED)
    lora = ops.bind_lora(_one_adapter(decoder, geometry, packed, adapter))
    modules = {module.site.name: module for module in adapter.modules}
    for linear in _linears(decoder):
        rows = torch.randn(_BASE_ROWS + _ROWS, linear.d_in, generator=random)
        x = rows.to(decoder.device, decoder.dtype)
        plain, adapted = (x.new_empty(len(x), linear.d_out) for _ in range(2))
        ops.linear(x, linear, plain)
        ops.linear(x, linear, adapted, lora)
        if not torch.equal(plain[:_BASE_ROWS], adapted[:_BASE_ROWS]):
            return False
        for site in linear.sites:
            columns = slice(site.out_offset, site.out_offset + site.d_out)
            before, after = plain[_BASE_ROWS:, columns], adapted[_BASE_ROWS:, columns]
            if not _is_sum(before, after, x[_BASE_ROWS:], modules.get(sites[site.index].name)):
                return False
    return True


def _linears(decoder: Decoder) -> Iterator[Linear]:
    for layer in decoder.layers:
        yield from (layer.qkv, layer.output, layer.gate_up, layer.down)


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
