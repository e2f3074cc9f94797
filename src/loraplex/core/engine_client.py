"""How the server sees an engine. Implemented by `engine.AsyncEngine` and `testing.FakeEngine`."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from loraplex.core.base import BaseDescription
from loraplex.core.request import ChatMessage, Request, RequestOutput
from loraplex.core.types import AdapterDigest


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and gauges of one engine, read at any moment. Counters only grow."""

    num_waiting: int = 0
    num_running: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_adapter_pages: int = 0  # held by adapters, idle ones included
    page_tokens: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_adapter_loads: int = 0
    adapter_load_s: float = 0.0
    num_adapter_evictions: int = 0
    num_distinct_adapters: int = 0  # in the last step
    max_loras: int = 0
    running_adapters: tuple[str, ...] = ()  # names, for the gateway metric
    waiting_adapters: tuple[str, ...] = ()
    resident_adapters: tuple[str, ...] = ()  # digests
    num_loading_adapters: int = 0
    num_failed_adapters: int = 0  # whose load is not tried again yet
    num_load_failures: int = 0
    num_adapter_reloads: int = 0  # loads of adapters that were evicted lately
    reload_pages: int = 0  # pages more with which nine in ten of the last of these would not have been
    num_warm_starts: int = 0  # sequences that found their adapter in the pool
    num_cold_starts: int = 0  # sequences that waited for a load
    evictions_by_reason: tuple[tuple[str, int], ...] = ()  # of adapters; a fixed set of reasons
    waiting_by_reason: tuple[tuple[str, int], ...] = ()  # sequences; a fixed set of reasons
    num_cached_pages: int = 0  # held by cached prefixes
    num_prefix_evictions: int = 0  # pages
    num_prefix_tokens: int = 0  # of prompts that could have used the prefix cache
    num_cached_tokens: int = 0  # of those, taken from it
    sum_ranks: float = 0.0  # of the distinct adapters in the last step
    queue_age_s: float = 0.0  # of the sequence that waits longest


class EngineClient(Protocol):
    """One engine. All methods are called from the server's event loop and none blocks it for long.

    What takes an adapter's weights is in `server.ServingEngine`: this room does not know what an adapter is.
    """

    @property
    def base(self) -> BaseDescription:
        """Identity of the base model that is loaded."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens (prompt and output) a sequence may have."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once the step loop has stopped or has made no step or idle tick for 10 s."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Tokens of a text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special tokens included."""
        ...

    def encode_chat(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> tuple[int, ...]:
        """Tokens of a conversation through the model's chat template. Raises InvalidRequest if it has none."""
        ...

    def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Run a request. Closing the iterator early cancels it. Raises InvalidRequest, Overloaded or EngineDead."""
        ...

    def retire_adapter(self, digest: AdapterDigest) -> None:
        """No new requests for an adapter; its memory goes once those that run have ended. From any thread."""
        ...

    def stats(self) -> EngineStats:
        """A snapshot for metrics."""
        ...
