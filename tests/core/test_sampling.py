"""Limits, types and forms of sampling parameters."""

import math
from dataclasses import replace
from typing import Any

import pytest

from loraplex.core import InvalidRequest, SamplingParams, limits

INTEGERS = {
    "max_tokens": (1, limits.MAX_TOKENS),
    "min_tokens": (0, 16),  # the default of max_tokens
    "n": (1, limits.MAX_N),
    "top_k": (-1, limits.MAX_TOP_K),
    "seed": (limits.MIN_SEED, limits.MAX_SEED),
    "logprobs": (0, limits.MAX_LOGPROBS),
}
NUMBERS = {
    "temperature": (0.0, limits.MAX_TEMPERATURE),
    "top_p": (math.nextafter(0.0, 1.0), 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-limits.MAX_ABS_PENALTY, limits.MAX_ABS_PENALTY),
    "frequency_penalty": (-limits.MAX_ABS_PENALTY, limits.MAX_ABS_PENALTY),
    "repetition_penalty": (limits.MIN_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY),
}
FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
HUGE = pytest.param(10**5000, id="huge")  # Python refuses to print it
MINUS_HUGE = pytest.param(-(10**5000), id="minus huge")


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**fields)


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        params(**fields)
    return caught.value


def test_defaults_are_those_of_vllm() -> None:
    default = SamplingParams()
    assert (default.max_tokens, default.temperature, default.top_p, default.top_k, default.n) == (16, 1.0, 1.0, 0, 1)
    assert (default.stop, default.stop_token_ids, default.logit_bias, default.seed) == ((), (), (), None)
    assert default.skip_special_tokens


# ---------------------------------------------------------------------- limits
@pytest.mark.parametrize("name", INTEGERS)
def test_integer_limits_are_inclusive(name: str) -> None:
    low, high = INTEGERS[name]
    for value in (low, low + 1, high - 1, high):
        given = {"min_tokens": 0, name: value}
        assert getattr(params(**given), name) == value
    for value in (low - 1, high + 1):
        error = refusal(**{name: value})
        assert error.message == f"{name} must be between {low} and {high}, got {value}."
        assert error.param == name


@pytest.mark.parametrize("name", NUMBERS)
def test_number_limits_are_inclusive(name: str) -> None:
    low, high = NUMBERS[name]
    for value in (low, math.nextafter(low, high), math.nextafter(high, low), high):
        assert getattr(params(**{name: value}), name) == value
    for value in (math.nextafter(low, -math.inf), math.nextafter(high, math.inf)):
        error = refusal(**{name: value})
        assert error.param == name
        assert repr(value) in error.message


def test_top_p_zero_is_refused_with_the_way_out() -> None:
    assert refusal(top_p=0).message == "top_p must be above 0, got 0.0; use temperature 0 for greedy."


@pytest.mark.parametrize("max_tokens", [1, 5, 16])
def test_min_tokens_may_reach_max_tokens(max_tokens: int) -> None:
    assert params(max_tokens=max_tokens, min_tokens=max_tokens).min_tokens == max_tokens
    assert refusal(max_tokens=max_tokens, min_tokens=max_tokens + 1).param == "min_tokens"


def test_min_tokens_without_max_tokens_has_the_general_limit() -> None:
    assert params(max_tokens=None, min_tokens=limits.MAX_TOKENS).min_tokens == limits.MAX_TOKENS
    assert refusal(max_tokens=None, min_tokens=limits.MAX_TOKENS + 1).param == "min_tokens"


@pytest.mark.parametrize(
    ("name", "entry", "limit"),
    [
        ("stop", "x", limits.MAX_STOP_STRINGS),
        ("stop_token_ids", 1, limits.MAX_STOP_TOKEN_IDS),
        ("logit_bias", (1, 0.5), limits.MAX_LOGIT_BIAS),
    ],
)
def test_lists_are_bounded(name: str, entry: object, limit: int) -> None:
    for count in (0, limit - 1, limit):
        assert len(getattr(params(**{name: [entry] * count}), name)) == count
    error = refusal(**{name: [entry] * (limit + 1)})
    assert error.message == f"{name} may have at most {limit} entries, got {limit + 1}."
    assert error.param == name


def test_stop_strings_are_bounded() -> None:
    limit = limits.MAX_STOP_STRING_CHARS
    for length in (1, limit - 1, limit):
        assert params(stop=["é" * length]).stop == ("é" * length,)
    for length in (0, limit + 1, 1_000_000):
        error = refusal(stop=["é" * length])
        assert error.param == "stop"
        assert len(error.message) < 200


@pytest.mark.parametrize("token", [-1, 2**31, True, 1.0, "1", None, HUGE])
def test_token_ids_are_checked(token: object) -> None:
    assert refusal(stop_token_ids=[token]).param == "stop_token_ids"
    assert refusal(logit_bias=[(token, 1.0)]).param == "logit_bias"
    assert refusal(logit_bias={token: 1.0}).param == "logit_bias"


def test_largest_token_id_is_accepted() -> None:
    built = params(stop_token_ids=[0, 2**31 - 1], logit_bias={0: 100, 2**31 - 1: -100.0})
    assert built.stop_token_ids == (0, 2**31 - 1)
    assert built.logit_bias == ((0, 100), (2**31 - 1, -100.0))


