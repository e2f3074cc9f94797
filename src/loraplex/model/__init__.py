"""Decoder layers, weight loading and sampling. Knows tensors and step batches; no scheduler, pool or tenant."""

from loraplex.model.batch import DeviceBatch
from loraplex.model.checkpoint import Checkpoint, base_fingerprint
from loraplex.model.config import FAMILIES, DecoderConfig, read_config
from loraplex.model.decoder import Decoder
from loraplex.model.loader import LoadOptions, describe_base, list_sites, load_decoder, open_checkpoint
from loraplex.model.sampler import Sampled, SamplingRow, sample

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
    "list_sites",
    "load_decoder",
    "open_checkpoint",
    "read_config",
    "sample",
]
