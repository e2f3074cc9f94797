"""Decoder layers, weight loading and sampling. Knows tensors and step batches; no scheduler, pool or tenant."""

from loraplex.model.batch import DeviceBatch
from loraplex.model.checkpoint import Checkpoint, base_fingerprint
from loraplex.model.config import FAMILIES, DecoderConfig, read_config
from loraplex.model.decoder import Decoder
from loraplex.model.loader import (
    LoadOptions,
    describe_base,
    expected_tensors,
    list_sites,
    load_decoder,
    open_checkpoint,
    reference_decoder,
)
from loraplex.model.sampler import Sampled, SamplingRow, draw_on_device, needs_host, sample

__all__ = [
    "FAMILIES",
    "Checkpoint",
    "Decoder",
    "DecoderConfig",
    "DeviceBatch",
    "LoadOptions",
    "Sampled",
    "SamplingRow",
    "base_fingerprint",
    "describe_base",
    "draw_on_device",
    "expected_tensors",
    "list_sites",
    "load_decoder",
    "needs_host",
    "open_checkpoint",
    "read_config",
    "reference_decoder",
    "sample",
]
