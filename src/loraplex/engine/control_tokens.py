"""Keeps control-token spellings in client text from becoming control tokens.

A template must see the client's text as it is (it may trim it or search it), and one text with both kinds of spelling
must reach the tokenizer. So before rendering each spelling in client text gets a sentinel character inside; after it,
the spellings without a sentinel are the template's own. Those are renamed to aliases that nobody can guess, the
sentinels are taken out, and a second tokenizer that knows control tokens by their aliases only does the rest.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers

from loraplex.core.errors import BaseRefused, InvalidRequest, RefusalReason

# Noncharacters of Unicode: valid in a string, in no vocabulary, unchanged by case and white-space functions.
_SENTINELS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
_ALIAS_MARK = "\U0001fffe"


class Guard:
    """Marks the control tokens of one tokenizer in client text. `aliases` maps each spelling to its secret alias."""

    __slots__ = ("_any_case", "_exact", "_longest", "_starts", "aliases")

    def __init__(self, secret_by_spelling: Mapping[str, str]) -> None:
        self.aliases = {text: f"{_ALIAS_MARK}{key}{_ALIAS_MARK}" for text, key in secret_by_spelling.items()}
        self._exact = re.compile(_pattern(self.aliases))
        # A template may change case, so that "<|IM_END|>" becomes the token; to mark it does no harm.
        lowered = {text.lower() for text in self.aliases}
        self._any_case = re.compile(_pattern(lowered), re.IGNORECASE)
        # A beginning at the end of the text: the template or the next message may supply the rest.
        self._starts = frozenset(text[:size] for text in lowered for size in range(1, len(text)))
        self._longest = max(map(len, lowered), default=0)

    def sentinel_for(self, messages: Iterable[Mapping[str, str]]) -> str | None:
        """A character that occurs in none of the messages, or None when nothing in them needs to be marked."""
        values = [value for message in messages for value in message.values()]
        if not any(self._any_case.search(value) or self._open_end(value) for value in values):
            return None
        for sentinel in _SENTINELS:
            if not any(sentinel in value or _escaped(sentinel) in value.lower() for value in values):
                return sentinel
        raise InvalidRequest("the messages hold too many different Unicode noncharacters", "messages")

    def protect(self, text: str, sentinel: str) -> str:
        """`text` with the sentinel inside each spelling, and after a spelling's beginning at the end of the text."""
        if self._open_end(text):
            text += sentinel
        return self._any_case.sub(lambda match: match[0][0] + sentinel + match[0][1:], text)

    def reveal(self, rendered: str, sentinel: str) -> str:
        """The rendered text with the template's control tokens as aliases and the client's text as it was."""
        aliased = self._exact.sub(lambda match: self.aliases[match[0]], rendered)
        return aliased.replace(sentinel, "").replace(_escaped(sentinel), "")

    def _open_end(self, text: str) -> bool:
        tail = text[-self._longest :].lower() if self._longest else ""
        return any(tail[at:] in self._starts for at in range(len(tail)))


def _pattern(texts: Iterable[str]) -> str:
    """A regex for any of `texts`, the longest first, that reads each character once however many texts there are."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[:1], []).append(text[1:])
    optional = rests.pop("", None) is not None
    branches = [re.escape(first) + _pattern(rest) for first, rest in sorted(rests.items())]
    if not branches:
        return "" if optional else r"(?!)"
    if len(branches) == 1 and not optional:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if optional else ''}"


def _escaped(char: str) -> str:
    """The character as a JSON filter with `ensure_ascii` writes it."""
    return f"\\u{ord(char):04x}"


def without_control_spellings(document: dict[str, Any], aliases: Mapping[str, str]) -> tokenizers.Tokenizer:
    """The tokenizer of `document` (a parsed tokenizer.json) with control tokens renamed; their ids stay the same."""
    added = [{**e, "content": aliases.get(e["content"], e["content"])} for e in document["added_tokens"]]
    renamed_ids = {aliases[e["content"]]: e["id"] for e in document["added_tokens"] if e["content"] in aliases}
    model = _rename_in_model(document["model"], aliases, renamed_ids)
    return tokenizers.Tokenizer.from_str(json.dumps({**document, "added_tokens": added, "model": model}))


def _rename_in_model(
    model: Mapping[str, Any], aliases: Mapping[str, str], renamed_ids: Mapping[str, int]
) -> dict[str, Any]:
    """The model with control tokens renamed; in BPE no merge makes or uses one, so text cannot be merged into one."""
    if model["type"] not in ("BPE", "WordLevel"):
        kind = model["type"]
        raise BaseRefused(
            RefusalReason.FEATURE_UNSUPPORTED, f"tokenizer model {kind} is not supported; supported: BPE, WordLevel"
        )
    vocab = {token: token_id for token, token_id in model["vocab"].items() if token not in aliases} | {**renamed_ids}
    unknown = model.get("unk_token")
    if isinstance(unknown, str):
        unknown = aliases.get(unknown, unknown)
    if model["type"] == "WordLevel":
        return {**model, "vocab": vocab, "unk_token": unknown}
    pairs = [merge if isinstance(merge, list) else merge.split(" ", 1) for merge in model["merges"]]
    merges = [p for p in pairs if not (p[0] in aliases or p[1] in aliases or p[0] + p[1] in aliases)]
    return {**model, "vocab": vocab, "merges": merges, "unk_token": unknown}
