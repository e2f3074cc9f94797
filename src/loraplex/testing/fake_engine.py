"""An engine without a model, for tests of whatever stands in front of one. No torch.

Its tokens are a hash of (adapter digest, prompt tokens, position), so any mix-up of adapters, prompts or answers shows
as wrong text. Tokens are bytes, so `decode(encode(text)) == text`.
"""

import asyncio
import hashlib
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

from loraplex.adapters import Adapter
from loraplex.core import (
    AdapterDigest,
    AdapterRef,
    AdapterResidence,
    AdapterUse,
    BaseDescription,
    BaseFingerprint,
    ChatMessage,
    ContextTooLong,
    DeadlinePassed,
    EngineDead,
    EngineStats,
    FinishReason,
    InvalidRequest,
    LoadedAdapter,
    LoraplexError,
    ModelNotFound,
    Overloaded,
    Request,
    RequestId,
    RequestOutput,
    SamplingParams,
    SequenceDelta,
    ServedBy,
    Timings,
    TokenLogprob,
    TopLogprob,
)
from loraplex.core.comparison import AdapterComparison
from loraplex.core.figures import NUM_LISTED_ADAPTERS, NUM_POPULAR_ADAPTERS
from loraplex.core.host_memory import HostMemoryFull, Restored

BOS_ID, EOS_ID = 256, 257
VOCAB_SIZE = 258
EOS_TEXT = "</s>"
_ALPHABET = b"abcdefghijklmnopqrstuvwxyz     \n"  # 32 symbols, so that a token is five bits of the hash
_EOS_ONE_IN = 64
_FINGERPRINT = BaseFingerprint(hashlib.sha256(b"loraplex fake base").hexdigest())
_PASSED = AdapterComparison(max_logit_difference=1e-4, kl=1e-6, effect=0.5, tolerance=1e-2)


