"""The verification gate: what the engine computes with an adapter, beside the base with the adapter merged.

The engine runs probes (`probes.py`) unmerged, as it runs requests: through its pages, its scheduler and its kernels.
The merged reference (`merged_reference.py`) runs the same tokens in float32. What may differ comes from the engine's
own error on the same probes without an adapter: `ERRORS` times that, and as much more as the adapter makes the model
more sensitive to rounding, but of that no more than a part of what the adapter changes.

In bfloat16 one wrong site of a deep base can hide in that. So what lies packed in host memory is compared too, value by
value, with the adapter's file, and so is what each linear adds (`site_check.py`).
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from loraplex.adapters import Adapter
from loraplex.core import AdapterComparison, AdapterDigest
from loraplex.engine.config import GIB
from loraplex.engine.loading import LoadedBase
from loraplex.engine.merged_reference import ReferenceLogits, merged_logits
from loraplex.engine.packing import PackedAdapter, find_packing_fault
from loraplex.engine.probes import ANSWER_LENGTH, PROMPT_LENGTHS, Probe, ProbeRun, make_probes
from loraplex.engine.site_check import SiteCheck
from loraplex.model import LoadOptions

ERRORS = 4.0  # the engine's error on the base, times this, may differ
EFFECT_SHARE = 1 / 3  # of the adapter's effect: what may differ where it makes the model more sensitive
BASE_SHARE = 1 / 8  # of the base's largest logit: an error beyond it is no rounding, the base itself is served wrongly
FLOOR = 2.0**-16  # of the base's largest logit: what may differ where the engine has no error at all

RunProbes = Callable[[Iterable[Probe], Adapter | None], ProbeRun]
"""Runs probes on the base or on an adapter that is held, to their end."""

BetweenSteps = Callable[[Callable[[], str | None]], str | None]
"""Runs a function in the thread that steps, between two steps; what it returns."""


class AdapterHolder(Protocol):
    """What keeps an adapter in the engine for the time of a comparison; its methods may be called from any thread."""

    def hold_adapter(self, adapter: Adapter) -> PackedAdapter:
        """Keep it; what its pages are filled with. Raises AdapterRefused."""
        ...

    def release_adapter(self, digest: AdapterDigest) -> None:
        """Undo one `hold_adapter`."""
        ...

    def site_check(self, packed: PackedAdapter, adapter: Adapter) -> SiteCheck | None:
        """A look at what each linear adds; None where the device's operations do not allow it."""
        ...


@dataclass(frozen=True, slots=True)
class _Base:
    """The base alone, at the positions that are compared."""

    exact: Tensor  # [positions, vocab] float32
    size: float  # its largest logit
    error: float  # of the engine
    sensitivity: float  # what rounding changes


