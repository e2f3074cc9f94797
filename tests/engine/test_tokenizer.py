"""The tokenizer against transformers, on the demo base and on two small tokenizers made here."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from platformdirs import user_cache_path
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from loraplex.core.errors import BaseRefused, ConfigError, InvalidRequest, RefusalReason
from loraplex.core.request import ChatMessage
from loraplex.engine.control_tokens import Guard
from loraplex.engine.tokenizer import StopChecker, Tokenizer

transformers = pytest.importorskip("transformers")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog does not mind it at all",
    "numbers 0123456789 and signs <|>_/ [] end start im user assistant system s",
    "naïve café über straße élan and some more text to learn the merges from",
] * 4


@dataclass(frozen=True)
class Pair:
    """Ours and the reference on the same directory."""

    directory: Path
    ours: Tokenizer
    reference: Any


def _pair(directory: Path) -> Pair:
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    return Pair(directory, Tokenizer.load(directory), reference)


def _write(tokens: tokenizers.Tokenizer, **config: Any) -> Path:
    directory = Path(mkdtemp(prefix="loraplex-test-"))
    tokens.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config})
    )
    return directory


@cache
def byte_level() -> Pair:
    """Byte-level BPE with ChatML, as SmolLM2 and Qwen have it."""
    tokens = tokenizers.Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokens.train_from_iterator(CORPUS, trainer)
    return _pair(_write(tokens, eos_token="<|im_end|>", chat_template=CHATML))


@cache
def byte_fallback() -> Pair:
    """SentencePiece-like BPE with byte fallback, a prefix space and a begin token, as Llama 2 has it."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    heads = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts = sorted(learned["vocab"], key=learned["vocab"].get)
    vocab = {token: token_id for token_id, token in enumerate([*heads, *texts])}
    merges = [tuple(merge) for merge in learned["merges"]]
    tokens = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokens.normalizer = trained.normalizer
    tokens.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in heads[:3]])
    tokens.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _pair(
        _write(
            tokens,
            bos_token="<s>",
            eos_token={"__type": "AddedToken", "content": "</s>"},
            unk_token="<unk>",
            chat_template=INST,
        )
    )


@cache
def demo() -> Pair:
    """The demo base; the test is skipped where it is not installed."""
    gguf_import = pytest.importorskip("loraplex.model.gguf_import")
    try:
        directory = gguf_import.ensure_demo_base(user_cache_path("loraplex") / "smollm2-135m-instruct")
    except ConfigError as error:
        pytest.skip(error.message)
    return Pair(directory, Tokenizer.load(directory), transformers.AutoTokenizer.from_pretrained(directory))


UNHURRIED = settings(deadline=None)  # the first example makes the tokenizer
PAIRS = pytest.mark.parametrize("make", [byte_level, byte_fallback, demo])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def _messages(*contents: str) -> list[ChatMessage]:
    roles = ("user", "assistant")
    return [ChatMessage(roles[at % 2], content) for at, content in enumerate(contents)]


def _reference_chat(pair: Pair, messages: list[ChatMessage], prompt: bool = True) -> list[int]:
    plain = [{"role": m.role, "content": m.content} for m in messages]
    return list(pair.reference.apply_chat_template(plain, add_generation_prompt=prompt, return_dict=False))


def _is_ordinary(pair: Pair, *texts: str) -> bool:
    return not any(special in text for special in pair.reference.all_special_tokens for text in texts)


@PAIRS
@UNHURRIED
@given(text=TEXT)
def test_encode_and_decode_equal_transformers(make: Any, text: str) -> None:
    pair = make()
    for add_special in (True, False):
        ids = pair.ours.encode(text, add_special_tokens=add_special)
        assert ids == pair.reference.encode(text, add_special_tokens=add_special)
        assert pair.ours.decode(ids) == pair.reference.decode(ids, skip_special_tokens=True)
        assert pair.ours.decode(ids, skip_special_tokens=False) == pair.reference.decode(ids)


@PAIRS
@UNHURRIED
@given(first=TEXT, second=TEXT, prompt=st.booleans())
def test_chat_equals_transformers_for_ordinary_text(make: Any, first: str, second: str, prompt: bool) -> None:
    pair = make()
    assume(_is_ordinary(pair, first, second))
    for messages in (_messages(first), _messages(first, second, second), _messages(first + " <", second + "<|im_")):
        assert pair.ours.encode_chat(messages, prompt) == _reference_chat(pair, messages, prompt)


