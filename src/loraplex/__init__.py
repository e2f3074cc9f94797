"""Serve one base LLM with thousands of LoRA adapters on one device."""

import os
from typing import TYPE_CHECKING, Any

from loraplex.core import SamplingParams

if TYPE_CHECKING:
    from loraplex.engine import LLM, LoRARequest

__all__ = ["LLM", "LoRARequest", "SamplingParams"]

__version__ = "0.1.0"

# OpenMP threads that wait at a barrier sleep at once instead of spinning. Where anything else uses the cores, spinning
# makes a step far slower: 31 decode steps of SmolLM2-135M on 2 cores beside one busy process took 26 s spinning, 0.4 s
# so (2026-11-29). The runtime reads this when torch is first imported; a value set by the user stands.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def __getattr__(name: str) -> Any:
    """The engine brings in torch, so it is imported when first asked for."""
    if name in ("LLM", "LoRARequest"):
        import loraplex.engine

        return getattr(loraplex.engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
