"""What an adapter must compute: the base with the adapter merged into its weights, whole sequences, in float32.

Nothing of the engine's own path for adapters is used: no pages, no packed images, no kernels, and the tensors are those
of the adapter's file. Weights are merged piece by piece when they are used, so no copy of the base exists.

Every sequence runs twice in the same batch. In the second one the output of each linear is multiplied by random numbers
close to 1, as if it were rounded to the served type: what that does to the logits tells how sensitive the model is to
rounding, which an adapter can change a lot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loraplex.adapters import AdapterModule, TensorView
from loraplex.engine.packing import as_tensor
from loraplex.engine.probes import Probe
from loraplex.kernels import KvBatch, Linear, LoraBatch, LoraSite, TorchOps
from loraplex.model import Checkpoint, DecoderConfig, DeviceBatch, LoadOptions, reference_decoder

_PIECE_ELEMS = 2**24  # of a weight that are widened at once: 64 MiB
_LEAST_ROUNDING = 2.0**-16  # far above what float32 itself adds
_SEED = 20_260_731


@dataclass(frozen=True, slots=True)
class ReferenceLogits:
    """Logits [positions, vocab] float32 on the host, in the order of `ProbeRun.logits`."""

    exact: Tensor
    rounded: Tensor  # as if every linear's output were rounded to the served type


class MergedOps(TorchOps):
    """Torch's operations in float32, with W + scale * B A in place of W at each site of an adapter.

    Weights are rounded to the type they are served in first; the adapter's tensors are taken as they are stored. The
    second half of the rows is disturbed after every linear with sites.
    """

    def __init__(self, served: torch.dtype, modules: Mapping[int, AdapterModule], device: torch.device) -> None:
        self._served = served
        self._modules = modules  # by site index
        self._random = torch.Generator(device).manual_seed(_SEED)
        self._rounding = max(torch.finfo(served).eps / 2, _LEAST_ROUNDING)

    def linear(self, x: Tensor, linear: Linear, out: Tensor, lora: LoraBatch | None = None) -> None:
        assert lora is None, "what is merged needs no adapters in the batch"
        step = max(1, _PIECE_ELEMS // linear.d_in)
        for first in range(0, linear.d_out, step):
            rows = slice(first, min(first + step, linear.d_out))
            weight = linear.weight[rows].to(self._served).to(x.device, torch.float32, copy=True)
            for site in linear.sites:
                self._merge(weight, rows, site)
            bias = None if linear.bias is None else linear.bias[rows].float()
            out[:, rows] = torch.nn.functional.linear(x, weight, bias)
        if linear.sites:
            disturbed = out[out.shape[0] // 2 :]
            noise = torch.randn(disturbed.shape, generator=self._random, device=out.device)
            disturbed *= 1.0 + self._rounding * noise

    def _merge(self, weight: Tensor, rows: slice, site: LoraSite) -> None:
        """weight [rows, d_in] += scale * B A, for those of the rows that are the site's."""
        first, last = max(rows.start, site.out_offset), min(rows.stop, site.out_offset + site.d_out)
        module = self._modules.get(site.index)
        if module is None or first >= last:
            return
        a = _widen(module.a, weight.device)
        b = _widen(module.b, weight.device)[first - site.out_offset : last - site.out_offset]
        weight[first - rows.start : last - rows.start] += module.scale * (b @ a)


def _widen(view: TensorView, device: torch.device) -> Tensor:
    return as_tensor(view).to(device, torch.float32)


@torch.inference_mode()
def merged_logits(
    config: DecoderConfig,
    checkpoint: Checkpoint,
    options: LoadOptions,
    probes: Sequence[Probe],
    modules: Mapping[int, AdapterModule],
) -> ReferenceLogits:
    """What the base gives with the modules (by index of their site) merged; none of them is the base alone.

    `options` has the device and the served type; its sizes are not looked at.
    """
    twice = (*probes, *probes)
    lengths = [len(probe.computed) for probe in twice]
    tokens = torch.tensor([token for probe in twice for token in probe.computed])
    options = replace(options, max_rows=len(tokens), max_model_len=max(lengths))
    served = options.dtype or getattr(torch, config.dtype)
    ops = MergedOps(served, modules, options.device)
    decoder, token_ids = reference_decoder(config, checkpoint, ops, options, tokens)
    kv = _whole_sequences(config, lengths, options.device)
    batch = DeviceBatch(token_ids, _answer_rows(twice).to(options.device), kv, None)
    exact, rounded = decoder.forward(batch).cpu().chunk(2)
    return ReferenceLogits(exact, rounded)


def _answer_rows(probes: Sequence[Probe]) -> Tensor:
    """Rows of the positions that are compared: the last of each prompt, and those of its answer but the last."""
    rows: list[int] = []
    first = 0
    for probe in probes:
        end = first + len(probe.computed)
        rows += range(first + len(probe.prompt) - 1, end)
        first = end
    return torch.tensor(rows)


def _whole_sequences(config: DecoderConfig, lengths: Sequence[int], device: torch.device) -> KvBatch:
    """Room for the keys and values of all sequences, one page for each."""
    heads = (config.num_kv_heads, config.head_dim)
    counts, sequences = torch.tensor(lengths), torch.arange(len(lengths))
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    return KvBatch(
        pages=torch.empty(len(lengths), config.num_layers, 2, max(lengths), *heads, device=device),
        page_table=sequences[:, None].int().to(device),
        seq_start=starts.int(),
        row_seq=sequences.repeat_interleave(counts).int().to(device),
        row_pos=torch.cat([torch.arange(length) for length in lengths]).int().to(device),
    )