@PAIRS
def test_chat_of_ordinary_words_equals_transformers(make: Any) -> None:
    pair = make()
    messages = _messages("  What is 1 < 2?\n", "It is true. ☕ 日本", "x <= y, [INST] s> <s\n\n")
    assert pair.ours.encode_chat(messages) == _reference_chat(pair, messages)


def _hostile(pair: Pair) -> Iterator[str]:
    for special in pair.reference.all_special_tokens:
        yield f"a {special}b{special * 2}"
        yield special.upper()
        yield special[:-1]
        yield special[0] + special


@PAIRS
@pytest.mark.parametrize("change", ["", " | trim", " | lower", " | upper", " | tojson", " | replace('x', 'y')"])
def test_spelled_control_tokens_stay_text(make: Any, change: str, tmp_path: Path) -> None:
    pair = make()
    source = json.loads((pair.directory / "tokenizer_config.json").read_text())["chat_template"]
    source = source.replace("m['content']", f"m['content']{change}").replace("| trim | trim", "| trim")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((pair.directory / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(source)
    ours = Tokenizer.load(tmp_path)

    def control(content: str) -> list[int]:
        return [t for t in ours.encode_chat(_messages(content, content)) if t in ours.special_token_ids]

    neutral = control("nothing special")
    for content in _hostile(pair):
        assert control(content) == neutral, content


@PAIRS
@UNHURRIED
@given(data=st.data())
def test_no_mixture_of_spellings_becomes_a_control_token(make: Any, data: st.DataObject) -> None:
    pair = make()
    special = pair.reference.all_special_tokens
    parts = st.sampled_from([*special, *(s[:3] for s in special), *(s[3:] for s in special), "<", " ", "x", "\ufdd0"])
    content = "".join(data.draw(st.lists(parts, max_size=8)))
    ids = pair.ours.encode_chat(_messages(content, content))
    neutral = pair.ours.encode_chat(_messages("x", "x"))
    assert [t for t in ids if t in pair.ours.special_token_ids] == [
        t for t in neutral if t in pair.ours.special_token_ids
    ]
    assert content.replace("\ufdd0", "").strip() in pair.ours.decode(ids).replace("\ufdd0", "")


def test_split_spelling_over_two_messages_stays_text(tmp_path: Path) -> None:
    pair = byte_level()
    (tmp_path / "tokenizer.json").write_bytes((pair.directory / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    ours = Tokenizer.load(tmp_path)
    ids = ours.encode_chat(_messages("a<|im_", "end|>"))
    assert not set(ids) & ours.special_token_ids
    assert ours.decode(ids) == "a<|im_end|>"


@PAIRS
def test_plain_encoding_differs_only_for_control_tokens(make: Any) -> None:
    pair = make()
    text = "1 < 2 and  [x] é\n"
    assert pair.ours.encode(text, parse_special=False) == pair.ours.encode(text)
    for special in pair.reference.all_special_tokens:
        ids = pair.ours.encode(f"a {special} b", add_special_tokens=False, parse_special=False)
        assert not set(ids) & pair.ours.special_token_ids
        assert pair.ours.decode(ids) == f"a {special} b"


@PAIRS
def test_long_text_is_encoded_like_short_text(make: Any) -> None:
    pair = make()
    text = "The quick brown fox, 日本 and 12345 more. " * 200
    assert len(text) > 4096
    assert pair.ours.encode(text) == pair.reference.encode(text)
    with pytest.raises(InvalidRequest, match="surrogate"):
        pair.ours.encode(text + "\ud800")


def test_guard_finds_the_longest_spelling_first() -> None:
    guard = Guard({"<a": "1", "<a>": "2", "<b>": "3"})
    assert guard.reveal("<a><a<b>", "\ufdd0") == guard.aliases["<a>"] + guard.aliases["<a"] + guard.aliases["<b>"]
    assert guard.protect("x<A>", "\ufdd0") == "x<\ufdd0A>"


def test_lone_surrogate_is_a_client_error() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        byte_level().ours.encode("a\ud800")
    with pytest.raises(InvalidRequest, match="surrogate"):
        byte_level().ours.encode_chat(_messages("\ud800"))


def _chunks(data: st.DataObject, size: int) -> list[slice]:
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=6)))
    return [slice(a, b) for a, b in zip([0, *cuts], [*cuts, size], strict=True)]


@PAIRS
@UNHURRIED
@given(text=TEXT, data=st.data())
def test_streamed_text_equals_full_decode(make: Any, text: str, data: st.DataObject) -> None:
    pair = make()
    ids = pair.ours.encode(text)
    stream = pair.ours.detokenizer()
    streamed = "".join(stream.push(ids[part]) for part in _chunks(data, len(ids))) + stream.flush()
    assert streamed == pair.reference.decode(ids, skip_special_tokens=True)


@PAIRS
@UNHURRIED
@given(data=st.data(), skip=st.booleans())
def test_any_tokens_stream_to_their_decoding(make: Any, data: st.DataObject, skip: bool) -> None:
    ours = make().ours
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 3), max_size=30))
    stream = ours.detokenizer(skip_special_tokens=skip)
    streamed = "".join(stream.push(ids[part]) for part in _chunks(data, len(ids))) + stream.flush()
    assert streamed == ours.decode(ids, skip)
    assert streamed.encode().decode() == streamed


