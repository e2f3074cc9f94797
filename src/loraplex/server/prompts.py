"""From request fields to tokens and sampling parameters. The one choke point for every generating route."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loraplex.core import ChatMessage, ContextTooLong, EngineClient, InvalidRequest, SamplingParams, limits
from loraplex.server.schema import ChatBody, CompletionBody, GenerationBody, Message


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as tokens. `text` is what `echo` returns, empty without it."""

    token_ids: tuple[int, ...]
    text: str


def completion_params(body: CompletionBody) -> SamplingParams:
    """Sampling parameters of a completion. Raises InvalidRequest."""
    if body.echo and body.logprobs is not None:
        raise InvalidRequest("echo together with logprobs is not supported.", "echo")
    return _sampling_params(body, body.max_tokens, body.logprobs, {})


def chat_params(body: ChatBody) -> SamplingParams:
    """Sampling parameters of a chat completion. Raises InvalidRequest."""
    limits_given = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits_given) > 1:
        raise InvalidRequest("max_tokens and max_completion_tokens differ; give one of them.", "max_completion_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", "top_logprobs")
    aliases = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        aliases["max_tokens"] = "max_completion_tokens"
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _sampling_params(body, next(iter(limits_given), None), logprobs, aliases)


def _sampling_params(
    body: GenerationBody,
    max_tokens: int | None,
    logprobs: int | None,
    aliases: Mapping[str, str],
) -> SamplingParams:
    """Build the checked parameters; an error names the field as the client wrote it, through `aliases`."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true.", "stream_options")
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            seed=body.seed,
            n=body.n,
            stop=tuple(body.stop),
            stop_token_ids=tuple(body.stop_token_ids),
            include_stop_str_in_output=body.include_stop_str_in_output,
            ignore_eos=body.ignore_eos,
            logprobs=logprobs,
            logit_bias=_logit_bias(body.logit_bias),
            skip_special_tokens=body.skip_special_tokens,
        )
    except InvalidRequest as error:
        name = aliases.get(error.param or "")
        if name is None:
            raise
        raise InvalidRequest(f"{name}: {error.message}", name) from None


def _logit_bias(given: Mapping[str, object]) -> tuple[tuple[int, float], ...]:
    """Token ids are JSON keys, so strings; each must be the plain decimal form, which makes them unique."""
    if len(given) > limits.MAX_LOGIT_BIAS:  # before the work of reading them
        raise InvalidRequest(
            f"logit_bias may have at most {limits.MAX_LOGIT_BIAS} entries, got {len(given)}.", "logit_bias"
        )
    pairs: list[tuple[int, float]] = []
    for key, value in given.items():
        if len(key) > 10 or not key.isascii() or not key.isdigit() or str(int(key)) != key:
            raise InvalidRequest(f"logit_bias keys must be token ids, got {key!r:.80}.", "logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(f"logit_bias values must be numbers, got {value!r:.80}.", "logit_bias")
        pairs.append((int(key), value))
    return tuple(pairs)


def completion_items(given: object) -> list[object]:
    """The prompts of a completion: texts, or lists that should hold token ids. Raises InvalidRequest."""
    items = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
    if len(items) > limits.MAX_PROMPTS:
        raise InvalidRequest(f"prompt may have at most {limits.MAX_PROMPTS} entries, got {len(items)}.", "prompt")
    kind = type(items[0])
    if any(type(item) is not kind for item in items):
        raise InvalidRequest("prompt must be texts only or lists of token ids only.", "prompt")
    return items


def num_chars(items: Sequence[object]) -> int:
    """Characters, or token ids, of a completion's prompts."""
    return sum(len(item) for item in items if isinstance(item, str | list))


def completion_prompts(
    engine: EngineClient, items: Sequence[object], add_special_tokens: bool, echo: bool
) -> tuple[Prompt, ...]:
    """The prompts as tokens, with their text if it will be echoed. Raises InvalidRequest."""
    return tuple(_completion_prompt(engine, item, add_special_tokens, echo) for item in items)


