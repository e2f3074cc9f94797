"""API keys as text, and their hashes."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.registry import keys
from loraplex.registry.keys import KEY_CHARS, ApiKey, hash_key, new_key, parse_key

PEPPER = b"p" * 32


def test_new_keys_parse_to_themselves_and_differ() -> None:
    made = [new_key() for _ in range(500)]
    assert len({key.reveal() for key in made}) == len({key.key_id for key in made}) == 500
    for key in made:
        parsed = parse_key(key.reveal())
        assert parsed is not None
        assert (parsed.key_id, parsed.reveal()) == (key.key_id, key.reveal())
        assert len(key.reveal()) == KEY_CHARS
        assert key.reveal().startswith(f"lpx_live_{key.key_id}_")


@given(st.integers(0, KEY_CHARS - 1), st.characters())
def test_one_changed_character_is_noticed_without_the_database(position: int, character: str) -> None:
    text = new_key().reveal()
    changed = text[:position] + character + text[position + 1 :]
    assert (parse_key(changed) is None) == (changed != text)


@given(st.text(max_size=100))
def test_junk_is_no_key(text: str) -> None:
    assert parse_key(text) is None


@pytest.mark.parametrize(
    "change", [str.upper, lambda text: text + "\n", lambda text: f" {text}"[:KEY_CHARS], str.title]
)
def test_other_spellings_are_no_key(change: "object") -> None:
    assert parse_key(change(new_key().reveal())) is None  # type: ignore[operator]


def test_without_the_checksum_guesses_would_reach_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the test above: the check must be what finds a changed character."""
    text = new_key().reveal()
    changed = text[:30] + ("A" if text[30] != "A" else "B") + text[31:]
    assert parse_key(changed) is None
    monkeypatch.setattr(keys, "_checksum", lambda body: changed[-6:])
    assert parse_key(changed) is not None


def test_a_key_does_not_show_itself() -> None:
    key = new_key()
    secret = key.reveal().rpartition("_")[2]
    for shown in (repr(key), str(key), f"{key}", f"{[key]}", "%s" % key):  # noqa: UP031
        assert secret not in shown
        assert key.key_id in shown
    for store in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            store(key)


def test_hash_covers_every_part_of_the_key_and_the_pepper() -> None:
    key = new_key()
    other = ApiKey(key.key_id, key.reveal()[:-1] + "z")
    hashes = {hash_key(key, PEPPER), hash_key(other, PEPPER), hash_key(key, b"q" * 32)}
    assert len(hashes) == 3
    assert all(len(value) == 32 for value in hashes)
