"""The tokenizer that a GGUF file carries, as a `tokenizers` object and a tokenizer_config.json.

A GGUF names how text is split before BPE only by a word (`tokenizer.ggml.pre`). A word we do not know is refused: a
wrong split still yields text, only with other tokens than the model was trained on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from loraplex.core.errors import BaseRefused, RefusalReason

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_TAIL}"
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The split regex by `tokenizer.ggml.pre`; the empty one stands for the regex of GPT-2, which `ByteLevel` has built in.
_SPLITS = {
    "gpt-2": "",
    "smollm": "",
    "starcoder": "",
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "tekken": _TEKKEN_SPLIT,
}
_SINGLE_DIGITS = frozenset({"smollm", "starcoder"})
_WHOLE_WORDS_FIRST = frozenset({"llama3", "llama-v3", "llama-bpe", "tekken"})  # a word in the vocabulary is never split
_NFC = frozenset({"qwen2", "deepseek-r1-qwen"})

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of `tokenizer.ggml.token_type`
_SPECIAL_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def convert_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer described by the metadata `fields` of a GGUF. Raises BaseRefused for a kind we do not know."""
    kind = fields.get("tokenizer.ggml.model")
    tokens = fields.get("tokenizer.ggml.tokens")
    if not tokens:
        raise BaseRefused(RefusalReason.CONFIG_INVALID, "the GGUF holds no tokenizer (tokenizer.ggml.tokens)")
    if kind == "gpt2":
        tokenizer = _byte_level(fields, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(fields, tokens)
    else:
        raise BaseRefused(
            RefusalReason.FEATURE_UNSUPPORTED,
            f"tokenizer kind {kind!r} is not supported; supported: gpt2 (byte-level BPE), llama (SentencePiece BPE)",
            "tokenizer.ggml.model",
        )
    _add_tokens(tokenizer, tokens, fields.get("tokenizer.ggml.token_type") or ())
    _add_post_processor(tokenizer, fields, default_bos=kind == "llama")
    return tokenizer


def tokenizer_config(fields: Mapping[str, Any], max_len: int) -> dict[str, Any]:
    """The contents of tokenizer_config.json, chat template included."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
    }
    for name, key in _SPECIAL_NAMES.items():
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[name] = _token_at(fields["tokenizer.ggml.tokens"], token_id)
    template = fields.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    return config


def _byte_level(fields: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    pre = fields.get("tokenizer.ggml.pre")
    if pre not in _SPLITS:
        raise BaseRefused(
            RefusalReason.FEATURE_UNSUPPORTED,
            f"pre-tokenizer {pre!r} is not supported; supported: {', '.join(sorted(_SPLITS))}",
            "tokenizer.ggml.pre",
        )
    merges = [_merge_pair(merge) for merge in fields.get("tokenizer.ggml.merges") or ()]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre in _SINGLE_DIGITS else []
    if _SPLITS[pre]:
        steps.append(pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not _SPLITS[pre]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merge_pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(fields: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    """The shape of Llama 2's tokenizer.json, whose prefix space comes after every special token, as in llama.cpp."""
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown_id = fields.get("tokenizer.ggml.unknown_token_id", 0)
    types = fields.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    mergeable = {token: token_id for token, token_id in vocab.items() if types[token_id] == _NORMAL}
    merges = _merges_from_scores(mergeable, fields.get("tokenizer.ggml.scores") or ())
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab, merges=merges, unk_token=_token_at(tokens, unknown_id), fuse_unk=True, byte_fallback=True
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        decoding.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges_from_scores(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to build a token from two others, best token first: SentencePiece merges the pair of highest score."""
    if len(scores) <= max(vocab.values(), default=0):
        raise BaseRefused(
            RefusalReason.CONFIG_INVALID, f"the GGUF holds only {len(scores)} token scores", "tokenizer.ggml.scores"
        )
    found: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[token_id], vocab[left], vocab[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Control tokens become special; user-defined ones are matched whole in text, as llama.cpp does."""
    typed = list(zip(tokens, types, strict=False))
    control = [AddedToken(t, normalized=False, special=True) for t, kind in typed if kind in (_UNKNOWN, _CONTROL)]
    whole = [AddedToken(t, normalized=False, special=False) for t, kind in typed if kind == _USER_DEFINED]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(whole)


def _add_post_processor(tokenizer: Tokenizer, fields: Mapping[str, Any], default_bos: bool) -> None:
    template = ["$A"]
    special: list[tuple[str, int]] = []
    if fields.get("tokenizer.ggml.add_bos_token", default_bos):
        template.insert(0, _special(fields, "bos", special))
    if fields.get("tokenizer.ggml.add_eos_token", False):
        template.append(_special(fields, "eos", special))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)


def _special(fields: Mapping[str, Any], name: str, special: list[tuple[str, int]]) -> str:
    token_id = fields.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is None:
        raise BaseRefused(RefusalReason.CONFIG_INVALID, f"the GGUF wants a {name} token but names none")
    token = _token_at(fields["tokenizer.ggml.tokens"], token_id)
    special.append((token, token_id))
    return token


def _token_at(tokens: Sequence[str], token_id: int) -> str:
    if not 0 <= token_id < len(tokens):
        raise BaseRefused(
            RefusalReason.CONFIG_INVALID, f"the GGUF names token {token_id}, but has only {len(tokens)} tokens"
        )
    return tokens[token_id]