@pytest.mark.parametrize("bias", [100.1, -100.1, math.nan, math.inf, True, "1", None, HUGE])
def test_bias_is_checked(bias: object) -> None:
    assert refusal(logit_bias={1: bias}).param == "logit_bias"


# ---------------------------------------------------------------------- types
@pytest.mark.parametrize("value", [True, False, "1", 1.0, math.nan, [1], HUGE, MINUS_HUGE])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_refuse_other_types(name: str, value: object) -> None:
    error = refusal(**{name: value})
    assert error.param == name
    assert len(error.message) < 200


@pytest.mark.parametrize("value", [True, False, "1", None, [1.0], math.nan, math.inf, -math.inf, HUGE, MINUS_HUGE])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_refuse_other_types(name: str, value: object) -> None:
    error = refusal(**{name: value})
    assert error.param == name
    assert len(error.message) < 200


@pytest.mark.parametrize("name", ["min_tokens", "n", "top_k"])
def test_required_integers_refuse_none(name: str) -> None:
    assert refusal(**{name: None}).param == name


@pytest.mark.parametrize("value", [0, 1, "false", None, 1.0])
@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_booleans(name: str, value: object) -> None:
    assert refusal(**{name: value}).message == f"{name} must be true or false, got {value!r}."
    assert getattr(params(**{name: True}), name) is True


@pytest.mark.parametrize("value", [0, 1, True, 2.5, {"a": 1}, {1}, b"ab"])
@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
def test_lists_refuse_other_types(name: str, value: object) -> None:
    error = refusal(**{name: value})
    assert error.param == name
    assert "must be a list" in error.message


def test_text_is_no_list_of_token_ids() -> None:
    assert refusal(stop_token_ids="12").param == "stop_token_ids"


@pytest.mark.parametrize("value", [0, True, "ab", [1], [(1,)], [(1, 2.0, 3)], ["ab"], [{1: 2.0}], [None]])
def test_bias_refuses_other_forms(value: object) -> None:
    assert refusal(logit_bias=value).param == "logit_bias"


@pytest.mark.parametrize("value", [[None], [1], [["a"]], [b"a"]])
def test_stop_entries_are_text(value: object) -> None:
    assert refusal(stop=value).param == "stop"


# ---------------------------------------------------------------------- forms
def test_lists_text_and_mappings_become_tuples() -> None:
    built = params(stop="end", stop_token_ids=[3, 4], logit_bias={5: 1.5, 6: -1})
    assert built.stop == ("end",)
    assert built.stop_token_ids == (3, 4)
    assert built.logit_bias == ((5, 1.5), (6, -1))
    assert params(stop=["a", "b"], logit_bias=[[5, 1.5]]).logit_bias == ((5, 1.5),)


def test_none_is_an_empty_list() -> None:
    assert params(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()


def test_every_form_is_hashable_and_equal() -> None:
    forms = [
        params(stop="a", stop_token_ids=[1], logit_bias={2: 0.5}),
        params(stop=["a"], stop_token_ids=(1,), logit_bias=[[2, 0.5]]),
        params(stop=("a",), stop_token_ids=(1,), logit_bias=((2, 0.5),)),
    ]
    assert len(set(forms)) == 1


def test_given_lists_are_copied() -> None:
    stops = [1]
    built = params(stop_token_ids=stops)
    stops.append(2)
    assert built.stop_token_ids == (1,)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (0.0, True), (-0.0, True), (1e-9, False), (1, False)])
def test_only_temperature_zero_is_greedy(temperature: float, greedy: bool) -> None:
    assert params(temperature=temperature).greedy is greedy


# ---------------------------------------------------------------------- what is not supported
@pytest.mark.parametrize(
    ("name", "neutral", "refused"),
    [
        ("best_of", [None, 1], [0, 2, True, "1"]),
        ("bad_words", [None, [], ()], [["a"], "", "a"]),
        ("prompt_logprobs", [None], [0, 1, False]),
        ("detokenize", [True], [False, None, 1]),
    ],
)
def test_unsupported_parameters_of_vllm_may_only_be_neutral(name: str, neutral: list[Any], refused: list[Any]) -> None:
    for value in neutral:
        assert params(**{name: value}) == SamplingParams()
    for value in refused:
        error = refusal(**{name: value})
        assert error.message.startswith(f"{name} is not supported (only {neutral[0]!r}")
        assert error.param == name


def test_a_copy_needs_no_unsupported_parameter() -> None:
    assert replace(params(best_of=1, seed=3), seed=4) == params(seed=4)


# ---------------------------------------------------------------------- vocabulary
@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias"])
def test_vocabulary_bounds_token_ids(name: str) -> None:
    def built(token: int) -> SamplingParams:
        return params(**{name: [token] if name == "stop_token_ids" else {token: 1.0}})

    for token in (0, 98, 99):
        built(token).check_vocabulary(100)
    for token in (100, 101, 2**31 - 1):
        with pytest.raises(InvalidRequest) as caught:
            built(token).check_vocabulary(100)
        assert caught.value.message == f"{name} must be between 0 and 99, got {token}."
        assert caught.value.param == name


def test_vocabulary_is_no_matter_without_token_ids() -> None:
    SamplingParams().check_vocabulary(1)
