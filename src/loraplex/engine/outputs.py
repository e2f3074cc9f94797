"""What has become of each request: text as it streams, stop strings, log probabilities, identity."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from loraplex.core import (
    FinishReason,
    LoraplexError,
    Request,
    RequestId,
    RequestOutput,
    SamplingParams,
    SequenceDelta,
    SequenceId,
    ServedBy,
    Timings,
    TokenLogprob,
    TopLogprob,
)
from loraplex.engine.tokenizer import Detokenizer, StopChecker, Tokenizer
from loraplex.model import Sampled
from loraplex.scheduler import Committed


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request that ended with an error instead of an answer."""

    request_id: RequestId
    error: LoraplexError


@dataclass(slots=True, eq=False)
class _SequenceText:
    index: int
    detokenizer: Detokenizer
    stops: StopChecker
    num_tokens: int = 0
    is_done: bool = False


@dataclass(slots=True, eq=False)
class RequestState:
    """One request while it runs. `served_by`, `queue_s` and `began_s` are set by `begin`.

    Times are in seconds of one clock of the engine's choice.
    """

    request: Request
    sequences: dict[SequenceId, _SequenceText]
    served_by: ServedBy | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None  # the least that any of its sequences took from the prefix cache
    pending: list[SequenceDelta] = field(default_factory=list)
    queue_s: float = 0.0
    began_s: float = 0.0
    first_token_s: float | None = None

    def begin(self, served_by: ServedBy, queue_s: float, now: float) -> None:
        """Note the first step that runs it."""
        self.served_by, self.queue_s, self.began_s = served_by, queue_s, now
        self.request.progress.has_begun = True

    @property
    def is_done(self) -> bool:
        return all(sequence.is_done for sequence in self.sequences.values())


class OutputProcessor:
    """Turns committed tokens into request outputs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def start(self, request: Request, seq_ids: Iterable[SequenceId]) -> RequestState:
        """State of a new request."""
        params = request.params
        texts = {}
        for index, seq_id in enumerate(seq_ids):
            detokenizer = self._tokenizer.detokenizer(request.prompt_token_ids, params.skip_special_tokens)
            stops = StopChecker(params.stop, params.include_stop_str_in_output)
            texts[seq_id] = _SequenceText(index, detokenizer, stops)
        return RequestState(request, texts)

    def take(self, state: RequestState, committed: Committed, sampled: Sampled) -> bool:
        """Book one token. True when a stop string ended the sequence, which the scheduler does not know yet."""
        sequence, params = state.sequences[committed.seq_id], state.request.params
        sequence.num_tokens += 1
        state.num_output_tokens += 1
        reason = committed.finish_reason
        stop_reason: str | int | None = None
        if reason is FinishReason.STOP and committed.token_id in params.stop_token_ids:
            stop_reason = committed.token_id
        text = self._text(sequence, params, committed)
        matched = None
        if sequence.num_tokens >= params.min_tokens:
            found = sequence.stops.push(text)
            text, matched = found.text, found.matched
        if matched is not None:
            reason, stop_reason = FinishReason.STOP, matched
        elif reason is not None:
            text += sequence.stops.flush()
        sequence.is_done = reason is not None
        logprobs = (self._logprob(sampled),) if params.logprobs is not None else None
        state.pending.append(SequenceDelta(sequence.index, text, (committed.token_id,), logprobs, reason, stop_reason))
        return matched is not None and committed.finish_reason is None

    def _text(self, sequence: _SequenceText, params: SamplingParams, committed: Committed) -> str:
        """Text the token completes; the token that ended the sequence shows only when asked for."""
        is_end = committed.finish_reason is FinishReason.STOP
        shown = not is_end or (params.include_stop_str_in_output and committed.token_id in params.stop_token_ids)
        text = sequence.detokenizer.push((committed.token_id,)) if shown else ""
        return text + sequence.detokenizer.flush() if committed.finish_reason is not None else text

    def _logprob(self, sampled: Sampled) -> TokenLogprob:
        describe = self._tokenizer.token_text
        top = tuple(TopLogprob(token, describe(token), value) for token, value in sampled.top)
        assert sampled.logprob is not None
        return TokenLogprob(sampled.token_id, describe(sampled.token_id), sampled.logprob, top)

    def flush(self, state: RequestState, now_s: float) -> RequestOutput:
        """What the request gained since the last flush, by a step whose tokens came at `now_s`."""
        assert state.served_by is not None, "output before any step ran the request"
        if state.first_token_s is None:
            state.first_token_s = now_s
        deltas, state.pending = tuple(state.pending), []
        return RequestOutput(
            request_id=state.request.request_id,
            served_by=state.served_by,
            deltas=deltas,
            finished=state.is_done,
            num_prompt_tokens=len(state.request.prompt_token_ids),
            num_output_tokens=state.num_output_tokens,
            num_cached_tokens=state.num_cached_tokens or 0,
            timings=Timings(state.queue_s, state.first_token_s - state.began_s, now_s - state.first_token_s),
        )
