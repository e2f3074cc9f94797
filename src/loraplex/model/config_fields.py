"""Typed access to config.json. Whatever is wrong is refused with the field's name."""

from collections.abc import Mapping
from typing import Any

from loraplex.core import BaseRefused, RefusalReason

_LARGEST = 1e30  # of any number in a config; the largest in use are rotary bases of about 1e9


def refuse(field: str, message: str, reason: RefusalReason = RefusalReason.FIELD_INVALID) -> BaseRefused:
    """The error for a field of config.json."""
    return BaseRefused(reason, f"config.json: {message}", field)


class Fields:
    """The fields of one JSON object. Absent and null mean the default."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def positive_int(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise refuse(name, f"{name} must be a positive integer, got {value!r}.")
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number of 0 or more: none of those in a config may be negative."""
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST:
            raise refuse(name, f"{name} must be a number from 0 to {_LARGEST}, got {value!r:.80}.")
        return float(value)

    def positive_number(self, name: str, default: float) -> float:
        value = self.number(name, default)
        if value == 0.0:
            raise refuse(name, f"{name} must be above 0.")
        return value

    def flag(self, name: str | None, default: bool = False) -> bool:
        value = self.raw.get(name) if name else None
        value = default if value is None else value
        if not isinstance(value, bool):
            raise refuse(str(name), f"{name} must be true or false, got {value!r}.")
        return value
