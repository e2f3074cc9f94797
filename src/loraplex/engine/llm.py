"""Offline use: a list of prompts in, a list of answers out."""

import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.adapters import AdapterLimits
from loraplex.core import (
    AdapterRef,
    ChatMessage,
    ConfigError,
    FinishReason,
    InvalidRequest,
    Overloaded,
    Request,
    RequestId,
    RequestOutput,
    SamplingParams,
    ServedBy,
    TokenLogprob,
)
from loraplex.engine.config import EngineConfig
from loraplex.engine.engine import Engine, LogitsObserver
from loraplex.engine.loading import Progress, load_base
from loraplex.engine.outputs import RequestFailed
from loraplex.engine.served_models import ServedModels

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's {"prompt": text} and {"prompt_token_ids": ids}."""


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by name and directory, as vLLM spells it. `lora_int_id` is accepted and not used."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the `n` answers to a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """The answers to one prompt and the weights that gave them."""

    request_id: RequestId
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    served_by: ServedBy


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What a LoRARequest loaded, and from where."""

    path: str
    ref: AdapterRef


def _spread(name: str, value: Any, count: int) -> list[Any]:
    """One value for each prompt: a list must have one each, anything else stands for all."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ConfigError(f"{name} has {len(value)} entries for {count} prompts; give one, or one for each.")
    return list(value)


def _plain_prompt(prompt: Any) -> str | Sequence[int]:
    """The text or token ids of a prompt in any of its forms. Raises InvalidRequest."""
    if isinstance(prompt, Mapping):
        known = [key for key in ("prompt", "prompt_token_ids") if key in prompt]
        if len(known) != 1 or len(prompt) != 1:
            raise InvalidRequest(
                f'a prompt mapping must have exactly "prompt" or "prompt_token_ids", got {sorted(map(str, prompt))}.',
                "prompts",
            )
        prompt = prompt[known[0]]
    if isinstance(prompt, str) or (isinstance(prompt, Sequence) and all(type(token) is int for token in prompt)):
        return prompt
    raise InvalidRequest(f"a prompt must be a text or token ids, got {prompt!r:.80}.", "prompts")


class LLM:
    """A base model with adapters, in this process. Keyword settings are those of EngineConfig."""

    def __init__(
        self,
        model: str | Path,
        *,
        served_model_name: str | None = None,
        progress: Progress | None = None,
        on_logits: LogitsObserver | None = None,
        **settings: Any,
    ) -> None:
        config = EngineConfig(**settings)
        loaded = load_base(Path(model), config, name=served_model_name, progress=progress)
        self.engine = Engine(loaded, on_logits)
        self.models = ServedModels(self.engine, AdapterLimits(max_rank=config.max_lora_rank))
        self._loaded: dict[str, _Loaded] = {}
        self._ids = itertools.count()

    def load_lora(self, request: LoRARequest) -> AdapterRef:
        """Load the adapter unless it is loaded. Raises AdapterRefused, also for a name that stands for another path."""
        known = self._loaded.get(request.lora_name)
        current = {entry.ref for entry in self.models.catalog.list()}
        if known is None or known.path != request.lora_path or known.ref not in current:
            ref = self.models.load(request.lora_name, Path(request.lora_path), created=time.time())
            known = self._loaded[request.lora_name] = _Loaded(request.lora_path, ref)
        return known.ref

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[GenerationOutput]:
        """Answer every prompt (text or token ids), all in one batch. One setting for all, or one for each.

        Raises InvalidRequest or AdapterRefused before anything runs.
        """
        single = isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int))
        given: list[Any] = [prompts] if single else list(prompts)
        items = [_plain_prompt(prompt) for prompt in given]
        params = _spread(
            "sampling_params", SamplingParams() if sampling_params is None else sampling_params, len(items)
        )
        adapters = [self.load_lora(r) if r else None for r in _spread("lora_request", lora_request, len(items))]
        requests = [
            self._request(item, one, adapter) for item, one, adapter in zip(items, params, adapters, strict=True)
        ]
        outputs = self.run(requests)
        return [
            _collect(request, item if isinstance(item, str) else None, outputs[request.request_id])
            for request, item in zip(requests, items, strict=True)
        ]

    def chat(
        self,
        messages: Sequence[Sequence[dict[str, str]]] | Sequence[dict[str, str]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[GenerationOutput]:
        """Answer one conversation or a list of them, through the model's chat template."""
        talks: list[Any] = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        encoded = [
            self.engine.tokenizer.encode_chat([ChatMessage(m["role"], m["content"]) for m in talk]) for talk in talks
        ]
        return self.generate(encoded, sampling_params, lora_request)

    def _request(self, prompt: str | Sequence[int], params: SamplingParams, adapter: AdapterRef | None) -> Request:
        tokens = self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return Request(RequestId(f"llm-{next(self._ids)}"), tuple(tokens), params, adapter)

    def run(self, requests: Sequence[Request]) -> dict[RequestId, list[RequestOutput]]:
        """Step until every request has ended. Raises the first failure, after cancelling the rest."""
        for request in requests:
            self.engine.check(request)
        collected: dict[RequestId, list[RequestOutput]] = {request.request_id: [] for request in requests}
        unqueued = deque(requests)
        try:
            while unqueued or self.engine.has_work:
                self._queue(unqueued)
                for result in self.engine.step(time.monotonic()):
                    if isinstance(result, RequestFailed):
                        raise result.error
                    collected[result.request_id].append(result)
        finally:
            for request in requests:  # those that ended are unknown and ignored
                self.engine.abort(request.request_id)
        return collected

    def _queue(self, unqueued: deque[Request]) -> None:
        """Move requests to the engine's queue while it has room."""
        with suppress(Overloaded):
            while unqueued:
                self.engine.add_request(unqueued[0], time.monotonic())
                unqueued.popleft()


def _collect(request: Request, prompt: str | None, outputs: Sequence[RequestOutput]) -> GenerationOutput:
    deltas = [delta for output in outputs for delta in output.deltas]
    completions = []
    for index in range(request.params.n):
        mine = [delta for delta in deltas if delta.index == index]
        logprobs = tuple(entry for delta in mine for entry in delta.logprobs or ())
        completions.append(
            CompletionOutput(
                index=index,
                text="".join(delta.text for delta in mine),
                token_ids=tuple(token for delta in mine for token in delta.token_ids),
                logprobs=logprobs if request.params.logprobs is not None else None,
                finish_reason=mine[-1].finish_reason,
                stop_reason=mine[-1].stop_reason,
            )
        )
    return GenerationOutput(
        request.request_id, prompt, request.prompt_token_ids, tuple(completions), outputs[0].served_by
    )