def fake_token(digest: AdapterDigest | None, prompt: Sequence[int], position: int, index: int = 0) -> int:
    """Token of the fake engine at an output position; `index` is the choice (0 for greedy requests)."""
    name = f"{digest or 'base'}|{','.join(map(str, prompt))}|{index}|{position}"
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return EOS_ID if number % _EOS_ONE_IN == 0 else _ALPHABET[(number // _EOS_ONE_IN) % len(_ALPHABET)]


def fake_text(digest: AdapterDigest | None, prompt: Sequence[int], num_tokens: int) -> str:
    """What a request with `ignore_eos` and this many tokens answers."""
    tokens = (fake_token(digest, prompt, position) for position in range(num_tokens))
    return "".join("." if token == EOS_ID else chr(token) for token in tokens)


@dataclass(slots=True, eq=False)
class _FakeSequence:
    """One choice of a request while it grows."""

    request: Request
    index: int
    num_tokens: int = 0
    text: str = ""
    num_sent: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    max_tokens: int = 0

    def step(self) -> SequenceDelta:
        """Add one token; text that may become part of a stop string is held back."""
        params = self.request.params
        token = self._next_token(params)
        self.num_tokens += 1
        self._check_token_stop(params, token)
        if not (self.finish_reason and token in (EOS_ID, *params.stop_token_ids)):
            self.text += "." if token == EOS_ID else chr(token)
        self._check_text_stop(params)
        if self.finish_reason is None and self.num_tokens >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        hold = 0 if self.finish_reason else max((len(stop) - 1 for stop in params.stop), default=0)
        sent_to = max(self.num_sent, len(self.text) - hold)
        text, self.num_sent = self.text[self.num_sent : sent_to], sent_to
        logprobs = (_logprob(token, params.logprobs),) if params.logprobs is not None else None
        return SequenceDelta(self.index, text, (token,), logprobs, self.finish_reason, self.stop_reason)

    def _next_token(self, params: SamplingParams) -> int:
        digest = self.request.adapter.digest if self.request.adapter else None
        index = 0 if params.greedy else self.index
        return fake_token(digest, self.request.prompt_token_ids, self.num_tokens, index)

    def _check_token_stop(self, params: SamplingParams, token: int) -> None:
        if self.num_tokens <= params.min_tokens:
            return
        if token in params.stop_token_ids:
            self.finish_reason, self.stop_reason = FinishReason.STOP, token
        elif token == EOS_ID and not params.ignore_eos:
            self.finish_reason = FinishReason.STOP

    def _check_text_stop(self, params: SamplingParams) -> None:
        if self.num_tokens <= params.min_tokens:
            return
        found = [(self.text.find(stop), stop) for stop in params.stop if stop in self.text]
        if found:
            start, stop = min(found)
            self.text = self.text[: start + (len(stop) if params.include_stop_str_in_output else 0)]
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop


def _logprob(token: int, num_top: int) -> TokenLogprob:
    """The chosen token as the likeliest, its neighbours in the vocabulary behind it."""
    top = tuple(TopLogprob((token + k) % 256, chr(32 + (token + k) % 95), -0.5 - k) for k in range(num_top))
    return TokenLogprob(token, chr(32 + token % 95), -0.5, top)


def _check_deadline(request: Request, seconds: float) -> None:
    if request.deadline_s is not None and seconds > request.deadline_s:
        raise DeadlinePassed(f"The request had {request.deadline_s:g} s (deadline_s) and has not ended.", 1.5)


@dataclass(slots=True, eq=False)
class FakeEngine:
    """Implements `EngineClient`. The fields set its behaviour and may be changed at any time.

    `error` is raised by requests after `error_after` outputs. `max_running` refuses more requests with Overloaded.
    A request whose deadline has passed after a step fails. `cached_tokens` of each prompt count as taken from a cache,
    and `timings` are those of every output.
    `serve_other` makes it claim to have run these weights, whatever was asked. `delay_s` is the time of one step.

    With `only_held` requests for adapters that `add_adapter` did not bring are ModelNotFound. `comparison` is what
    `compare` answers, or raises; `compare_s` is how long it blocks. It holds at most `max_held` adapters. `stored` are
    those that `restore_adapter` finds, `in_pool` those that `is_in_pool` tells; `leaving` were retired and are
    still here.
    """

    base_name: str = "fake-base"
    max_model_len: int = 512
    delay_s: float = 0.0
    alive: bool = True
    error: LoraplexError | Exception | None = None
    error_after: int = 0
    max_running: int = 256
    max_waiting: int = 1024
    cold: bool = False
    load_s: float = 0.0
    cached_tokens: int = 0
    timings: Timings = field(default_factory=Timings)
    serve_other: AdapterRef | None = None
    started: list[Request] = field(default_factory=list)
    cancelled: list[RequestId] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    running: dict[RequestId, Request] = field(default_factory=dict)
    peak_running: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    only_held: bool = False
    held: dict[AdapterDigest, Adapter] = field(default_factory=dict)
    retired: list[AdapterDigest] = field(default_factory=list)
    retired_for_room: list[AdapterDigest] = field(default_factory=list)
    max_held: int | None = None
    keeps_packed: bool = False
    stored: dict[AdapterDigest, Adapter] = field(default_factory=dict)
    in_pool: set[AdapterDigest] = field(default_factory=set)
    leaving: set[AdapterDigest] = field(default_factory=set)
    sizes: dict[AdapterDigest, int] = field(default_factory=dict)
    pinned: set[AdapterDigest] = field(default_factory=set)
    pin_error: LoraplexError | None = None
    preloaded: list[tuple[AdapterDigest, bool]] = field(default_factory=list)  # and whether into free pages alone
    dropped_preloads: list[AdapterDigest] = field(default_factory=list)  # until the server asks
    compared: list[AdapterDigest] = field(default_factory=list)
    comparison: AdapterComparison | Exception = _PASSED
    compare_s: float = 0.0
    description: BaseDescription | None = None  # for tests with real adapters; None: a base without sites
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def base(self) -> BaseDescription:
        """`description`, or a base without sites."""
        if self.description is not None:
            return self.description
        return BaseDescription(self.base_name, _FINGERPRINT, "fake", VOCAB_SIZE, 0, False, ())

    @property
    def is_alive(self) -> bool:
        """The field `alive`."""
        return self.alive

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """One token a UTF-8 byte, after a begin token."""
        return (*((BOS_ID,) if add_special_tokens else ()), *text.encode("utf-8"))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The bytes as UTF-8; the begin token is silent."""
        data = b"".join(EOS_TEXT.encode() if t == EOS_ID else bytes((t,)) for t in token_ids if t != BOS_ID)
        return data.decode("utf-8", "replace")

    def encode_chat(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> tuple[int, ...]:
        """`role: content` lines."""
        text = "".join(f"{message.role}: {message.content}\n" for message in messages)
        return self.encode(text + ("assistant: " if add_generation_prompt else ""))

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """One token a step for every choice. Closing early is recorded in `cancelled`."""
        self._admit(request)
        finished, started_s = False, time.perf_counter()
        try:
            for output in self._outputs(request):
                await asyncio.sleep(self.delay_s)
                _check_deadline(request, time.perf_counter() - started_s)
                finished = output.finished
                yield output
        except LoraplexError:
            finished = True
            raise
        finally:
            del self.running[request.request_id]
            if not finished:
                self.cancelled.append(request.request_id)

    def _admit(self, request: Request) -> None:
        if not self.alive:
            raise EngineDead("The fake engine is dead.")
        self._check_running()
        if request.request_id in self.running:
            raise InvalidRequest(f"The request id {request.request_id} is in use.")
        if self.only_held and request.adapter is not None and request.adapter.digest not in self.held:
            raise ModelNotFound(request.adapter.name)
        room = self.max_model_len - len(request.prompt_token_ids)
        if room < (request.params.max_tokens or 1):
            raise ContextTooLong(f"Only {room} of {self.max_model_len} tokens are left for the answer.", "max_tokens")
        self.started.append(request)
        self.running[request.request_id] = request
        self.peak_running = max(self.peak_running, len(self.running))
        self.num_prompt_tokens += len(request.prompt_token_ids)

    def _check_running(self) -> None:
        if len(self.running) >= self.max_running:
            raise Overloaded(f"The queue is full: {len(self.running)} requests.", retry_after_s=1.5)

    def check_queue(self, tenant: str, num_sequences: int, num_before: int, num_own: int) -> None:
        """Nothing waits here, so `max_waiting` is for those who wait before and `num_sequences`."""
        self._check_running()
        if num_before + num_sequences > self.max_waiting:
            raise Overloaded(f"The queue of {self.max_waiting} waiting sequences is full.", retry_after_s=1.5)

    def _outputs(self, request: Request) -> Iterator[RequestOutput]:
        num_prompt = len(request.prompt_token_ids)
        max_tokens = request.params.max_tokens or self.max_model_len - num_prompt
        sequences = [_FakeSequence(request, i, max_tokens=max_tokens) for i in range(request.params.n)]
        adapter = self.serve_other or request.adapter
        served = ServedBy(self.base.name, self.base.fingerprint, adapter, self.cold, self.load_s)
        num_outputs = num_tokens = 0
        while open_sequences := [s for s in sequences if s.finish_reason is None]:
            if self.error is not None and num_outputs >= self.error_after:
                raise self.error
            deltas = tuple(sequence.step() for sequence in open_sequences)
            num_outputs, num_tokens = num_outputs + 1, num_tokens + len(deltas)
            self.num_steps, self.num_output_tokens = self.num_steps + 1, self.num_output_tokens + len(deltas)
            finished = all(sequence.finish_reason for sequence in sequences)
            cached = min(self.cached_tokens, num_prompt)
            yield RequestOutput(
                request.request_id, served, deltas, finished, num_prompt, num_tokens, cached, self.timings
            )

    def add_adapter(self, adapter: Adapter) -> None:
        """Put it into `held`."""
        with self._lock:
            if self.max_held is not None and adapter.digest not in self.held and len(self.held) >= self.max_held:
                raise HostMemoryFull(f"{self.max_held} adapters are held.", 1)
            self.held[adapter.digest] = adapter

    def restore_adapter(self, digest: AdapterDigest) -> Restored | None:
        """Put it into `held` if it is in `stored`; HERE if it is in `held`."""
        if digest in self.held:
            return Restored.HERE
        adapter = self.stored.get(digest)
        if adapter is None:
            return None
        self.add_adapter(adapter)
        return Restored.FILE

    def store_adapter(self, digest: AdapterDigest) -> None:
        """Put it into `stored`, with `keeps_packed`."""
        with self._lock:
            if self.keeps_packed:
                self.stored[digest] = self.held[digest]

    def set_tenant_weight(self, tenant: str, weight: float) -> None:
        """Note it in `weights`."""
        self.weights[tenant] = weight

    def host_bytes(self, digest: AdapterDigest) -> int:
        """Of what is in `held` or `leaving`: `sizes`, or what the adapter has as stored."""
        if digest in self.leaving:
            return self.sizes.get(digest, 1)
        adapter = self.held.get(digest)
        return 0 if adapter is None else self.sizes.get(digest, adapter.num_bytes)

    def is_in_pool(self, digest: AdapterDigest) -> bool:
        """Whether it is in `in_pool`."""
        return digest in self.in_pool

    def retire_adapter(self, digest: AdapterDigest, *, for_room: bool = False) -> None:
        """Take it out of `held`."""
        with self._lock:
            self.held.pop(digest, None)
            self.retired_for_room += [digest] if for_room else []
            self.pinned.discard(digest)
            self.retired.append(digest)

    def pin_adapter(self, digest: AdapterDigest) -> None:
        """Put it into `pinned`, or raise `pin_error`."""
        self._check_held(digest)
        if self.pin_error is not None:
            raise self.pin_error
        with self._lock:
            self.pinned.add(digest)

    def unpin_adapter(self, digest: AdapterDigest) -> None:
        """Take it out of `pinned`."""
        with self._lock:
            self.pinned.discard(digest)

    def preload_adapter(self, digest: AdapterDigest, *, only_free: bool = False) -> None:
        """Note it in `preloaded`."""
        self._check_held(digest)
        with self._lock:
            self.preloaded.append((digest, only_free))

    def take_dropped_preloads(self) -> tuple[AdapterDigest, ...]:
        """All of `dropped_preloads`, which is empty afterwards."""
        with self._lock:
            dropped, self.dropped_preloads = tuple(self.dropped_preloads), []
        return dropped

    def _check_held(self, digest: AdapterDigest) -> None:
        if digest not in self.held:
            raise ModelNotFound(digest)

    def compare(self, adapter: Adapter) -> AdapterComparison:
        """`comparison`, whatever the adapter is."""
        time.sleep(self.compare_s)
        with self._lock:
            self.compared.append(adapter.digest)
        if isinstance(self.comparison, Exception):
            raise self.comparison
        return self.comparison

    def stats(self) -> EngineStats:
        """Counts of what was run; the pool is imaginary."""
        adapters = {r.adapter.name: r.adapter.digest for r in self.running.values() if r.adapter}
        return EngineStats(
            num_running=len(self.running),
            num_pages=100,
            num_free_pages=100 - min(100, len(self.running)),
            page_tokens=16,
            num_steps=self.num_steps,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_distinct_adapters=len(adapters),
            max_loras=8,
            running_adapters=tuple(sorted(adapters)),
            resident_adapters=tuple(sorted(adapters.values())),
            popular_adapters=tuple(
                AdapterUse(item.digest, item.popularity, item.num_running)
                for item in self.residency()[:NUM_POPULAR_ADAPTERS]
            ),
            loaded_adapters=tuple(
                LoadedAdapter(item.digest, True, item.is_pinned) for item in self.residency()[:NUM_LISTED_ADAPTERS]
            ),
        )

    def residency(self) -> tuple[AdapterResidence, ...]:
        """Adapters that are held or run, as if all of them were in the pool, a page each."""
        running = Counter(request.adapter.digest for request in self.running.values() if request.adapter)
        with self._lock:
            held = self.held.copy()
        return tuple(
            AdapterResidence(
                digest,
                "resident",
                digest in held,
                1,
                4096,
                running[digest],
                1.0 + running[digest],
                0.0,
                digest in self.pinned,
            )
            for digest in sorted(held.keys() | running.keys())
        )
