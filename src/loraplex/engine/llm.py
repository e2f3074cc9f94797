"""Offline use: a list of prompts in, a list of answers out."""

import itertools
import os
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loraplex.adapters import AdapterLimits
from loraplex.core import (
    AdapterRef,
    ConfigError,
    FinishReason,
    Overloaded,
    Request,
    RequestId,
    RequestOutput,
    SamplingParams,
    ServedBy,
    TokenLogprob,
)
from loraplex.engine.engine import Engine, LogitsObserver
from loraplex.engine.llm_inputs import Conversation, Prompt, list_conversations, list_prompts, plain_prompt, spread
from loraplex.engine.llm_settings import read_settings
from loraplex.engine.loading import Progress, load_base
from loraplex.engine.outputs import RequestFailed
from loraplex.engine.served_models import ServedModels
from loraplex.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by name and directory, as vLLM spells it. Raises ConfigError without a directory.

    `lora_local_path` is vLLM's old name of `lora_path`. `lora_int_id` and `base_model_name` are accepted and not used.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""
    lora_local_path: str | None = None
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        path, alias = os.fspath(self.lora_path), os.fspath(self.lora_local_path or "")
        if path and alias and path != alias:
            message = f"lora_path {path!r:.200} and lora_local_path {alias!r:.200} differ; give lora_path alone."
            raise ConfigError(message)
        if not path and not alias:
            raise ConfigError(f"LoRARequest {self.lora_name!r:.80} names no directory; give lora_path.")
        object.__setattr__(self, "lora_path", path or alias)
        object.__setattr__(self, "lora_local_path", None)


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the `n` answers to a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    cumulative_logprob: float | None = None  # of the tokens together; None unless logprobs were asked for


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """The answers to one prompt and the weights that gave them."""

    request_id: RequestId
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    served_by: ServedBy
    finished: bool = True


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What a LoRARequest loaded, and from where."""

    path: str
    ref: AdapterRef


class LLM:
    """A base model with adapters, in this process. Every method may be called from any thread; calls take turns.

    Keyword settings are those of EngineConfig, and vLLM's where they can be honoured or change nothing. With `seed`
    the same calls give the same answers, also where the SamplingParams have no seed. With `enable_lora` False an
    adapter is refused.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        served_model_name: str | None = None,
        progress: Progress | None = None,
        on_logits: LogitsObserver | None = None,
        **settings: Any,
    ) -> None:
        if served_model_name is not None and not isinstance(served_model_name, str):
            raise ConfigError(f"served_model_name must be one name, got {served_model_name!r:.80}.")
        read = read_settings(str(model), settings)
        loaded = load_base(Path(model), read.config, name=served_model_name, progress=progress)
        self.engine = Engine(loaded, on_logits)
        if read.config.tpot_target_ms is not None:
            self.engine.calibrate()
        self.models = ServedModels(self.engine, AdapterLimits(max_rank=read.config.max_lora_rank))
        self._enable_lora = read.enable_lora
        self._seeds = None if read.seed is None else random.Random(read.seed)
        self._loaded: dict[str, _Loaded] = {}
        self._ids = itertools.count()
        self._lock = threading.Lock()  # over the engine's steps and `_loaded`

    def load_lora(self, request: LoRARequest) -> AdapterRef:
        """Load the adapter unless it is loaded.

        Raises AdapterRefused, also for a name that stands for another path, and ConfigError with `enable_lora` False.
        """
        if not isinstance(request, LoRARequest):
            raise ConfigError(f"lora_request must be a LoRARequest, got {request!r:.80}.")
        if not self._enable_lora:
            name = request.lora_name
            raise ConfigError(f"This LLM was made with enable_lora=False and cannot serve {name!r:.80}; use True.")
        with self._lock:
            known = self._loaded.get(request.lora_name)
            current = {entry.ref for entry in self.models.catalog.list()}
            if known is None or known.path != request.lora_path or known.ref not in current:
                ref = self.models.load(request.lora_name, Path(request.lora_path), created=time.time())
                known = self._loaded[request.lora_name] = _Loaded(request.lora_path, ref)
            return known.ref

    def get_tokenizer(self) -> Tokenizer:
        """The base's tokenizer: `encode`, `decode` and `encode_chat`."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: object = True,
    ) -> list[GenerationOutput]:
        """Answer every prompt (text or token ids), all in one batch. One setting for all, or one for each.

        `use_tqdm` is accepted and ignored: there is no progress bar. Raises InvalidRequest, ConfigError or
        AdapterRefused before anything runs.
        """
        items = [plain_prompt(prompt) for prompt in list_prompts(prompts)]
        params = spread("sampling_params", SamplingParams() if sampling_params is None else sampling_params, len(items))
        adapters = [
            None if one is None else self.load_lora(one) for one in spread("lora_request", lora_request, len(items))
        ]
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
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: object = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[GenerationOutput]:
        """Answer one conversation or a list of them, through the model's chat template. Otherwise as `generate`."""
        encoded = [
            self.engine.tokenizer.encode_chat(talk, add_generation_prompt) for talk in list_conversations(messages)
        ]
        return self.generate(encoded, sampling_params, lora_request)

    def _request(self, prompt: str | Sequence[int], params: SamplingParams, adapter: AdapterRef | None) -> Request:
        tokens = self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if self._seeds is not None and params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(62))
        return Request(RequestId(f"llm-{next(self._ids)}"), tuple(tokens), params, adapter)

    def run(self, requests: Sequence[Request]) -> dict[RequestId, list[RequestOutput]]:
        """Step until every request has ended. Raises the first failure, after cancelling the rest."""
        with self._lock:
            for request in requests:
                self.engine.check(request)
            return self._run(requests)

    def _run(self, requests: Sequence[Request]) -> dict[RequestId, list[RequestOutput]]:
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
                cumulative_logprob=None if request.params.logprobs is None else sum(e.logprob for e in logprobs),
            )
        )
    return GenerationOutput(
        request.request_id, prompt, request.prompt_token_ids, tuple(completions), outputs[0].served_by
    )