class Verifier:
    """Compares adapters on one engine, one at a time. `compare` may be called from any thread."""

    def __init__(self, holder: AdapterHolder, base: LoadedBase) -> None:
        self._holder = holder
        self._loaded = base
        self._lock = threading.Lock()
        self._bases: dict[tuple[Probe, ...], _Base] = {}

    def compare(self, adapter: Adapter, run_probes: RunProbes, between_steps: BetweenSteps) -> AdapterComparison:
        """The figures of an adapter. Blocks while the engine runs the probes and the reference is computed here.

        Raises AdapterRefused if the adapter cannot be brought into the pool, and what the two functions raise.
        """
        with self._lock:
            packed = self._holder.hold_adapter(adapter)
            try:
                probes = self._probes(packed.num_pages)
                base = self._base(probes, run_probes)
                fault = find_packing_fault(packed, adapter, self._loaded.description.sites)
                fault = fault or self._site_fault(packed, adapter, between_steps)
                run = run_probes(probes, adapter)
            finally:
                self._holder.release_adapter(adapter.digest)
            return _compare(run.logits(), self._reference(probes, adapter), base, fault)

    def _site_fault(self, packed: PackedAdapter, adapter: Adapter, between_steps: BetweenSteps) -> str | None:
        """The first linear that adds something else than the adapter; a layer between two steps."""
        check = self._holder.site_check(packed, adapter)
        if check is None:
            return None
        faults = (between_steps(partial(check.find_fault, layer)) for layer in range(check.num_layers))
        return next((fault for fault in faults if fault is not None), None)

    def _probes(self, num_pages: int) -> tuple[Probe, ...]:
        """Probes that fit into the pool beside an adapter of so many pages."""
        base, geometry = self._loaded, self._loaded.geometry
        room = (geometry.num_pages - num_pages) * geometry.page_tokens
        longest = min(base.scheduler_config.max_model_len, room)
        return make_probes(base.description.vocab_size, base.tokenizer.special_token_ids, longest)

    def _base(self, probes: tuple[Probe, ...], run_probes: RunProbes) -> _Base:
        """The base's own figures, measured once for each set of probes."""
        found = self._bases.get(probes)
        if found is None:
            served, reference = run_probes(probes, None).logits(), self._reference(probes, None)
            size, error = float(reference.exact.abs().max()), _difference(served, reference.exact)
            sensitivity = _difference(reference.rounded, reference.exact)
            found = self._bases[probes] = _Base(reference.exact, size, error, sensitivity)
        return found

    def _reference(self, probes: tuple[Probe, ...], adapter: Adapter | None) -> ReferenceLogits:
        base = self._loaded
        index = {site.name: i for i, site in enumerate(base.description.sites)}
        modules = {index[module.site.name]: module for module in adapter.modules} if adapter is not None else {}
        decoder = base.decoder
        options = LoadOptions(_reference_device(base), 1, 1, decoder.dtype)
        return merged_logits(decoder.config, base.checkpoint, options, probes, modules)


def _reference_device(base: LoadedBase) -> torch.device:
    """The base's device, or the host where a GPU has little memory left: the engine must never run short of it."""
    device, config = base.decoder.device, base.decoder.config
    if device.type != "cuda":
        return device
    layer = config.hidden_size * (4 * config.q_size + 3 * config.intermediate_size)
    longest = max(PROMPT_LENGTHS) + ANSWER_LENGTH
    kv = 2 * len(PROMPT_LENGTHS) * longest * config.num_layers * 2 * config.kv_size
    logits = 4 * ANSWER_LENGTH * len(PROMPT_LENGTHS) * config.vocab_size
    needed = 4 * (layer + kv + logits) + 2 * GIB
    return device if torch.cuda.mem_get_info(device)[0] > needed else torch.device("cpu")


def _difference(a: Tensor | None, b: Tensor) -> float:
    """The largest difference of two logits; NaN or infinite where one of them is, and where there are none."""
    return float("inf") if a is None else float((a - b).abs().max())


def _compare(served: Tensor | None, merged: ReferenceLogits, base: _Base, failure: str | None) -> AdapterComparison:
    effect = _difference(merged.exact, base.exact)
    sensitivity = _difference(merged.rounded, merged.exact)
    floor, error = FLOOR * base.size, ERRORS * min(base.error, BASE_SHARE * base.size)
    more = error * sensitivity / base.sensitivity if base.sensitivity else error
    tolerance = floor + max(error, min(more, EFFECT_SHARE * effect))
    difference = _difference(served, merged.exact)
    kl = float("inf") if served is None else _divergence(merged.exact, served)
    return AdapterComparison.of(difference, kl, effect, tolerance, failure)


def _divergence(reference: Tensor, served: Tensor) -> float:
    """Mean over positions of KL(reference || served), in nats. Logits [positions, vocab]."""
    total = 0.0
    for wanted, got in zip(reference, served, strict=True):  # a position at a time: float64 of a whole vocabulary
        log_wanted, log_got = wanted.double().log_softmax(-1), got.double().log_softmax(-1)
        total += float((log_wanted.exp() * (log_wanted - log_got)).sum())
    return max(total / len(reference), 0.0) if total == total else total
