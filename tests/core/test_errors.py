"""The tree of errors: stable codes, and two sides."""

import re

import pytest

import loraplex.core.errors
from loraplex.core import (
    AdapterRefused,
    BaseRefused,
    ClientError,
    ContextTooLong,
    InvalidRequest,
    LoraplexError,
    ModelNotFound,
    Overloaded,
    RefusalReason,
    ServerError,
)

CODES = {
    "LoraplexError": "internal_error",
    "ClientError": "client_error",
    "InvalidRequest": "invalid_request",
    "ContextTooLong": "context_length_exceeded",
    "ModelNotFound": "model_not_found",
    "AdapterRefused": "adapter_refused",
    "BaseRefused": "base_refused",
    "ConfigError": "config_error",
    "ServerError": "server_error",
    "Overloaded": "overloaded",
    "CallerLimitReached": "caller_limit",
    "DeadlinePassed": "deadline_exceeded",
    "EngineDead": "engine_dead",
    "NonFiniteOutput": "non_finite_output",
}
ERRORS = {name: value for name, value in vars(loraplex.core.errors).items() if name in CODES}


def test_codes_are_stable_and_distinct() -> None:
    assert {name: error.code for name, error in ERRORS.items()} == CODES
    assert len(set(CODES.values())) == len(CODES)


def test_every_error_of_the_module_has_its_own_code() -> None:
    found = [
        error
        for error in vars(loraplex.core.errors).values()
        if isinstance(error, type) and issubclass(error, LoraplexError)
    ]
    assert {error.__name__ for error in found} == set(CODES)
    assert all("code" in vars(error) for error in found)


def test_every_error_is_the_callers_or_ours() -> None:
    for name, error in ERRORS.items():
        if name not in ("LoraplexError", "ClientError", "ServerError"):
            assert issubclass(error, ClientError) != issubclass(error, ServerError)


def test_tree_in_the_docstring_is_the_tree() -> None:
    drawn = re.findall(r"[─ ] (\w+) {2,}\w", loraplex.core.errors.__doc__ or "")
    assert {"LoraplexError", *drawn} == set(CODES)


@pytest.mark.parametrize("error", [AdapterRefused, BaseRefused])
def test_refusals_carry_reason_and_subject(error: type[AdapterRefused] | type[BaseRefused]) -> None:
    refused = error(RefusalReason.RANK_TOO_LARGE, "Rank 9 is over 8.", "r")
    assert (refused.reason_code, refused.subject, str(refused)) == ("RANK_TOO_LARGE", "r", "Rank 9 is over 8.")


def test_other_fields_of_errors() -> None:
    assert ContextTooLong("long", "prompt").param == "prompt"
    assert InvalidRequest("bad").param is None
    assert ModelNotFound("x").message == "The model 'x' does not exist."
    assert ModelNotFound("x").reason_code == "NOT_FOUND"
    assert Overloaded("full", 1.5).retry_after_s == 1.5


def test_reason_codes_are_their_names() -> None:
    assert all(reason.name == reason.value for reason in RefusalReason)