@PAIRS
@UNHURRIED
@given(text=TEXT, data=st.data())
def test_stream_continues_its_prompt(make: Any, text: str, data: st.DataObject) -> None:
    ours = make().ours
    ids = ours.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    begin = ours.decode(ids[:cut])
    assume("\ufffd" not in begin)
    stream = ours.detokenizer(ids[:cut])
    assert begin + stream.push(ids[cut:]) + stream.flush() == ours.decode(ids)


def test_unfinished_character_is_held_back() -> None:
    ours = byte_fallback().ours
    ids = ours.encode("a€", add_special_tokens=False)
    stream = ours.detokenizer()
    assert [stream.push([token_id]) for token_id in ids][-4:] == ["a", "", "", "€"]
    assert stream.push(ids[-3:-1]) == ""
    assert stream.flush() == "\ufffd"


def _stop_reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the first character at which a stop string ends, the longest that does."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(
    text=st.text("abc\n", max_size=40),
    stops=st.lists(st.text("abc\n", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    data=st.data(),
)
def test_stop_strings_never_leak_however_text_is_cut(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    checker = StopChecker(stops, include_stop=include)
    sent, matched = "", None
    for part in _chunks(data, len(text)):
        result = checker.push(text[part])
        sent += result.text
        matched = matched or result.matched
        assert matched or not any(stop in sent for stop in stops)
    sent += checker.flush()
    expected, stop = _stop_reference(text, stops)
    assert (sent, matched) == (expected + (stop if include and stop else ""), stop)


def test_text_after_a_match_is_dropped() -> None:
    checker = StopChecker(["END"])
    assert checker.push("one EN").text == "one "
    result = checker.push("D two")
    assert (result.text, result.matched) == ("", "END")
    assert checker.push("three").text == checker.flush() == ""


def test_held_text_comes_at_the_end() -> None:
    checker = StopChecker(["\n\n"])
    assert checker.push("a\n").text == "a"
    assert checker.flush() == "\n"


def test_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BaseRefused) as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.reason is RefusalReason.CONFIG_MISSING
    assert "tokenizer.json" in caught.value.message


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"model": 1}', '{"version": "1.0", "model": {"type": "BPE"}}'], ids=range(4)
)
def test_broken_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BaseRefused) as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.reason is RefusalReason.CONFIG_INVALID


def test_unknown_decoder_is_refused(tmp_path: Path) -> None:
    tokens = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokens.decoder = decoders.WordPiece()
    tokens.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BaseRefused) as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.reason is RefusalReason.FEATURE_UNSUPPORTED


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [0, 1]}, {"eos_token_id": 9}, {0, 1, 2}),
        ({"eos_token_id": 1}, {}, {1, 2}),
        ({}, {"eos_token_id": 0}, {0, 2}),
        ({}, {}, {2}),
    ],
)
def test_end_tokens(tmp_path: Path, generation: dict[str, Any], config: dict[str, Any], expected: set[int]) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((byte_level().directory / name).read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).eos_token_ids == expected


def test_unusable_end_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((byte_level().directory / "tokenizer.json").read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["two"]}')
    with pytest.raises(BaseRefused, match="two"):
        Tokenizer.load(tmp_path)


def test_without_a_template_chat_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((byte_level().directory / "tokenizer.json").read_bytes())
    ours = Tokenizer.load(tmp_path)
    assert not ours.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        ours.encode_chat(_messages("x"))


def test_ids_without_a_token_are_empty() -> None:
    ours = byte_level().ours
    assert ours.token_bytes(ours.vocab_size + 100) == b""
    assert ours.token_text(ours.encode("<|im_end|>")[0]) == "<|im_end|>"
