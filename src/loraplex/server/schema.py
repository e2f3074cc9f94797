"""The request bodies. A field that is not here is a 400 naming it; nothing is ignored but the fields listed below.

Taken and without effect, because they cannot change an answer: `user`, `safety_identifier`, `prompt_cache_key`,
`metadata`, `store` (false only) and `service_tier` ("auto" or "default" only).
`unsupported` names fields of OpenAI or vLLM that would change an answer, with the values that ask for nothing.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field

from loraplex.core import limits
from loraplex.core.request import MAX_PRIORITY

MAX_PATH_CHARS = 4096
Neutral = Mapping[str, tuple[object, ...]]

_COMMON_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "beam_width": (),
    "cache_salt": (),
    "detokenize": (True,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
_COMPLETION_UNSUPPORTED: dict[str, tuple[object, ...]] = {"best_of": (1,), "prompt_embeds": (), "suffix": ("",)}
_CHAT_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}


def is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    """True if `value` equals one of `allowed` and has its type: True is not 1."""
    return any(type(value) is type(item) and value == item for item in allowed)


def _as_texts(value: object) -> object:
    """One stop string stands for a list of it."""
    return [value] if isinstance(value, str) else value


def _as_parts(value: object) -> object:
    """A plain text stands for one text part."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _check_false(value: bool) -> bool:
    if value:
        raise ValueError("only false is supported")
    return value


_AlwaysFalse = Annotated[bool, AfterValidator(_check_false)]
"""A Literal[False] would also take 0."""


class Strict(BaseModel):
    """No coercion ("5" is not 5, true is not 1) and no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Body(Strict):
    """A whole request body."""

    unsupported: ClassVar[Neutral] = MappingProxyType({})


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: _AlwaysFalse = False
    continuous_usage_stats: _AlwaysFalse = False


class GenerationBody(Body):
    """What both generating routes share: OpenAI's sampling fields and vLLM's. Ranges are checked by SamplingParams."""

    model: str | None = Field(default=None, min_length=1, max_length=limits.MAX_MODEL_NAME_CHARS)
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Annotated[list[str], FailFast(), BeforeValidator(_as_texts)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[int], FailFast()] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: dict[str, object] = Field(default_factory=dict)  # by token id; SamplingParams checks the numbers
    skip_special_tokens: bool = True
    priority: int | None = Field(default=None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)  # as in vLLM: lower is earlier
    deadline_s: float | None = Field(default=None, gt=0, le=limits.MAX_DEADLINE_S)  # after the request's arrival
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, object] | None = None
    store: _AlwaysFalse | None = None
    service_tier: Literal["auto", "default"] | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions. `prompt` is checked by `prompts.completion_prompts`, whose messages name the entry."""

    unsupported: ClassVar[Neutral] = MappingProxyType(_COMMON_UNSUPPORTED | _COMPLETION_UNSUPPORTED)

    prompt: object
    max_tokens: int = 16
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    """One message. `developer` is passed to the template as `system`. The null fields come back from old answers."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], FailFast(), BeforeValidator(_as_parts)]
    name: str | None = Field(default=None, max_length=64)
    refusal: None = None
    audio: None = None
    annotations: None = None
    function_call: None = None
    tool_calls: None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    unsupported: ClassVar[Neutral] = MappingProxyType(_COMMON_UNSUPPORTED | _CHAT_UNSUPPORTED)

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=limits.MAX_MESSAGES)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True


class TokenizeBody(Body):
    """POST /tokenize: a text or a conversation, exactly one of them."""

    model: str | None = Field(default=None, max_length=limits.MAX_MODEL_NAME_CHARS)
    prompt: str | None = None
    messages: Annotated[list[Message], FailFast()] = Field(default_factory=list, max_length=limits.MAX_MESSAGES)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = Field(default=None, max_length=limits.MAX_MODEL_NAME_CHARS)
    tokens: Annotated[list[int], FailFast()] = Field(max_length=limits.MAX_DETOKENIZED_TOKENS)


class LoadAdapterBody(Body):
    """POST /v1/load_lora_adapter. What is empty or missing gets vLLM's answer, not that of a schema."""

    lora_name: str = Field(default="", max_length=limits.MAX_MODEL_NAME_CHARS)
    lora_path: str = Field(default="", max_length=MAX_PATH_CHARS)
    load_inplace: bool = False
    base_fingerprint: str | None = Field(default=None, min_length=64, max_length=64, pattern="^[0-9a-f]*$")


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter. Adapters have no numbers here, so `lora_int_id` finds nothing."""

    lora_name: str = Field(default="", max_length=limits.MAX_MODEL_NAME_CHARS)
    lora_int_id: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
