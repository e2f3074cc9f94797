"""What a request body must be: within its size, strict JSON, and of a schema that refuses what it does not know."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import TypeVar, cast

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message

from loraplex.core import InvalidRequest
from loraplex.server.schema import Body, is_one_of

BodyT = TypeVar("BodyT", bound=Body)


def limited(request: Request, max_bytes: int) -> Request:
    """The request with a bound on its body: over `max_bytes` is a 413.

    Raised here by its Content-Length, or later as soon as more has come in.
    """
    error = HTTPException(
        413, f"The request body is larger than the limit of {max_bytes} bytes.", {"Connection": "close"}
    )
    if _declared_len(request) > max_bytes:
        raise error
    receive, num_bytes = request.receive, 0

    async def counted() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise error
        return message

    return Request(request.scope, counted)


def _declared_len(request: Request) -> int:
    """Content-Length, or 0 if there is none that can be read; the bytes are counted in any case."""
    values = request.headers.getlist("content-length")
    return max((int(value) for value in values if value.isascii() and value.isdigit() and len(value) < 20), default=0)


def check_media_type(request: Request) -> None:
    """Raise HTTPException (415) unless the body is JSON as it is."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HTTPException(415, f"Content-Type must be application/json, got {media_type!r:.80}.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "Content-Encoding is not supported; send the body as it is.")


def parse_json(data: bytes) -> dict[str, object]:
    """A JSON object, read strictly: UTF-8, no duplicate keys, no NaN or infinities. Raises InvalidRequest."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant)
        if b"\\u" in data:  # an escape is the only way to write half a surrogate pair, which no tokenizer can take
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise InvalidRequest("The body is not valid Unicode text.") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return cast("dict[str, object]", value)


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise InvalidRequest(f"The key {twice!r:.80} stands twice in one object.", twice[:80])
    return result


def _refuse_constant(name: str) -> float:
    raise InvalidRequest(f"{name} is not a number of JSON.")


def validate(value: Mapping[str, object], schema: type[BodyT]) -> BodyT:
    """An instance of the schema. Raises InvalidRequest naming the field; null stands for an absent optional field."""
    fields = dict(value)
    for name, neutral in schema.unsupported.items():
        if name in fields and not is_one_of(fields.pop(name), (None, *neutral)):
            raise InvalidRequest(f"{name} is not supported{_allowed_note(neutral)}.", name)
    for name in fields.keys() - schema.model_fields.keys():
        raise InvalidRequest(f"Unknown field {name!r:.80}.", name[:80])
    given = {name: item for name, item in fields.items() if item is not None}
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        raise _as_invalid_request(error) from None


def _allowed_note(neutral: tuple[object, ...]) -> str:
    return f" (only {' or '.join(json.dumps(item) for item in neutral)})" if neutral else ""


def _as_invalid_request(error: ValidationError) -> InvalidRequest:
    """The first complaint of pydantic in our words, with the field it is about."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = ".".join(str(part) for part in first["loc"]) or "body"
    param = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "missing":
        return InvalidRequest(f"The field {path!r:.160} is required.", param)
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"Unknown field {path!r:.160}.", param)
    return InvalidRequest(f"{path:.160}: {first['msg']}; got {_shown(first['input'])}.", param)


def _shown(value: object) -> str:
    """A value for a message. What is long is not written out first, which takes 0.1 s for a body of 8 MB."""
    if isinstance(value, list | dict) and len(value) > 80:
        return f"{'an array' if isinstance(value, list) else 'an object'} of {len(value)} entries"
    return f"{value[:80] if isinstance(value, str) else value!r:.80}"
