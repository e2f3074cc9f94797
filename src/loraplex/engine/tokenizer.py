"""Text to tokens and back: prompts, chats, streamed answers, stop strings.

Works on the `tokenizers` library alone: importing transformers takes seconds. What a client writes in a message cannot
become a control token; everything else is tokenised as transformers' `apply_chat_template` would.
"""

import codecs
import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from loraplex.core.errors import BaseRefused, InvalidRequest, RefusalReason
from loraplex.core.request import ChatMessage
from loraplex.engine.chat_template import ChatTemplate, load_chat_template, message_fields
from loraplex.engine.control_tokens import Guard, without_control_spellings

_LONG_TEXT_CHARS = 4096


@dataclass(frozen=True, slots=True)
class StopResult:
    """What streamed text came to: `text` may be sent now; `matched` is the stop string found, if one was."""

    text: str
    matched: str | None = None


class Tokenizer:
    """The tokenizer of one base model. Safe to use from several threads."""

    __slots__ = ("_chat_template", "_codec", "_guard", "_plain", "_tokens", "bos_token_id", "eos_token_ids")

    def __init__(
        self,
        tokens: tokenizers.Tokenizer,
        chat_template: ChatTemplate | None,
        eos_token_ids: frozenset[int],
        bos_token_id: int | None,
    ) -> None:
        tokens.no_truncation()
        tokens.no_padding()
        document = json.loads(tokens.to_str())
        control = {entry["content"]: secrets.token_hex(8) for entry in document["added_tokens"] if entry["special"]}
        self._tokens = tokens
        self._guard = Guard(control)
        self._plain = without_control_spellings(document, self._guard.aliases)
        self._codec = _PieceTable(tokens, document)
        self._chat_template = chat_template
        self.eos_token_ids = eos_token_ids
        self.bos_token_id = bos_token_id

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read tokenizer.json and what stands beside it. Raises BaseRefused when it is missing or unusable."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise BaseRefused(
                RefusalReason.CONFIG_MISSING,
                f"there is no tokenizer.json in {directory}; save one with transformers: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)",
                "tokenizer.json",
            )
        try:
            tokens = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
            raise BaseRefused(
                RefusalReason.CONFIG_INVALID, f"{path} is not a usable tokenizer: {error}", "tokenizer.json"
            ) from error
        config = _special_tokens(directory)
        return cls(tokens, load_chat_template(directory, config), *_end_and_begin(directory, tokens, config))

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` works."""
        return self._chat_template is not None

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included. The model's vocabulary may be padded beyond it."""
        return self._tokens.get_vocab_size(with_added_tokens=True)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of control tokens, which `decode` leaves out on request."""
        return self._codec.special_ids

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`, with begin and end tokens as tokenizer.json adds them.

        With `parse_special` False a spelled control token in `text` is text like any other.
        """
        tokens = self._tokens if parse_special else self._plain
        return _encode(tokens, text, add_special_tokens)

    def encode_chat(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation. Raises InvalidRequest when the template cannot render it."""
        if self._chat_template is None:
            raise InvalidRequest("this base model has no chat template; use /v1/completions", "messages")
        fields = message_fields(messages)
        sentinel = self._guard.sentinel_for(fields)
        if sentinel is None:
            text = self._chat_template.render(fields, add_generation_prompt)
            return _encode(self._tokens, text, add_special_tokens=False)
        guarded = [{k: v if k == "role" else self._guard.protect(v, sentinel) for k, v in m.items()} for m in fields]
        text = self._guard.reveal(self._chat_template.render(guarded, add_generation_prompt), sentinel)
        return _encode(self._plain, text, add_special_tokens=False)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids` from the beginning of a text; invalid UTF-8 becomes U+FFFD."""
        whole = Detokenizer(self._codec, skip_special_tokens, self._codec.strip_len)
        return whole.push(token_ids) + whole.flush()

    def token_text(self, token_id: int) -> str:
        """One token as text, control tokens included; for log probabilities."""
        return self._codec.piece(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, control tokens included."""
        return self._codec.piece(token_id)

    def detokenizer(self, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> "Detokenizer":
        """A stream that continues the prompt: decoding both at once gives the prompt's text and then the stream's."""
        continues = any(self._codec.text_piece(token_id, skip_special_tokens) for token_id in prompt_token_ids)
        return Detokenizer(self._codec, skip_special_tokens, 0 if continues else self._codec.strip_len)


class Detokenizer:
    """Turns the tokens of one sequence into text as they come, in time linear in the tokens.

    Bytes of an unfinished UTF-8 character wait for the next token, so no text once returned is ever revised.
    """

    __slots__ = ("_codec", "_decoder", "_skip_special", "_strip_left")

    def __init__(self, codec: "_PieceTable", skip_special_tokens: bool, strip_len: int) -> None:
        self._codec = codec
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._skip_special = skip_special_tokens
        self._strip_left = strip_len

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        data = b"".join(self._codec.text_piece(token_id, self._skip_special) for token_id in token_ids)
        return self._strip(self._decoder.decode(data))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        """Drop the space that SentencePiece puts before the first word."""
        while self._strip_left and text:
            if text[0] != " ":
                self._strip_left = 0
            else:
                self._strip_left -= 1
                text = text[1:]
        return text


class StopChecker:
    """Finds stop strings in streamed text. However the text is cut, the result is the same.

    The match is the one that ends first; of two ending at the same character, the longer.
    """

    __slots__ = ("_done", "_held", "_include_stop", "_stops")

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include_stop = include_stop
        self._held = ""
        self._done = False

    def push(self, text: str) -> StopResult:
        """Take more text. After a match nothing more is returned."""
        if self._done:
            return StopResult("")
        text = self._held + text
        found = [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, _, stop = min(found)
            self._done, self._held = True, ""
            return StopResult(text[:end] if self._include_stop else text[: end - len(stop)], stop)
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return StopResult(text[: len(text) - keep])

    def flush(self) -> str:
        """The text held back so far; call it when the sequence ends."""
        held, self._held, self._done = self._held, "", True
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        for size in range(min(len(text), max(map(len, self._stops), default=0) - 1), 0, -1):
            if any(len(stop) > size and text.endswith(stop[:size]) for stop in self._stops):
                return size
        return 0


class _PieceTable:
    """The bytes of each token, found once per token; one decoder for all sequences would have to see them whole."""

    __slots__ = ("_byte_level", "_is_words", "_pieces", "_replacements", "_tokens", "special_ids", "strip_len")

    def __init__(self, tokens: tokenizers.Tokenizer, document: dict[str, Any]) -> None:
        steps = _decoder_steps(document.get("decoder") or {})
        self._byte_level = steps[0]["type"] == "ByteLevel"
        self._replacements = [(s["pattern"]["String"], s["content"]) for s in steps if s["type"] == "Replace"]
        self._tokens = tokens
        self._pieces: dict[int, bytes] = {}
        self._is_words = steps[0]["type"] == "Words"
        self.strip_len: int = sum(step["start"] for step in steps if step["type"] in ("Strip", "Words"))
        self.special_ids = frozenset(entry["id"] for entry in document["added_tokens"] if entry["special"])

    def text_piece(self, token_id: int, skip_special: bool) -> bytes:
        """The bytes of a token, none for a control token that is to be skipped."""
        return b"" if skip_special and token_id in self.special_ids else self.piece(token_id)

    def piece(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id without a token, which a padded model can produce."""
        found = self._pieces.get(token_id)
        if found is None:
            found = self._pieces[token_id] = self._make_piece(self._tokens.id_to_token(token_id) or "")
        return found

    def _make_piece(self, token: str) -> bytes:
        if self._byte_level:
            if all(char in _BYTE_OF_CHAR for char in token):
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            return token.encode()
        if self._is_words:
            return b" " + token.encode()
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                pass
        return token.encode()


def _decoder_steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a decoder in tokenizer.json that works token by token. Raises BaseRefused for any other."""
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == [None]:  # whole words, a space before each but the first
        return [{"type": "Words", "start": 1}]
    if kinds == ["ByteLevel"]:
        return steps
    simple = all(
        kind in ("ByteFallback", "Fuse")
        or (kind == "Replace" and "String" in step["pattern"])
        or (kind == "Strip" and step["content"] == " " and not step["stop"] and "Fuse" in kinds)
        for kind, step in zip(kinds, steps, strict=True)
    )
    if simple and "ByteFallback" in kinds:
        return steps
    raise BaseRefused(
        RefusalReason.FEATURE_UNSUPPORTED,
        f"decoder {kinds} is not supported; supported: none, ByteLevel, and byte fallback as in Llama 2",
        "tokenizer.json",
    )


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable bytes stand for themselves, the rest for U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _encode(tokens: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids. `encode` keeps other threads waiting (0.6 s for 1 MB of text); the batch call does not."""
    try:
        if len(text) < _LONG_TEXT_CHARS:
            return tokens.encode(text, add_special_tokens=add_special_tokens).ids
        return tokens.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    except TypeError as error:  # what the library makes of half a surrogate pair, which JSON can spell
        raise InvalidRequest("the text is not valid Unicode: it holds a lone surrogate") from error


def _special_tokens(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json, which older models have as well."""
    return _read_json(directory / "special_tokens_map.json") | _read_json(directory / "tokenizer_config.json")


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty when there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BaseRefused(RefusalReason.CONFIG_INVALID, f"{path} is not JSON: {error}", path.name) from error
    if not isinstance(value, dict):
        raise BaseRefused(RefusalReason.CONFIG_INVALID, f"{path} is not a JSON object", path.name)
    return value


def _end_and_begin(
    directory: Path, tokens: tokenizers.Tokenizer, config: dict[str, Any]
) -> tuple[frozenset[int], int | None]:
    """End tokens: of generation_config.json, else of config.json, and the tokenizer's own. Begin token, if any."""
    model = _read_json(directory / "generation_config.json")
    if model.get("eos_token_id") is None:
        model = _read_json(directory / "config.json")
    ends = model.get("eos_token_id")
    found = [*(ends if isinstance(ends, list) else [ends]), _token_id(tokens, config.get("eos_token"))]
    if not all(end is None or isinstance(end, int) for end in found):
        raise BaseRefused(RefusalReason.CONFIG_INVALID, f"eos_token_id is {ends!r}, not a token id or a list of them")
    return frozenset(end for end in found if end is not None), _token_id(tokens, config.get("bos_token"))


def _token_id(tokens: tokenizers.Tokenizer, value: Any) -> int | None:
    text = value.get("content") if isinstance(value, dict) else value
    return tokens.token_to_id(text) if isinstance(text, str) else None
