"""What a body may hold before it is parsed: counted in its bytes, in time that no body can stretch.

Parsing makes an object of every value, 40 bytes and more for two characters, and holds the interpreter while it does.
The limits follow from what the API takes, so what they refuse no schema would have taken.
"""

from dataclasses import dataclass

from loraplex.core import InvalidRequest, limits

MAX_CONTAINERS = 4 * limits.MAX_MESSAGES  # of each message the object, the list of its parts, and two parts
MAX_STRINGS = 24 * limits.MAX_MESSAGES  # of each message its keys and values, and those of its parts
_BYTES_PER_TOKEN = 32  # of a text in JSON: a token of some scripts is three characters of six bytes each
_MIN_BODY_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Most bytes, values, strings (keys too), and arrays and objects together."""

    num_bytes: int
    num_values: int
    num_strings: int = MAX_STRINGS
    num_containers: int = MAX_CONTAINERS

    def check(self, data: bytes) -> None:
        """Raise InvalidRequest for a body that has too many parts. A few passes over the bytes, and no parsing."""
        unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in data else data
        self._hold("strings", unescaped.count(b'"') // 2, self.num_strings)
        outside = b"".join(unescaped.split(b'"')[::2])  # what stands in texts is no part of the structure
        self._hold("arrays and objects", outside.count(b"[") + outside.count(b"{"), self.num_containers)
        self._hold("values", outside.count(b",") + 1, self.num_values)

    @staticmethod
    def _hold(what: str, count: int, limit: int) -> None:
        if count > limit:
            raise InvalidRequest(f"The body has {count} {what}; the limit is {limit}.")


def body_limits(max_model_len: int, max_bytes: int | None = None) -> BodyLimits:
    """Limits for prompts of up to `max_model_len` tokens; `max_bytes` in place of the number that follows from it."""
    num_bytes = min(limits.MAX_BODY_BYTES, max(_MIN_BODY_BYTES, _BYTES_PER_TOKEN * max_model_len))
    return BodyLimits(max_bytes or num_bytes, 2 * (limits.MAX_DETOKENIZED_TOKENS + max_model_len))