def _completion_prompt(engine: EngineClient, item: object, add_special_tokens: bool, echo: bool) -> Prompt:
    if isinstance(item, str):
        return Prompt(engine.encode(item, add_special_tokens), item if echo else "")
    if not isinstance(item, list):
        raise InvalidRequest(f"prompt must be a text or a list, got {item!r:.80}.", "prompt")
    if len(item) > engine.max_model_len:
        raise _too_long(engine, f"The prompt has {len(item)} tokens", "prompt")
    token_ids = checked_token_ids(engine, item, "prompt")
    return Prompt(token_ids, engine.decode(token_ids) if echo else "")


def text_of(engine: EngineClient, items: Sequence[object]) -> str:
    """The text of token ids that a client gave. Raises InvalidRequest."""
    return engine.decode(checked_token_ids(engine, items, "tokens"))


def token_texts(engine: EngineClient, token_ids: Sequence[int]) -> list[str]:
    """The text of each token alone. Raises InvalidRequest for too many."""
    limit = limits.MAX_DETOKENIZED_TOKENS
    if len(token_ids) > limit:
        message = f"return_token_strs is for at most {limit} tokens; the text has {len(token_ids)}."
        raise InvalidRequest(message, "return_token_strs")
    return [engine.decode((token,)) for token in token_ids]


def checked_token_ids(engine: EngineClient, items: Sequence[object], param: str) -> tuple[int, ...]:
    """Token ids of the model's vocabulary. Raises InvalidRequest naming the first that is not one."""
    vocab_size = engine.base.vocab_size
    token_ids: list[int] = []
    for item in items:
        if type(item) is not int or not 0 <= item < vocab_size:
            raise InvalidRequest(f"{param} token ids must be 0 to {vocab_size - 1}, got {item!r:.80}.", param)
        token_ids.append(item)
    return tuple(token_ids)


def chat_messages(messages: Sequence[Message]) -> tuple[ChatMessage, ...]:
    """Messages for the template. Text parts are joined by newlines, as vLLM does."""
    return tuple(
        ChatMessage(
            role="system" if message.role == "developer" else message.role,
            content="\n".join(part.text for part in message.content),
            extra=(("name", message.name),) if message.name is not None else (),
        )
        for message in messages
    )


def num_message_chars(messages: Sequence[Message]) -> int:
    """Characters of all texts of a conversation."""
    return sum(len(part.text) for message in messages for part in message.content)


def chat_prompt(engine: EngineClient, body: ChatBody) -> Prompt:
    """The conversation as tokens. Raises InvalidRequest if the model has no chat template."""
    return Prompt(engine.encode_chat(chat_messages(body.messages), body.add_generation_prompt), "")


def check_fits(
    engine: EngineClient, prompt: Prompt, params: SamplingParams, param: str, limit_param: str = "max_tokens"
) -> None:
    """Raise InvalidRequest for an empty prompt and ContextTooLong for one that leaves no room for the answer."""
    num_prompt = len(prompt.token_ids)
    if num_prompt == 0:
        raise InvalidRequest("The prompt is empty; it must have at least one token.", param)
    if num_prompt >= engine.max_model_len:
        raise _too_long(engine, f"The prompt has {num_prompt} tokens and leaves no room for an answer", param)
    if params.max_tokens is not None and num_prompt + params.max_tokens > engine.max_model_len:
        raise _too_long(
            engine, f"The prompt has {num_prompt} tokens and {limit_param} is {params.max_tokens}", limit_param
        )
    if num_prompt + params.min_tokens > engine.max_model_len:
        raise _too_long(
            engine, f"The prompt has {num_prompt} tokens and min_tokens is {params.min_tokens}", "min_tokens"
        )


def _too_long(engine: EngineClient, what: str, param: str) -> ContextTooLong:
    return ContextTooLong(f"{what}; the model's context is {engine.max_model_len} tokens (--max-model-len).", param)
