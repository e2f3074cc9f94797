"""The step loop, offline and behind an event loop. The only room that holds both a plan and a tensor."""

from loraplex.engine.async_engine import AsyncEngine
from loraplex.engine.config import EngineConfig
from loraplex.engine.engine import Engine
from loraplex.engine.llm import LLM, CompletionOutput, GenerationOutput, LoRARequest
from loraplex.engine.loading import LoadedBase, load_base
from loraplex.engine.outputs import RequestFailed
from loraplex.engine.served_models import ServedModels
from loraplex.engine.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "GenerationOutput",
    "LoRARequest",
    "LoadedBase",
    "RequestFailed",
    "ServedModels",
    "Tokenizer",
    "load_base",
]
