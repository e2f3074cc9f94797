"""How the next token is chosen and when a sequence ends."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass

from loraplex.core import limits
from loraplex.core.errors import InvalidRequest


def _show(value: object) -> str:
    """A value for a message, cut at 80 characters; Python refuses to print integers of over 4,300 digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.80}"


def _check_number(name: str, value: float, low: float, high: float) -> None:
    """Raise InvalidRequest unless low <= value <= high; NaN and infinities fail."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise InvalidRequest(f"{name} must be a finite number, got {_show(value)}.", name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, got {_show(value)}.", name)


def _check_int(name: str, value: int, low: int, high: int) -> None:
    """Raise InvalidRequest unless value is an int in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {_show(value)}.", name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, got {_show(value)}.", name)


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, got {_show(value)}.", name)


def _as_tuple(name: str, value: object) -> tuple[object, ...]:
    """A list or tuple as a tuple, None as an empty one. Raises InvalidRequest for anything else."""
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise InvalidRequest(f"{name} must be a list, got {_show(value)}.", name)
    return tuple(value)


def _as_pair(value: object) -> tuple[object, object]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise InvalidRequest(f"logit_bias must map token ids to numbers, got {_show(value)}.", "logit_bias")
    return (value[0], value[1])


def _check_len(name: str, value: Sequence[object], limit: int) -> None:
    if len(value) > limit:
        raise InvalidRequest(f"{name} may have at most {limit} entries, got {len(value)}.", name)


def _check_neutral(name: str, value: object, *neutral: object) -> None:
    """Raise InvalidRequest unless the value of an unsupported parameter is one that asks for nothing."""
    if not any(type(value) is type(item) and value == item for item in neutral):
        allowed = " or ".join(map(repr, neutral))
        raise InvalidRequest(f"{name} is not supported (only {allowed}), got {_show(value)}.", name)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters with vLLM's names and defaults. Checked when built; raises InvalidRequest.

    `max_tokens` None means up to the model's context. `temperature` 0 is greedy. `top_k` 0 or -1 means all tokens.
    `seed` None draws a fresh one; with a seed the same request gives the same tokens whatever shares its batch.
    `logprobs` k asks for the chosen token and the k most likely.

    `best_of`, `bad_words`, `prompt_logprobs` and `detokenize` are vLLM's and not supported: they are taken with the
    values that ask for nothing (None; 1, an empty list, -, True) and not kept.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    skip_special_tokens: bool = True
    best_of: InitVar[int | None] = None
    bad_words: InitVar[Sequence[str] | None] = None
    prompt_logprobs: InitVar[int | None] = None
    detokenize: InitVar[bool] = True

    def __post_init__(
        self, best_of: int | None, bad_words: Sequence[str] | None, prompt_logprobs: int | None, detokenize: bool
    ) -> None:
        _check_neutral("best_of", best_of, None, 1)
        _check_neutral("bad_words", bad_words, None, [], ())
        _check_neutral("prompt_logprobs", prompt_logprobs, None)
        _check_neutral("detokenize", detokenize, True)
        self._normalise()
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, limits.MAX_TOKENS)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens or limits.MAX_TOKENS)
        _check_int("n", self.n, 1, limits.MAX_N)
        _check_int("top_k", self.top_k, -1, limits.MAX_TOP_K)
        if self.seed is not None:
            _check_int("seed", self.seed, limits.MIN_SEED, limits.MAX_SEED)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, limits.MAX_LOGPROBS)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            _check_bool(name, getattr(self, name))
        self._check_numbers()
        self._check_stops()

    def _normalise(self) -> None:
        """Accept the list, string and mapping forms people write; the stored form is hashable."""
        stop: object = self.stop
        bias: object = self.logit_bias
        stops = (stop,) if isinstance(stop, str) else _as_tuple("stop", stop)
        pairs = tuple(bias.items()) if isinstance(bias, Mapping) else _as_tuple("logit_bias", bias)
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", tuple(_as_pair(pair) for pair in pairs))

    def _check_numbers(self) -> None:
        _check_number("temperature", self.temperature, 0.0, limits.MAX_TEMPERATURE)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be above 0, got 0.0; use temperature 0 for greedy.", "top_p")
        _check_number("min_p", self.min_p, 0.0, 1.0)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), -limits.MAX_ABS_PENALTY, limits.MAX_ABS_PENALTY)
        low, high = limits.MIN_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY
        _check_number("repetition_penalty", self.repetition_penalty, low, high)

    def _check_stops(self) -> None:
        _check_len("stop", self.stop, limits.MAX_STOP_STRINGS)
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= limits.MAX_STOP_STRING_CHARS:
                limit = limits.MAX_STOP_STRING_CHARS
                raise InvalidRequest(f"stop strings must have 1 to {limit} characters, got {text!r:.80}.", "stop")
        _check_len("stop_token_ids", self.stop_token_ids, limits.MAX_STOP_TOKEN_IDS)
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, 2**31 - 1)
        _check_len("logit_bias", self.logit_bias, limits.MAX_LOGIT_BIAS)
        for token, value in self.logit_bias:
            _check_int("logit_bias", token, 0, 2**31 - 1)
            _check_number("logit_bias", value, -limits.MAX_ABS_LOGIT_BIAS, limits.MAX_ABS_LOGIT_BIAS)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequest if a token id lies outside the model's vocabulary. The one place this is checked."""
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, vocab_size - 1)
        for token, _ in self.logit_bias:
            _check_int("logit_bias", token, 0, vocab_size - 1)
