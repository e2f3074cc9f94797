"""JSON as the artifact files need it: UTF-8, one object, and objects kept as pairs so that repeated keys are seen."""

import json
from dataclasses import dataclass

_MAX_DEPTH = 32  # far below Python's recursion limit, so later walks and `repr` are safe


class JsonError(ValueError):
    """The text is not what is wanted. The message never quotes the text."""


@dataclass(frozen=True, slots=True)
class JsonObject:
    """An object as written, repeated keys included. Arrays are plain lists."""

    pairs: tuple[tuple[str, object], ...]

    def repeated_key(self) -> str | None:
        """The first key that occurs twice, or None."""
        seen: set[str] = set()
        for key, _ in self.pairs:
            if key in seen:
                return key
            seen.add(key)
        return None

    def as_dict(self) -> dict[str, object]:
        """The pairs as a dict. Ask `repeated_key` first: here the last value of a key would win."""
        return dict(self.pairs)


def _keep_pairs(pairs: list[tuple[str, object]]) -> JsonObject:
    """Raise UnicodeEncodeError (a ValueError) for lone surrogates, which could not be written out again."""
    for key, value in pairs:
        key.encode()
        if isinstance(value, str):
            value.encode()
    return JsonObject(tuple(pairs))


def parse_json_object(data: bytes) -> JsonObject:
    """Parse one JSON object. NaN and Infinity are read as Python reads them. Raises JsonError."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_keep_pairs)
    except UnicodeDecodeError:
        raise JsonError("is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise JsonError(f"is not valid JSON (line {error.lineno}, column {error.colno})") from None
    except UnicodeEncodeError:
        raise JsonError("has a string that is not valid Unicode") from None
    except ValueError:
        raise JsonError("has a number with too many digits") from None
    except RecursionError:
        raise JsonError("is nested too deeply") from None
    if not isinstance(value, JsonObject):
        raise JsonError("is not a JSON object")
    _check_depth(value)
    return value


def _check_depth(value: JsonObject) -> None:
    """Raise JsonError if objects and arrays are nested deeper than `_MAX_DEPTH`. Does not recurse."""
    level: list[object] = [value]
    for _ in range(_MAX_DEPTH):
        inner: list[object] = []
        for item in level:
            if isinstance(item, JsonObject):
                inner.extend(member for _, member in item.pairs)
            elif isinstance(item, list):
                inner.extend(item)
        level = inner
        if not level:
            return
    raise JsonError("is nested too deeply")


def plain_object(value: JsonObject) -> dict[str, object]:
    """The object and all objects inside it as dicts. Raises JsonError on a repeated key at any depth."""
    key = value.repeated_key()
    if key is not None:
        raise JsonError(f"has the key {key!r:.120} twice")
    return {name: _plain(item) for name, item in value.pairs}


def _plain(value: object) -> object:
    if isinstance(value, JsonObject):
        return plain_object(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
