"""Sizes of memory."""

import pytest

from loraplex.cli.sizes import format_size, parse_size
from loraplex.core import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1073741824", 2**30),
        ("100B", 100),
        ("4k", 4096),
        ("4KiB", 4096),
        ("512M", 512 * 2**20),
        ("512MB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        (" 2 G ", 2**31),
        ("1T", 2**40),
    ],
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert parse_size(text, "--memory") == num_bytes


@pytest.mark.parametrize("text", ["", "G", "-1G", "1.G", ".5G", "1P", "1 GG", "1e9", "1,5G", "inf", "1Gibb"])
def test_what_is_no_size_is_refused_with_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--memory") as caught:
        parse_size(text, "--memory")
    assert repr(text) in caught.value.message


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1023, "0.999 KiB"),
        (1024, "1 KiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**40, "1 TiB"),
        (2**43, "8 TiB"),
    ],
)
def test_sizes_are_written(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text
