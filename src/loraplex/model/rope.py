"""Rotary embeddings: tables of cos and sin for every position."""

import math

import torch
from torch import Tensor

from loraplex.kernels import RopeTable
from loraplex.model.rope_config import RopeConfig

_ORIGINAL = "original_max_position_embeddings"


def build_rope_table(rope: RopeConfig, rotary_dim: int, max_len: int) -> RopeTable:
    """cos and sin [max_len, rotary_dim / 2] float32, computed in float32 as transformers does."""
    frequencies, factor = _frequencies(rope, rotary_dim)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies[None]
    return RopeTable((angles.cos() * factor).contiguous(), (angles.sin() * factor).contiguous())


def _frequencies(rope: RopeConfig, dim: int) -> tuple[Tensor, float]:
    """Angle a position for each pair [dim / 2], and the factor on cos and sin."""
    base = rope.theta ** -(torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    if rope.kind == "linear":
        return base / float(rope.fields["factor"]), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, base, dim)
    if rope.kind == "longrope":
        return base / torch.tensor(rope.fields["short_factor"], dtype=torch.float32), _long_attention_factor(rope)
    return base, 1.0


def _llama3(rope: RopeConfig, base: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    fields = rope.fields
    original = float(fields["original_max_position_embeddings"])
    low, high = float(fields["low_freq_factor"]), float(fields["high_freq_factor"])
    turns = original * base / (2 * math.pi)  # rotations over the original context
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return base * (kept + (1.0 - kept) / float(fields["factor"]))


def _long_attention_factor(rope: RopeConfig) -> float:
    """Factor on cos and sin of LongRoPE (Ding et al., arXiv 2402.13753), unless the config gives it."""
    given, factor = rope.fields.get("attention_factor"), float(rope.fields["factor"])
    if given is not None:
        return float(given)
    return math.sqrt(1 + math.log(factor) / math.log(rope.fields[_ORIGINAL])) if factor > 1 else 1.0


def _yarn(rope: RopeConfig, base: Tensor, head_dim: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al., arXiv 2309.00071, section 3): stretch the slow pairs, keep the fast ones, ramp between."""
    fields = rope.fields
    factor, original = float(fields["factor"]), float(fields["original_max_position_embeddings"])

    def pair_with_turns(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first = pair_with_turns(float(fields.get("beta_fast") or 32))
    last = pair_with_turns(float(fields.get("beta_slow") or 1))
    if fields.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first if last != first else 0.001
    stretched = ((torch.arange(head_dim // 2).float() - first) / width).clamp(0.0, 1.0)
    return base * (1.0 - stretched) + base / factor * stretched, _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: RopeConfig, factor: float) -> float:
    """Factor on cos and sin (YaRN section 3.4), unless the config gives it."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = rope.fields.get("attention_factor")
    if given is not None:
        return float(given)
    numerator, denominator = rope.fields.get("mscale"), rope.fields.get("mscale_all_dim")
    if numerator and denominator:
        return magnitude(float(numerator)) / magnitude(float(denominator))
    return magnitude(1.0)
