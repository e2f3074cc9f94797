"""Sizes of memory as people write and read them."""

import re

from loraplex.core import ConfigError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str, option: str) -> int:
    """Bytes of "512M", "1.5GiB" or "1073741824". Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{option} {text!r} is not a size; write for example 512M or 2G.")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_size(num_bytes: float) -> str:
    """For example "1.5 GiB"; three digits."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while num_bytes >= 999.5 and len(units) > 1:
        num_bytes /= 1024
        units.pop(0)
    return f"{num_bytes:.3g} {units[0]}"
