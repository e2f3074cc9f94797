"""How an answer is phrased: pure functions and formats from what the engine gave to OpenAI's JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from loraplex.core import SequenceDelta, ServedBy, TokenLogprob
from loraplex.server.context import Tally, shown_s

Json = dict[str, object]
MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have


@dataclass(slots=True, eq=False)
class Choice:
    """One choice as it grows. `token_text_len` is the offset of the next token for `text_offset`."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_text_len: int = 0

    def add(self, delta: SequenceDelta) -> None:
        """Append what the sequence gained."""
        self.text += delta.text
        self.logprobs.extend(delta.logprobs or ())
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
            self.stop_reason = delta.stop_reason


class AnswerFormat(Protocol):
    """The wording of one route. `offset` is the length of the token texts that came before in the same choice."""

    @property
    def id_prefix(self) -> str: ...

    @property
    def whole_object(self) -> str:
        """The `object` field of an answer in one piece."""
        ...

    @property
    def chunk_object(self) -> str:
        """The `object` field of a streamed chunk."""
        ...

    def whole(self, choice: Choice) -> Json:
        """A choice in one piece, without its index and ending."""
        ...

    def chunk(self, text: str, logprobs: Sequence[TokenLogprob] | None, offset: int) -> Json:
        """A choice's next piece, without its index and ending."""
        ...

    def opening(self, echo: str) -> Json | None:
        """What a choice says before its first token, if anything."""
        ...


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """POST /v1/completions."""

    want_logprobs: bool
    id_prefix: str = "cmpl"
    whole_object: str = "text_completion"
    chunk_object: str = "text_completion"

    def whole(self, choice: Choice) -> Json:
        return self.chunk(choice.text, choice.logprobs, 0)

    def chunk(self, text: str, logprobs: Sequence[TokenLogprob] | None, offset: int) -> Json:
        return {"text": text, "logprobs": completion_logprobs(logprobs or (), offset) if self.want_logprobs else None}

    def opening(self, echo: str) -> Json | None:
        return {"text": echo, "logprobs": None} if echo else None


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """POST /v1/chat/completions."""

    want_logprobs: bool
    id_prefix: str = "chatcmpl"
    whole_object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"

    def whole(self, choice: Choice) -> Json:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(choice.logprobs)}

    def chunk(self, text: str, logprobs: Sequence[TokenLogprob] | None, offset: int) -> Json:
        return {"delta": {"content": text} if text else {}, "logprobs": self._logprobs(logprobs or ())}

    def opening(self, echo: str) -> Json | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Json | None:
        return chat_logprobs(logprobs) if self.want_logprobs else None


def completion_logprobs(logprobs: Sequence[TokenLogprob], offset: int) -> Json:
    """OpenAI's four parallel lists; `text_offset` starts at `offset`. The chosen token is always among the top ones."""
    offsets: list[int] = []
    for item in logprobs:
        offsets.append(offset)
        offset += len(item.text)
    return {
        "tokens": [item.text for item in logprobs],
        "token_logprobs": [_finite(item.logprob) for item in logprobs],
        "top_logprobs": [_top_by_text(item) for item in logprobs],
        "text_offset": offsets,
    }


def _top_by_text(item: TokenLogprob) -> dict[str, float]:
    """Most likely texts; of several tokens with one text the likeliest stands for it."""
    top: dict[str, float] = {}
    for entry in item.top:
        top.setdefault(entry.text, _finite(entry.logprob))
    top.setdefault(item.text, _finite(item.logprob))
    return top


def chat_logprobs(logprobs: Sequence[TokenLogprob]) -> Json:
    """One object a token, with its most likely alternatives."""
    return {
        "content": [
            {
                **_chat_token(item.text, item.logprob),
                "top_logprobs": [_chat_token(top.text, top.logprob) for top in item.top],
            }
            for item in logprobs
        ],
        "refusal": None,
    }


def _chat_token(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def usage(tally: Tally) -> Json:
    """Token counts over all prompts and choices; a prompt counts once, whatever `n` is."""
    prompt, output = tally.num_prompt_tokens, tally.num_output_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": tally.num_cached_tokens},
    }


def identity_body(served: ServedBy, tally: Tally, request_id: str) -> Json:
    """The `x_loraplex` object: exactly which weights ran, and whether they had to be loaded."""
    adapter = served.adapter
    return {
        "adapter": {"name": adapter.name, "version": adapter.version, "digest": adapter.digest} if adapter else None,
        "base": {"name": served.base_name, "fingerprint": served.base_fingerprint},
        "cold": tally.shown_load.cold,
        "load_s": shown_s(tally.shown_load.load_s),
        "timings": timings(tally),
        "request_id": request_id,
    }


def timings(tally: Tally) -> Json | None:
    """Where the request's time went, in seconds; None before the first token.

    Where a caller may not know all of loading, what is not told of it counts as waiting for its turn, which is then in
    whole milliseconds: so it says no more than the time that the caller measures itself.
    """
    load_s, decode_s = tally.shown_load.load_s, tally.decode_s
    queue_s = tally.queue_s(load_s)
    if queue_s is None or decode_s is None:
        return None
    return {
        "queue_s": shown_s(queue_s, 6 if tally.told is None else 3),
        "load_s": shown_s(load_s),
        "prefill_s": shown_s(tally.prefill_s),
        "decode_s": shown_s(decode_s),
    }
