"""How the server sees an engine. Implemented by `engine.AsyncEngine` and `testing.FakeEngine`."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from loraplex.core.base import BaseDescription
from loraplex.core.figures import AdapterResidence, EngineStats
from loraplex.core.request import ChatMessage, Request, RequestOutput
from loraplex.core.types import AdapterDigest


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

    def check_queue(self, tenant: str, num_sequences: int, num_before: int, num_own: int) -> None:
        """Raise what `generate` would if a request of so many sequences had no place in the queue.

        `num_before` sequences, `num_own` of them the tenant's, are about to be queued and count as if they were.
        Raises Overloaded, CallerLimitReached, and InvalidRequest for more than the queue holds.
        """
        ...

    def retire_adapter(self, digest: AdapterDigest, *, for_room: bool = False) -> None:
        """No new requests for an adapter; its memory goes once those that run have ended. From any thread.

        `for_room`: as others want its host memory; metrics tell these apart.
        """
        ...

    def stats(self) -> EngineStats:
        """Figures for metrics. From any thread; takes time in the number of adapters in the pool and of sequences."""
        ...

    def residency(self) -> tuple[AdapterResidence, ...]:
        """Every adapter that the engine has in host memory or in the pool, or failed to load lately, by digest.

        From any thread; takes time in their number.
        """
        ...
