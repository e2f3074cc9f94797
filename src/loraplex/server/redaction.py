"""Keys never leave the server in a log line or an error, wherever a client put them."""

import re
from collections.abc import Mapping, MutableMapping
from typing import Any

from loraplex.registry.keys import PREFIX

REDACTED = "[redacted]"
_REGISTRY_KEY = re.compile(rf"{PREFIX}\w*", re.IGNORECASE | re.ASCII)
_MIN_PART_CHARS = 8  # of a configured key: messages cut what they quote, and less tells nothing


class Redactor:
    """Takes keys out of text: whatever looks like a registry's, and the one of a server without a registry.

    A beginning of a key, of 8 characters or more, is taken for the key.
    """

    __slots__ = ("_forms",)

    def __init__(self, api_key: str | None) -> None:
        written = {api_key, repr(api_key)[1:-1], api_key.replace("\\", "\\\\").replace('"', '\\"')} if api_key else ()
        self._forms = tuple(sorted((form for form in written if form), key=len, reverse=True))

    def text(self, text: str) -> str:
        """The text without keys."""
        for form in self._forms:
            text = _without(text, form)
        return _REGISTRY_KEY.sub(REDACTED, text)

    def value(self, value: object) -> object:
        """A field of a log line without keys, in whatever it holds."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value

    def __call__(self, logger: object, method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """A processor of structlog."""
        return {name: self.value(item) for name, item in fields.items()}


def _without(text: str, key: str) -> str:
    """The text without any beginning of `key` that has _MIN_PART_CHARS or more."""
    start = text.find(key[:_MIN_PART_CHARS])
    while start >= 0:
        end = start
        while end < len(text) and end - start < len(key) and text[end] == key[end - start]:
            end += 1
        text = text[:start] + REDACTED + text[end:]
        start = text.find(key[:_MIN_PART_CHARS], start + len(REDACTED))
    return text
