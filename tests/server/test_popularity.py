"""What is popular, and the file that keeps it."""

import json
from pathlib import Path

import pytest

from loraplex.core import AdapterDigest
from loraplex.server.popularity import (
    HALF_LIFE_S,
    MAX_FILE_BYTES,
    MAX_NAMES,
    Popularity,
    Starts,
    read_scores,
    write_text,
)


def test_what_was_started_most_lately_comes_first() -> None:
    popularity = Popularity()
    popularity.note({"acme/old": 10.0, "acme/some": 1.0}, 60.0)
    popularity.note({"acme/new": 4.0}, 3 * HALF_LIFE_S)
    assert popularity.top(2) == ["acme/new", "acme/old"]
    assert popularity.top(9) == ["acme/new", "acme/old", "acme/some"]
    popularity.note({}, 40 * HALF_LIFE_S)
    assert popularity.top(9) == []


def test_no_more_names_are_kept_than_the_bound() -> None:
    popularity = Popularity()
    popularity.note({f"t/{number}": 1.0 + number for number in range(MAX_NAMES + 50)}, 1.0)
    assert len(popularity.top(2 * MAX_NAMES)) == MAX_NAMES
    assert f"t/{MAX_NAMES + 49}" in popularity.top(1)


def test_starts_are_counted_once_each_and_drained() -> None:
    starts, (a, b) = Starts(), map(AdapterDigest, "ab")
    for digest in (a, b, a, a):
        starts.note(digest)
    assert starts.drain() == {a: 3, b: 1}
    assert starts.drain() == {}
    starts.note(b)
    assert starts.drain() == {b: 1}


def test_adapters_started_once_are_forgotten_before_their_counts_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.server.popularity.MAX_NAMES", 10)
    starts = Starts()
    for number in range(1000):
        starts.note(AdapterDigest(f"once-{number}"))
        starts.note(AdapterDigest("often"))
        assert len(starts._counts) <= 20
    assert starts.drain()[AdapterDigest("often")] == 1000


def test_file_is_read_as_it_was_written_and_belongs_to_its_owner(tmp_path: Path) -> None:
    path, popularity = tmp_path / "recent.json", Popularity({"acme/one": 2.5, "b/x": 1.0})
    for _ in range(2):
        write_text(path, popularity.text())
    assert read_scores(path) == {"acme/one": 2.5, "b/x": 1.0}
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    assert read_scores(tmp_path / "missing.json") == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 2, "scores": {}}',
        '{"version": 1}',
        '{"version": 1, "scores": []}',
        '{"version": 1, "scores": {"a/b": "1"}}',
        '{"version": 1, "scores": {"a/b": true}}',
        '{"version": 1, "scores": {"a/b": -1}}',
        '{"version": 1, "scores": {"a/b": NaN}}',
        "[" * 100_000,
        " " * (MAX_FILE_BYTES + 1),
        json.dumps({"version": 1, "scores": {str(number): 1 for number in range(MAX_NAMES + 1)}}),
    ],
    ids=lambda text: text[:30] or "empty",
)
def test_damaged_file_is_told_as_such(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recent.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r".+"):
        read_scores(path)


def test_file_that_is_no_text_is_told_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / "recent.json"
    path.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(ValueError, match=r".+"):
        read_scores(path)
