"""What people pass to `LLM`, in any of its forms, as what the engine takes."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from loraplex.core import ChatMessage, ConfigError, InvalidRequest

Prompt = str | Sequence[int] | np.ndarray[Any, Any] | Mapping[str, Any]
"""A text, token ids (also of numpy), or vLLM's {"prompt": text} and {"prompt_token_ids": ids}."""

Conversation = Sequence[Mapping[str, Any]]
"""Messages with "role", "content" (a text, or a list of {"type": "text", "text": ...}) and maybe "name"."""


def _is_token(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def list_prompts(prompts: Any) -> list[Any]:
    """One prompt or many as a list of prompts."""
    if isinstance(prompts, np.ndarray):
        return list(prompts) if prompts.ndim > 1 else [prompts]
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    given = list(prompts)
    return [given] if given and _is_token(given[0]) else given


def plain_prompt(prompt: Any) -> str | tuple[int, ...]:
    """The text or token ids of a prompt in any of its forms. Raises InvalidRequest."""
    if isinstance(prompt, Mapping):
        known = [key for key in ("prompt", "prompt_token_ids") if key in prompt]
        if len(known) != 1 or len(prompt) != 1:
            raise InvalidRequest(
                f'a prompt mapping must have exactly "prompt" or "prompt_token_ids", got {sorted(map(str, prompt))}.',
                "prompts",
            )
        prompt = prompt[known[0]]
    if isinstance(prompt, str):
        return prompt
    ids = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
    if isinstance(ids, Sequence) and all(_is_token(token) for token in ids):
        return tuple(int(token) for token in ids)
    raise InvalidRequest(f"a prompt must be a text or token ids, got {prompt!r:.80}.", "prompts")


def spread(name: str, value: Any, count: int) -> list[Any]:
    """One value for each prompt: a list must have one each, anything else stands for all. Raises ConfigError."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ConfigError(f"{name} has {len(value)} entries for {count} prompts; give one, or one for each.")
    return list(value)


def list_conversations(messages: Any) -> list[list[ChatMessage]]:
    """One conversation or many. Raises InvalidRequest for what is no list of messages."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidRequest(f"messages must be a list, got {messages!r:.80}.", "messages")
    talks = [messages] if messages and isinstance(messages[0], Mapping) else messages
    return [_conversation(talk) for talk in talks]


def _conversation(talk: Any) -> list[ChatMessage]:
    if not isinstance(talk, Sequence) or isinstance(talk, str):
        raise InvalidRequest(f"a conversation must be a list of messages, got {talk!r:.80}.", "messages")
    return [_message(message) for message in talk]


def _message(message: Any) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f'a message must have "role" and "content", got {message!r:.80}.', "messages")
    unknown = sorted(str(k) for k, v in message.items() if k not in ("role", "content", "name") and v is not None)
    if unknown:
        raise InvalidRequest(f'a message may have "role", "content" and "name", got {unknown[0]!r:.80}.', "messages")
    role, content, name = (message.get(field) for field in ("role", "content", "name"))
    for field, value in (("role", role), ("name", name or "")):
        if not isinstance(value, str):
            raise InvalidRequest(f"{field} of a message must be a text, got {value!r:.80}.", "messages")
    extra = () if name is None else (("name", str(name)),)
    return ChatMessage("system" if role == "developer" else str(role), _text(content), extra)


def _text(content: Any) -> str:
    """Text parts are joined by newlines, as the server and vLLM do."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        return "\n".join(part["text"] for part in content)
    raise InvalidRequest(f"content of a message must be a text or text parts, got {content!r:.80}.", "messages")


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
