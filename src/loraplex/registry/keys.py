"""API keys as text: `lpx_live_<id, 12 base32>_<secret, 32 base62><checksum, 6 base62>`.

The secret has 190 random bits, so one HMAC is enough to store it. The checksum is CRC-32 of all before it; scanners for
leaked keys and the server tell junk from keys by it, without the database.
"""

import hashlib
import hmac
import re
import secrets
import zlib

from loraplex.registry.types import KeyId

PREFIX = "lpx_live_"
_BASE32 = "abcdefghijklmnopqrstuvwxyz234567"
_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_CHARS, _SECRET_CHARS, _CHECKSUM_CHARS = 12, 32, 6
KEY_CHARS = len(PREFIX) + _ID_CHARS + 1 + _SECRET_CHARS + _CHECKSUM_CHARS
_ID = re.compile(rf"[a-z2-7]{{{_ID_CHARS}}}")
_FORM = re.compile(rf"{PREFIX}([a-z2-7]{{{_ID_CHARS}}})_[0-9A-Za-z]{{{_SECRET_CHARS + _CHECKSUM_CHARS}}}")


class ApiKey:
    """The text of a key. It shows itself only through `reveal`; printing, logging and formatting give the id."""

    __slots__ = ("_text", "key_id")

    def __init__(self, key_id: KeyId, text: str) -> None:
        self.key_id = key_id
        self._text = text

    def reveal(self) -> str:
        """The whole key. Show it to its owner once; never log it."""
        return self._text

    def __repr__(self) -> str:
        return f"ApiKey({PREFIX}{self.key_id}_***)"

    def __reduce__(self) -> str:
        raise TypeError("an API key is not to be stored")


def new_key() -> ApiKey:
    """A fresh key from the system's random source."""
    key_id = "".join(secrets.choice(_BASE32) for _ in range(_ID_CHARS))
    body = f"{PREFIX}{key_id}_" + "".join(secrets.choice(_BASE62) for _ in range(_SECRET_CHARS))
    return ApiKey(KeyId(key_id), body + _checksum(body))


def parse_key(text: str) -> ApiKey | None:
    """The key that a client sent, or None for what no key looks like: length, alphabet, checksum."""
    if len(text) != KEY_CHARS:
        return None
    form = _FORM.fullmatch(text)
    body, checksum = text[:-_CHECKSUM_CHARS], text[-_CHECKSUM_CHARS:]
    if form is None or _checksum(body) != checksum:
        return None
    return ApiKey(KeyId(form.group(1)), text)


def is_key_id(text: str) -> bool:
    """True for what may be the id of a key."""
    return _ID.fullmatch(text) is not None


def hash_key(key: ApiKey, pepper: bytes) -> bytes:
    """HMAC-SHA256 over the whole key, id and prefix included: what is stored and compared."""
    return hmac.digest(pepper, key.reveal().encode(), hashlib.sha256)


def _checksum(body: str) -> str:
    value = zlib.crc32(body.encode())
    digits = []
    for _ in range(_CHECKSUM_CHARS):
        value, digit = divmod(value, 62)
        digits.append(_BASE62[digit])
    return "".join(reversed(digits))
